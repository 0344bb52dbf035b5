//! Layout and number of heads in an attention, and its mask.

use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use super::super::AttentionMask;
use super::mask::{MaskKind, NO_WINDOW};
use super::parts::PlaceLaunch;
use crate::cubecl::{contiguous, empty};
use crate::packed_heads::PackedHeads;

/// The mask's tensors as primitives.
pub(crate) fn cube_mask<R, B>(mask: AttentionMask<B>) -> CubeMask<R>
where
    R: CubeRuntime,
    B: Backend<IntTensorPrimitive = CubeTensor<R>>,
{
    match mask {
        AttentionMask::None => CubeMask::None,
        AttentionMask::Causal { window } => CubeMask::Causal { window },
        AttentionMask::Positions { positions, window } => {
            CubeMask::Positions { positions: positions.into_primitive(), window }
        }
        AttentionMask::Lengths(lengths) => CubeMask::Lengths(lengths.into_primitive()),
        AttentionMask::Documents { starts, window } => CubeMask::Documents { starts: starts.into_primitive(), window },
        AttentionMask::Ranges(ranges) => CubeMask::Ranges(ranges.into_primitive()),
    }
}

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

    /// The sizes of packed heads `[batch_size, seq_length, width]`.
    pub(super) fn packed([batch_size, seq_length, _]: [usize; 3], heads: PackedHeads) -> Self {
        let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
        Self { batch_size, n_heads, n_kv_heads, seq_length, keys: seq_length, head_dim }
    }
}

/// Heads `[batch_size, heads, rows, head_dim]` in a tensor, with contiguous rows.
#[derive(Clone, Debug)]
pub(crate) struct Heads<R: CubeRuntime> {
    pub(crate) tensor: CubeTensor<R>,
    /// Index of the first element.
    pub(crate) offset: usize,
    /// Strides of batches, heads and rows.
    pub(crate) strides: [usize; 3],
}

impl<R: CubeRuntime> Heads<R> {
    /// All of a tensor `[batch_size, heads, rows, head_dim]`.
    pub(crate) fn from_tensor(x: CubeTensor<R>) -> Self {
        let x = with_unit_stride(x);
        let strides = [0, 1, 2].map(|axis| stride(&x, axis));
        Self { tensor: x, offset: 0, strides }
    }

    /// The heads from `first` on of a tensor `[batch_size, rows, width]` with concatenated heads.
    pub(crate) fn packed(x: &CubeTensor<R>, first: usize, head_dim: usize) -> Self {
        let x = with_unit_stride(x.clone());
        let strides = [stride(&x, 0), head_dim, stride(&x, 1)];
        Self { tensor: x, offset: first * head_dim, strides }
    }

    /// New heads for the gradient of these, which must be a whole tensor: `[batch_size, rows,
    /// heads, head_dim]`.
    pub(crate) fn empty_like(&self) -> Self {
        let [batch_size, heads, rows, head_dim] = [0, 1, 2, 3].map(|axis| self.tensor.meta.shape()[axis]);
        Self::from_rows(empty(&self.tensor, [batch_size, rows, heads, head_dim], self.tensor.dtype))
    }

    /// A whole tensor `[batch_size, rows, heads, head_dim]`.
    pub(crate) fn from_rows(x: CubeTensor<R>) -> Self {
        let x = with_unit_stride(x);
        let strides = [0, 2, 1].map(|axis| stride(&x, axis));
        Self { tensor: x, offset: 0, strides }
    }

    pub(super) fn lengths(&self) -> [usize; 4] {
        let [batch, head, row] = self.strides;
        [self.offset, batch, head, row]
    }

    /// Offsets and strides of the heads, in vectors of `width`.
    pub(super) fn place(&self, width: usize) -> PlaceLaunch<R> {
        let [first, batch, head, row] = self.lengths().map(|length| (length / width) as u32);
        PlaceLaunch::new(first, batch, head, row)
    }
}

fn with_unit_stride<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let last = x.meta.shape().num_dims() - 1;
    if x.meta.shape()[last] == 1 || x.meta.strides()[last] == 1 { x } else { contiguous(x) }
}

/// The stride of an axis; zero for an axis of size one, whose stride is arbitrary.
fn stride<R: CubeRuntime>(x: &CubeTensor<R>, axis: usize) -> usize {
    if x.meta.shape()[axis] == 1 { 0 } else { x.meta.strides()[axis] }
}

/// [`AttentionMask`] on the device.
#[derive(Clone, Debug)]
pub(crate) enum CubeMask<R: CubeRuntime> {
    None,
    Causal { window: Option<usize> },
    Positions { positions: CubeTensor<R>, window: Option<usize> },
    Lengths(CubeTensor<R>),
    Documents { starts: CubeTensor<R>, window: Option<usize> },
    Ranges(CubeTensor<R>),
}

impl<R: CubeRuntime> CubeMask<R> {
    pub(super) fn kind(&self) -> MaskKind {
        match self {
            Self::None => MaskKind::None,
            Self::Causal { .. } => MaskKind::Causal,
            Self::Positions { .. } => MaskKind::Positions,
            Self::Lengths(_) => MaskKind::Lengths,
            Self::Documents { .. } => MaskKind::Documents,
            Self::Ranges(_) => MaskKind::Ranges,
        }
    }

    pub(super) fn window(&self) -> i32 {
        match self {
            Self::Causal { window } | Self::Positions { window, .. } | Self::Documents { window, .. } => {
                window.map_or(NO_WINDOW, |window| window.min(NO_WINDOW as usize) as i32)
            }
            Self::None | Self::Lengths(_) | Self::Ranges(_) => NO_WINDOW,
        }
    }

    /// The mask's integers, or a stand-in tensor that is never read.
    pub(super) fn ints(&self, other: &CubeTensor<R>) -> CubeTensor<R> {
        match self {
            Self::Positions { positions: ints, .. }
            | Self::Lengths(ints)
            | Self::Documents { starts: ints, .. }
            | Self::Ranges(ints) => contiguous(ints.clone()),
            Self::None | Self::Causal { .. } => CubeTensor { dtype: DType::I32, ..other.clone() },
        }
    }
}
