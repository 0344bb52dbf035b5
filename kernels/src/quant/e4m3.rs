//! E4M3: 8-bit floats.

/// The value of an E4M3 float: four exponent bits, three fraction bits, no infinities (FP8;
/// Micikevicius et al., 2022).
pub fn e4m3_value(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-9),
        _ => (8.0 + fraction) * 2f32.powi(exponent - 10),
    };
    if byte & 128 == 0 { magnitude } else { -magnitude }
}
