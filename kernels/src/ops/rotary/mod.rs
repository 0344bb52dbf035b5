//! Rotary position embedding.

pub(crate) mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::{Int, Tensor, TensorData};

use crate::recorder;
use crate::{Backend, PackedHeads};

/// Cosines and sines of every position's angles, f32.
#[derive(Clone, Debug)]
pub struct RotaryTable<B: Backend> {
    /// `[positions, head_dim / 2]`.
    pub cos: Tensor<B, 2>,
    /// `[positions, head_dim / 2]`.
    pub sin: Tensor<B, 2>,
}

impl<B: Backend> RotaryTable<B> {
    /// The table of `positions` positions for the given `frequencies`, radians per position, one for each pair of
    /// elements; cosines and sines are multiplied by `magnitude` (one, but for YaRN).
    pub fn new(positions: usize, frequencies: &[f64], magnitude: f64, device: &B::Device) -> Self {
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = (0..positions)
                .flat_map(|position| frequencies.iter().map(move |w| (f(position as f64 * w) * magnitude) as f32))
                .collect();
            Tensor::from_data(TensorData::new(values, [positions, frequencies.len()]), device)
        };
        Self { cos: table(f64::cos), sin: table(f64::sin) }
    }
}

/// Rotates pairs of elements of `x` `[batch_size, heads, seq_length, head_dim]` by its token's position (Su et al.,
/// 2021), in the hub's layout: element `i` pairs with `i + head_dim / 2`.
///
/// `positions` `[batch_size, seq_length]` index the table's rows. Computes in f32 and returns the dtype of `x`.
///
/// # Panics
/// If the table is not of `head_dim / 2` columns.
pub fn rotary<B: Backend>(x: Tensor<B, 4>, table: &RotaryTable<B>, positions: Tensor<B, 2, Int>) -> Tensor<B, 4> {
    let head_dim = x.dims()[3];
    assert_eq!(head_dim, 2 * table.cos.dims()[1], "rotary: the table is made for another head_dim");
    let _op = recorder::op("rotary", || vec![recorder::operand(&x)]);
    B::rotary(x, table, positions, false)
}

/// [`rotary`] of the query and key heads of `qkv` `[batch_size, seq_length, width]`, where a projection left them; the
/// value heads stay as they are.
///
/// # Panics
/// If `width` is not that of `heads`, or the table is not of `head_dim / 2` columns.
pub fn qkv_rotary<B: Backend>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    table: &RotaryTable<B>,
    positions: Tensor<B, 2, Int>,
) -> Tensor<B, 3> {
    assert_eq!(qkv.dims()[2], heads.width(), "qkv_rotary: the tensor is not of these heads");
    assert_eq!(heads.head_dim, 2 * table.cos.dims()[1], "qkv_rotary: the table is made for another head_dim");
    let _op = recorder::op("qkv_rotary", || vec![recorder::operand(&qkv)]);
    B::qkv_rotary(qkv, heads, table, positions, false)
}

/// One more than each of `positions` `[batch_size, seq_length]`, but none beyond `last`: where the next tokens stand.
pub fn next_positions<B: Backend>(positions: Tensor<B, 2, Int>, last: usize) -> Tensor<B, 2, Int> {
    let _op = recorder::op("next_positions", Vec::new);
    B::next_positions(positions, last)
}
