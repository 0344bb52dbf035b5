//! Tiles in shared memory as operands of NVIDIA's tensor cores: 16-bit m16n8k16 products with f32
//! accumulation.
//!
//! `mma` gives a lane rows `lane / 4` and `lane / 4 + 8` of every 16, and columns `lane % 4 * 2`
//! and the next of every 8: a [`Pair`] per row and block of 8 columns. Tiles are row-major in
//! vectors of sixteen bytes, with an odd row stride, so that neighbouring rows start in different
//! banks.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

/// Two neighbouring columns of a row of sums.
pub(crate) type Pair = Vector<f32, Const<2>>;
/// Two neighbouring elements of an operand, one register.
pub(crate) type Half<F> = Vector<F, Const<2>>;
/// Sixteen bytes, the unit of memory reads.
pub(crate) type Wide<F> = Vector<F, Const<8>>;

/// Whether the device has such products for the tensor's dtype, and `ldmatrix`.
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

/// Reads four 8 x 8 matrices from shared memory; each lane gives the address of one row.
#[cube]
fn read<F: Float>(tile: &SharedMemory<Wide<F>>, at: u32, #[comptime] transposed: bool) -> Array<Half<F>> {
    let product = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let row = tile.slice(at as usize, (at + 1) as usize);
    product.load_matrix::<Wide<F>, Const<2>>(&row, MatrixIdent::A, 4usize, transposed)
}

/// The left operand: 16 rows of a tile from `row` on, columns of block `block`.
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

/// The transposed left operand: columns of block `block` as rows, 16 rows of the tile from `row` on
/// as columns.
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

/// The right operands of two products: 16 rows of a tile from `row` on as columns, block `block`.
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

/// The right operands of two products: 16 rows of a tile from `row` on, columns of block `block`.
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

/// Adds the products of one left operand with two right ones to two neighbouring blocks of sums,
/// from pair `at` on.
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

/// Zeroed sums.
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
