//! Fused attention in CubeCL (Dao et al., 2022; Dao, 2023): tiles of scores that never leave the chip.
//!
//! The forward pass keeps a running maximum and sum of each row, and saves the row's log-sum-exp. The backward pass
//! computes the probabilities again from it, once for the gradients of keys and values, a cube for each tile of keys,
//! and once for those of queries, a cube for each tile of queries: no two cubes write to one place.

mod mask;
mod matrix;
mod parts;
mod tiles;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use self::mask::{MaskKind, NO_WINDOW, SizesLaunch};
use self::parts::PlaceLaunch;
use super::AttentionOptions;
use crate::RandomKey;
use crate::cube::{contiguous, empty, vector_width};
use crate::random::cube::RoundsLaunch;

/// The sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    pub(crate) batch_size: usize,
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) seq_length: usize,
    pub(crate) keys: usize,
    pub(crate) head_dim: usize,
}

impl Dims {
    /// The sizes of a query `[batch_size, n_heads, seq_length, head_dim]` and a key
    /// `[batch_size, n_kv_heads, keys, head_dim]`.
    pub(crate) fn new(query: [usize; 4], key: [usize; 4]) -> Self {
        let [batch_size, n_heads, seq_length, head_dim] = query;
        let [_, n_kv_heads, keys, _] = key;
        Self { batch_size, n_heads, n_kv_heads, seq_length, keys, head_dim }
    }
}

/// Heads `[batch_size, heads, rows, head_dim]` somewhere in a tensor, the elements of a row one after another.
#[derive(Clone, Debug)]
pub(crate) struct Heads<R: CubeRuntime> {
    pub(crate) tensor: CubeTensor<R>,
    /// Index of the first element.
    pub(crate) offset: usize,
    /// Distances between batches, heads and rows.
    pub(crate) strides: [usize; 3],
}

impl<R: CubeRuntime> Heads<R> {
    /// All of a tensor `[batch_size, heads, rows, head_dim]`.
    pub(crate) fn from_tensor(x: CubeTensor<R>) -> Self {
        let x = with_unit_stride(x);
        let strides = [0, 1, 2].map(|axis| stride(&x, axis));
        Self { tensor: x, offset: 0, strides }
    }

    /// The heads from `first` on of a tensor `[batch_size, rows, width]` that has all of a row's heads side by side.
    pub(crate) fn packed(x: &CubeTensor<R>, first: usize, head_dim: usize) -> Self {
        let x = with_unit_stride(x.clone());
        let strides = [stride(&x, 0), head_dim, stride(&x, 1)];
        Self { tensor: x, offset: first * head_dim, strides }
    }

    /// Heads for the gradient of these, which must be all of a tensor: a new tensor
    /// `[batch_size, rows, heads, head_dim]`.
    pub(crate) fn empty_like(&self) -> Self {
        let [batch_size, heads, rows, head_dim] = [0, 1, 2, 3].map(|axis| self.tensor.meta.shape()[axis]);
        Self::from_rows(empty(&self.tensor, [batch_size, rows, heads, head_dim], self.tensor.dtype))
    }

    /// All of a tensor `[batch_size, rows, heads, head_dim]`.
    pub(crate) fn from_rows(x: CubeTensor<R>) -> Self {
        let x = with_unit_stride(x);
        let strides = [0, 2, 1].map(|axis| stride(&x, axis));
        Self { tensor: x, offset: 0, strides }
    }

    fn lengths(&self) -> [usize; 4] {
        let [batch, head, row] = self.strides;
        [self.offset, batch, head, row]
    }

    /// Where the heads lie, counted in vectors of `width`.
    fn place(&self, width: usize) -> PlaceLaunch<R> {
        let [first, batch, head, row] = self.lengths().map(|length| (length / width) as u32);
        PlaceLaunch::new(first, batch, head, row)
    }
}

fn with_unit_stride<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let last = x.meta.shape().num_dims() - 1;
    if x.meta.shape()[last] == 1 || x.meta.strides()[last] == 1 { x } else { contiguous(x) }
}

/// The stride of an axis; that of an axis of one, which may be anything, is zero.
fn stride<R: CubeRuntime>(x: &CubeTensor<R>, axis: usize) -> usize {
    if x.meta.shape()[axis] == 1 { 0 } else { x.meta.strides()[axis] }
}

/// [`AttentionMask`](super::AttentionMask) on the device.
#[derive(Clone, Debug)]
pub(crate) enum CubeMask<R: CubeRuntime> {
    None,
    Causal { window: Option<usize> },
    Positions { positions: CubeTensor<R>, window: Option<usize> },
    Lengths(CubeTensor<R>),
}

