//! Quantized matrices of every format.

use burn::tensor::Tensor;
use fireclay_kernels::{Backend, BlockFormat, Format, HostWeight, QuantizedWeight, RandomKey};

use crate::compare::{Tolerance, random};

/// A matrix of weights of order `size` in a format: rounded where the program does that, and else
/// blocks as a file may have them, of any bits. None if the format has no rows of that length.
pub(crate) fn matrix<B: Backend>(
    format: Format,
    seed: u64,
    shape: [usize; 2],
    size: f32,
    device: &B::Device,
) -> Option<QuantizedWeight<B>> {
    let layout = format.layout(shape[1])?;
    if let (Format::Grouped(_), false) = (format, format.quantizes()) {
        // Codes of any bits, and numbers of groups of which some are negative. Bytes reach sixteen
        // times as far as nibbles.
        let size = if layout.words * 4 >= shape[1] { size / 16.0 } else { size };
        let key = RandomKey::new(seed);
        let mut next = 0;
        let mut uniform = || {
            next += 1;
            key.uniform(next, 0)
        };
        let words = (0..shape[0] * layout.words).map(|_| (uniform() * 4_294_967_296.0) as u32 as i32).collect();
        let scales = (0..shape[0] * layout.scales).map(|_| size * (0.2 * uniform() - 0.05) as f32).collect();
        let host = HostWeight { format, shape, words, scales, device: device.clone() };
        return Some(QuantizedWeight::stored(host).expect("the device works"));
    }
    let Format::Blocks(blocks) = format else {
        let values: Vec<f32> = (random::<B, 2>(seed, shape, device) * size).into_data().iter::<f32>().collect();
        return QuantizedWeight::quantize(format, &values, shape, device).expect("the device works");
    };
    let key = RandomKey::new(seed);
    let mut words = Vec::new();
    for row in 0..shape[0] {
        let count = shape[1] / blocks.weights() * blocks.bytes();
        let mut bytes: Vec<u8> = (0..count).map(|at| (256.0 * key.uniform(row as u32, at as u32)) as u8).collect();
        for (at, block) in bytes.chunks_exact_mut(blocks.bytes()).enumerate() {
            // Some scales are negative, one is none, and no two blocks have the same.
            let scale =
                size * scale_of(blocks) * [1.0, -0.5, 0.75, 0.0, 1.25][at % 5] * (1.0 + (row % 64) as f32 / 64.0);
            for half in halves_of(blocks) {
                block[*half..half + 2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
            }
        }
        bytes.resize(4 * layout.words, 0);
        words.extend(bytes.chunks_exact(4).map(|word| i32::from_ne_bytes([word[0], word[1], word[2], word[3]])));
    }
    let host = HostWeight { format, shape, words, scales: Vec::new(), device: device.clone() };
    Some(QuantizedWeight::stored(host).expect("the device works"))
}

/// Where a block has f16.
fn halves_of(blocks: BlockFormat) -> &'static [usize] {
    match blocks {
        BlockFormat::Q4_0 | BlockFormat::Q5_0 | BlockFormat::Q8_0 => &[0],
        BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4K | BlockFormat::Q5K => &[0, 2],
        BlockFormat::Q2K => &[80, 82],
        BlockFormat::Q3K => &[108],
        BlockFormat::Q6K => &[208],
    }
}

/// So that weights are of order one.
fn scale_of(blocks: BlockFormat) -> f32 {
    match blocks {
        BlockFormat::Q8_0 => 0.01,
        BlockFormat::Q4_1 => 0.05,
        BlockFormat::Q5_1 => 0.03,
        BlockFormat::Q2K => 0.05,
        BlockFormat::Q4K => 0.003,
        BlockFormat::Q5K => 0.0015,
        BlockFormat::Q3K => 0.02,
        BlockFormat::Q6K => 0.0006,
        _ => 0.1,
    }
}

/// How far products may be from those of the dequantized weights: where a kernel multiplies
/// integers, inputs are rounded to bytes.
pub(crate) fn of_products<B: Backend>(format: Format, tolerance: Tolerance, device: &B::Device) -> Tolerance {
    match format.rounds_inputs() && B::name(device).contains("ndarray") {
        true => tolerance.at_least(2e-2),
        false => tolerance,
    }
}

/// The weights, f32.
pub(crate) fn wide<B: Backend>(weight: &QuantizedWeight<B>) -> Tensor<B, 2> {
    crate::plain::dequantize(weight, burn::tensor::FloatDType::F32)
}
