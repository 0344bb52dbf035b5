//! Search for the scale of a group of weights.

use half::f16;

/// Candidate scales, as multiples of the scale that maps the largest magnitude to the lowest level.
const TRIED: [f32; 15] = [1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7, 1.03, 1.06, 1.1, 1.14];

/// The nearest integer, for magnitudes below 2^22.
#[inline(always)]
fn nearest(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    value + SHIFT - SHIFT
}

/// Quantizes a group to nibbles from -8 to 7 and returns the scale with the smallest squared error
/// among the candidates and their least-squares refinements. NaN if the group contains NaN.
pub(crate) fn nibbles(group: &[f32], codes: &mut [u8]) -> f32 {
    scale_of_nibbles(group, codes, |scale| scale)
}

/// [`nibbles`] with a scale representable in f16.
pub(crate) fn half_nibbles(group: &[f32], codes: &mut [u8]) -> f32 {
    scale_of_nibbles(group, codes, |scale| f16::from_f32(scale.clamp(-65504.0, 65504.0)).to_f32())
}

fn scale_of_nibbles(group: &[f32], codes: &mut [u8], stored: impl Fn(f32) -> f32) -> f32 {
    let sum: f32 = group.iter().sum();
    let extreme = group.iter().fold(0.0f32, |extreme, x| if x.abs() > extreme.abs() { *x } else { extreme });
    codes.fill(8);
    if extreme == 0.0 || sum.is_nan() || !extreme.is_finite() {
        return if sum.is_nan() || !extreme.is_finite() { f32::NAN } else { 0.0 };
    }
    let mut best = (0.0, f32::INFINITY);
    for tried in TRIED {
        // The largest magnitude at the lowest level, since there is one more level below 0.
        let mut scale = stored(extreme / -8.0 * tried);
        for _ in 0..2 {
            if scale == 0.0 {
                break;
            }
            let by = 1.0 / scale;
            let (mut error, mut xq, mut qq) = (0.0f32, 0.0f32, 0.0f32);
            for x in group {
                let q = nearest((x * by).clamp(-8.0, 7.0));
                let off = x - scale * q;
                error += off * off;
                xq += x * q;
                qq += q * q;
            }
            if error < best.1 {
                best = (scale, error);
            }
            if qq == 0.0 {
                break;
            }
            scale = stored(xq / qq);
        }
    }
    let scale = best.0;
    if scale != 0.0 {
        let by = 1.0 / scale;
        codes.iter_mut().zip(group).for_each(|(code, x)| *code = (nearest((x * by).clamp(-8.0, 7.0)) + 8.0) as u8);
    }
    scale
}

/// Quantizes a group to the nearest entries of a table from -1 to 1; returns the scale, the largest
/// magnitude.
pub(crate) fn of_table(table: &[f32; 16], group: &[f32], codes: &mut [u8]) -> f32 {
    let (largest, sum) = group.iter().fold((0.0f32, 0.0f32), |(most, sum), x| (most.max(x.abs()), sum + x));
    let by = if largest == 0.0 { 0.0 } else { 1.0 / largest };
    for (code, x) in codes.iter_mut().zip(group) {
        let (x, mut best) = (x * by, (0, f32::INFINITY));
        for (at, entry) in table.iter().enumerate() {
            let off = (entry - x).abs();
            if off < best.1 {
                best = (at, off);
            }
        }
        *code = best.0 as u8;
    }
    if sum.is_nan() { f32::NAN } else { largest }
}

/// Quantizes a group to the nearest E4M3 floats; returns the scale that maps the largest magnitude
/// to 448.
pub(crate) fn e4m3(group: &[f32], codes: &mut [u8]) -> f32 {
    let (largest, sum) = group.iter().fold((0.0f32, 0.0f32), |(most, sum), x| (most.max(x.abs()), sum + x));
    let scale = largest / 448.0;
    let by = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    codes.iter_mut().zip(group).for_each(|(code, x)| *code = e4m3_of(x * by));
    if sum.is_nan() { f32::NAN } else { scale }
}

/// The nearest E4M3 float, ties to even, saturating at 448.
fn e4m3_of(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 128 } else { 0 };
    let magnitude = value.abs().min(448.0);
    if magnitude.is_nan() {
        return sign | 127;
    }
    // Steps are 2^-9 below 2^-6, and an eighth of the power of two above.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let step = 2f32.powi(exponent - 3);
    let steps = nearest(magnitude / step) as u32;
    // Sixteen steps carry into the next power.
    let code = if exponent == -6 { steps } else { (exponent + 6) as u32 * 8 + steps };
    sign | code.min(126) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::e4m3_value as value_of;

    #[test]
    fn e4m3_floats_are_the_nearest_ones() {
        for code in (0..=126).chain(128..=254) {
            assert_eq!(e4m3_of(value_of(code)), code, "{code:#x}");
        }
        for code in 0..126 {
            let (one, next) = (value_of(code), value_of(code + 1));
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(e4m3_of((one + next) / 2.0), even, "between {one} and {next}");
            assert_eq!(e4m3_of(one * 0.4 + next * 0.6), code + 1, "near {next}");
        }
        assert_eq!((e4m3_of(1e9), e4m3_of(-1e9)), (126, 254));
    }
}