impl<R: CubeRuntime> CubeMask<R> {
    fn kind(&self) -> MaskKind {
        match self {
            Self::None => MaskKind::None,
            Self::Causal { .. } => MaskKind::Causal,
            Self::Positions { .. } => MaskKind::Positions,
            Self::Lengths(_) => MaskKind::Lengths,
        }
    }

    fn window(&self) -> i32 {
        match self {
            Self::Causal { window } | Self::Positions { window, .. } => {
                window.map_or(NO_WINDOW, |window| window.min(NO_WINDOW as usize) as i32)
            }
            Self::None | Self::Lengths(_) => NO_WINDOW,
        }
    }

    /// The mask's integers, or a tensor that stands in for them and is never read.
    fn ints(&self, other: &CubeTensor<R>) -> CubeTensor<R> {
        match self {
            Self::Positions { positions: ints, .. } | Self::Lengths(ints) => contiguous(ints.clone()),
            Self::None | Self::Causal { .. } => CubeTensor { dtype: DType::I32, ..other.clone() },
        }
    }
}

/// Attention of query, key and value: output `[batch_size, seq_length, n_heads, head_dim]` in the query's dtype, and the log-sum-exp
/// `[batch_size, n_heads, seq_length, 1]` in f32.
pub(crate) fn attention_forward<R: CubeRuntime>(
    inputs: [&Heads<R>; 3],
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let Dims { batch_size, n_heads, seq_length, head_dim, .. } = dims;
    let like = &inputs[0].tensor;
    let output = Heads::from_rows(empty(like, [batch_size, seq_length, n_heads, head_dim], like.dtype));
    let log_sum_exp = empty(like, [batch_size, n_heads, seq_length, 1], DType::F32);
    if matrix::supported(&inputs, head_dim) {
        matrix::forward(inputs, &output, &log_sum_exp, dims, mask, options);
    } else {
        tiles::forward(inputs, &output, &log_sum_exp, dims, mask, options);
    }
    (output.tensor, log_sum_exp)
}

/// Writes the gradients of query, key and value where they belong, which may be places in one tensor. `grad` is
/// `[batch_size, seq_length, n_heads, head_dim]`, output and log-sum-exp are what the forward pass gave.
pub(crate) fn attention_backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    [query, key, value]: [&Heads<R>; 3],
    [output, log_sum_exp]: [CubeTensor<R>; 2],
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
    [d_query, d_key, d_value]: [&Heads<R>; 3],
) {
    let (grad, output) = (Heads::from_rows(grad), Heads::from_rows(output));
    let rows = tiles::row_statistics(&grad, &output, contiguous(log_sum_exp), dims);
    let inputs = [query, key, value, &grad];
    if matrix::supported(&[query, key, value, &grad, d_query, d_key, d_value], dims.head_dim) {
        matrix::backward_keys(inputs, &rows, [d_key, d_value], dims, mask, options);
        matrix::backward_queries(inputs, &rows, d_query, dims, mask, options);
    } else {
        tiles::backward_keys(inputs, &rows, [d_key, d_value], dims, mask, options);
        tiles::backward_queries(inputs, &rows, d_query, dims, mask, options);
    }
}

/// The widest vectors, of `most` at the most, in which all heads can be read and written.
fn width<R: CubeRuntime>(heads: &[&Heads<R>], head_dim: usize, most: usize) -> usize {
    let tensors: Vec<_> = heads.iter().map(|heads| &heads.tensor).collect();
    let lengths: Vec<_> = heads.iter().flat_map(|heads| heads.lengths()).chain([most, head_dim]).collect();
    vector_width(&tensors, &lengths)
}

fn sizes<R: CubeRuntime>(dims: Dims, mask: &CubeMask<R>, options: AttentionOptions) -> SizesLaunch<R> {
    SizesLaunch::new(
        dims.batch_size as u32,
        dims.n_heads as u32,
        dims.n_kv_heads as u32,
        dims.seq_length as u32,
        dims.keys as u32,
        mask.window(),
        options.scale as f32,
        options.dropout.map_or(0, |dropout| dropout.threshold()),
        options.dropout.map_or(1.0, |dropout| dropout.scale() as f32),
    )
}

fn rounds<R: CubeRuntime>(options: AttentionOptions) -> RoundsLaunch<R> {
    options.dropout.map_or(RandomKey::new(0), |dropout| dropout.key).rounds()
}
