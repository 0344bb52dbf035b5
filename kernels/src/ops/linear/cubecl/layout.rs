//! Memory layout of matrices: views and copies.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use crate::cubecl::transpose::transpose;
use crate::cubecl::{cast, contiguous};

/// The transposed matrix, as a view.
pub(crate) fn transposed<R: CubeRuntime>(mut x: CubeTensor<R>) -> CubeTensor<R> {
    x.meta.swap(0, 1);
    x
}

/// Whether columns, not rows, are contiguous.
pub(super) fn is_m_major<R: CubeRuntime>(x: &CubeTensor<R>) -> bool {
    x.meta.strides()[0] == 1 && x.meta.strides()[1] != 1
}

/// A matrix `[rows, k]` in `dtype` as K-major `[pieces, rows, k / pieces]`. Rows may have gaps only
/// if the product is `whole`: `cubek` misreads slices with gaps.
pub(crate) fn k_major<R: CubeRuntime>(x: CubeTensor<R>, dtype: DType, pieces: usize, whole: bool) -> CubeTensor<R> {
    if is_m_major(&x) {
        return transpose(transposed(x), dtype, pieces);
    }
    let x = cast(x, dtype);
    let (k, row, column) = (x.meta.shape()[1], x.meta.strides()[0], x.meta.strides()[1]);
    let begin = x.handle.offset_start.unwrap_or(0) as usize;
    let gaps = row > k && whole && (row * dtype.size()).is_multiple_of(16);
    let lies_well = column == 1 && (row == k || gaps) && begin.is_multiple_of(16);
    cut(if lies_well { x } else { contiguous(x) }, 1, pieces)
}

/// A matrix as a batch of `pieces` matrices, split along `axis`.
pub(super) fn cut<R: CubeRuntime>(mut x: CubeTensor<R>, axis: usize, pieces: usize) -> CubeTensor<R> {
    let length = x.meta.shape()[axis] / pieces;
    let stride = x.meta.strides()[axis];
    x.meta.remove(axis);
    x.meta.insert(axis, length, stride);
    x.meta.insert(0, pieces, length * stride);
    x
}
