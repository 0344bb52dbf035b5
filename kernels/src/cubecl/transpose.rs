//! Matrix transposition in memory, with an optional cast.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{UNITS, array, empty, grid, rows, vector_width};

/// Edge of the square tiles, one per cube.
const EDGE: u32 = 64;
/// Row stride of a tile in shared memory: one more, to avoid bank conflicts of rows and columns.
const PITCH: u32 = EDGE + 1;

/// The transpose of each of `pieces` pieces of `x` `[rows, columns]`, split along its rows:
/// contiguous `[pieces, columns, rows / pieces]` of `dtype`.
pub(crate) fn transpose<R: CubeRuntime>(x: CubeTensor<R>, dtype: DType, pieces: usize) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let piece = n_rows / pieces;
    let out = empty(&x, [pieces, columns, piece], dtype);
    let edge = EDGE as usize;
    let (read, written) = (vector_width(&[&x], &[columns, stride, edge]), vector_width(&[&out], &[piece, edge]));
    let across = columns.div_ceil(edge);
    // SAFETY: each cube writes its own square of `out`, and reads the same one of `x`, both within
    // their edges.
    unsafe {
        transpose_kernel::launch_unchecked(
            &x.client,
            grid(n_rows.div_ceil(edge) * across),
            CubeDim::new_1d(UNITS),
            read,
            written,
            array(&x),
            array(&out),
            n_rows as u32,
            columns as u32,
            (stride / read) as u32,
            across as u32,
            piece as u32,
            x.dtype.into(),
            dtype.into(),
        );
    }
    out
}

#[cube(launch_unchecked)]
fn transpose_kernel<F: Float, O: Float, N: Size, M: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<Vector<O, M>>,
    rows: u32,
    columns: u32,
    stride: u32,
    across: u32,
    piece: u32,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let read = N::value() as u32;
    let written = M::value() as u32;
    let first_row = CUBE_POS as u32 / across * EDGE;
    let first_column = CUBE_POS as u32 % across * EDGE;
    let mut square = SharedMemory::<O>::new(comptime!((EDGE * PITCH) as usize));
    for i in range_stepped(UNIT_POS, EDGE * EDGE / read, UNITS) {
        let row = i / (EDGE / read);
        let column = i % (EDGE / read) * read;
        if first_row + row < rows && first_column + column < columns {
            let value = x[((first_row + row) * stride + (first_column + column) / read) as usize];
            #[unroll]
            for lane in 0..N::value() {
                square[(row * PITCH + column + lane as u32) as usize] = O::cast_from(value[lane]);
            }
        }
    }
    sync_cube();
    for i in range_stepped(UNIT_POS, EDGE * EDGE / written, UNITS) {
        let column = i / (EDGE / written);
        let row = i % (EDGE / written) * written;
        if first_row + row < rows && first_column + column < columns {
            let mut value = Vector::<O, M>::cast_from(0.0f32);
            #[unroll]
            for lane in 0..M::value() {
                value[lane] = square[((row + lane as u32) * PITCH + column) as usize];
            }
            let row = first_row + row;
            let line = row / piece * columns + first_column + column;
            out[(line * (piece / written) + row % piece / written) as usize] = value;
        }
    }
}
