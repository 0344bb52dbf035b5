//! Tiles in shared memory as the operands of NVIDIA's tensor cores: products of m16n8k16, 16-bit with sums in f32.
//!
//! `mma` gives a lane rows `lane / 4` and `lane / 4 + 8` of every 16, and columns `lane % 4 * 2` and the next of every 8: a
//! [`Pair`] for each of both rows and each block of 8 columns. A tile lies row after row, in vectors of sixteen bytes, an
//! odd number of them from one row to the next, so that neighbouring rows begin at different banks.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

/// Two neighbouring columns of a row of sums.
pub(crate) type Pair = Vector<f32, Const<2>>;
/// Two neighbouring elements of an operand, a register of it.
pub(crate) type Half<F> = Vector<F, Const<2>>;
/// Sixteen bytes, as they are read from memory.
pub(crate) type Wide<F> = Vector<F, Const<8>>;

/// Whether the device multiplies matrices of the tensor's dtype so, and reads them from shared memory in one go.
pub(crate) fn has_tensor_cores<R: CubeRuntime>(x: &CubeTensor<R>) -> bool {
    let properties = x.client.properties();
    let dtype: StorageType = x.dtype.into();
    let half = matches!(dtype.elem_type(), ElemType::Float(FloatKind::F16 | FloatKind::BF16));
    let sums = ElemType::Float(FloatKind::F32).into();
    let product = MmaConfig { a_type: dtype, b_type: dtype, cd_type: sums, m: 16, n: 8, k: 16 };
    half && properties.features.matmul.mma.contains(&product)
        && properties.features.matmul.ldmatrix.contains(&dtype)
        && properties.hardware.plane_size_min == 32
        && properties.hardware.plane_size_max == 32
}

/// Reads four matrices of 8 by 8 from shared memory, each lane giving the address of one row of one of them.
#[cube]
fn read<F: Float>(tile: &SharedMemory<Wide<F>>, at: u32, #[comptime] transposed: bool) -> Array<Half<F>> {
    let product = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let row = tile.slice(at as usize, (at + 1) as usize);
    product.load_matrix::<Wide<F>, Const<2>>(&row, MatrixIdent::A, 4usize, transposed)
}

/// The left side of a product: 16 rows of a tile from `row` on, and the 16 columns of block `block`.
#[cube]
pub(crate) fn left_rows<F: Float>(
    tile: &SharedMemory<Wide<F>>,
    row: u32,
    #[comptime] block: usize,
    #[comptime] stride: usize,
) -> Array<Half<F>> {
    let lane = UNIT_POS % 32;
    let column = comptime!(2 * block as u32) + lane / 16;
    read::<F>(tile, (row + lane % 16) * comptime!(stride as u32) + column, false)
}

/// The left side of a product of which the rows are columns of a tile, those of block `block`, and the columns 16 rows of
/// it from `row` on.
#[cube]
pub(crate) fn left_columns<F: Float>(
    tile: &SharedMemory<Wide<F>>,
    #[comptime] row: usize,
    block: u32,
    #[comptime] stride: usize,
) -> Array<Half<F>> {
    let lane = UNIT_POS % 32;
    let row = comptime!(row as u32) + lane / 16 * 8 + lane % 8;
    read::<F>(tile, row * comptime!(stride as u32) + 2 * block + lane / 8 % 2, true)
}

/// The right sides of two products of which the columns are rows of a tile, 16 from `row` on: block `block` of them.
#[cube]
pub(crate) fn right_rows<F: Float>(
    tile: &SharedMemory<Wide<F>>,
    #[comptime] row: usize,
    #[comptime] block: usize,
    #[comptime] stride: usize,
) -> Array<Half<F>> {
    let lane = UNIT_POS % 32;
    let row = comptime!(row as u32) + lane / 16 * 8 + lane % 8;
    let column = comptime!(2 * block as u32) + lane / 8 % 2;
    read::<F>(tile, row * comptime!(stride as u32) + column, false)
}

/// The right sides of two products of which the rows are those of a tile, 16 from `row` on: columns of block `block`.
#[cube]
pub(crate) fn right_columns<F: Float>(
    tile: &SharedMemory<Wide<F>>,
    #[comptime] row: usize,
    block: u32,
    #[comptime] stride: usize,
) -> Array<Half<F>> {
    let lane = UNIT_POS % 32;
    let row = comptime!(row as u32) + lane % 16;
    read::<F>(tile, row * comptime!(stride as u32) + 2 * block + lane / 16, true)
}

/// Adds to two neighbouring blocks of sums, from pair `at` on, the products of one left side, that of a band, with two
/// right ones.
#[cube]
pub(crate) fn multiply<F: Float>(
    left: &Array<Half<F>>,
    right: &Array<Half<F>>,
    sums: &mut Array<Pair>,
    #[comptime] band: usize,
    #[comptime] at: usize,
) {
    let product = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut left_side = Array::<Half<F>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        left_side[i] = left[comptime!(4 * band + i)];
    }
    #[unroll]
    for block in 0..2usize {
        let mut right_side = Array::<Half<F>>::new(2usize);
        right_side[0usize] = right[comptime!(2 * block)];
        right_side[1usize] = right[comptime!(2 * block + 1)];
        let mut sum = Array::<Pair>::new(2usize);
        sum[0usize] = sums[comptime!(at + 2 * block)];
        sum[1usize] = sums[comptime!(at + 2 * block + 1)];
        product.execute_inplace(&left_side, &right_side, &mut sum);
        sums[comptime!(at + 2 * block)] = sum[0usize];
        sums[comptime!(at + 2 * block + 1)] = sum[1usize];
    }
}

/// Sums of nothing.
#[cube]
pub(crate) fn zeroed(#[comptime] length: usize) -> Array<Pair> {
    let mut sums = Array::<Pair>::new(length);
    clear(&mut sums, length);
    sums
}

#[cube]
pub(crate) fn clear(sums: &mut Array<Pair>, #[comptime] length: usize) {
    #[unroll]
    for at in 0..length {
        sums[at] = Pair::new(0.0f32);
    }
}
