//! What the backward pass needs of each row of scores.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::parts::Place;
use super::super::{Dims, Heads, width};
use crate::cubecl::{array, empty, grid, launch};

/// Units that share a row in the kernel of row statistics, and rows of a cube.
const UNITS_OF_ROW: u32 = 8;
const ROWS: u32 = 32;

/// For each row of scores, `[batch_size, n_heads, seq_length, 2]`: its log-sum-exp, and the product
/// of its output and of the output's gradient.
pub(in crate::ops::attention::cubecl) fn row_statistics<R: CubeRuntime>(
    grad: &Heads<R>,
    output: &Heads<R>,
    log_sum_exp: CubeTensor<R>,
    dims: Dims,
) -> CubeTensor<R> {
    let Dims { batch_size, n_heads, seq_length, head_dim, .. } = dims;
    let width = width(&[grad, output], head_dim, 8);
    let rows = batch_size * n_heads * seq_length;
    let statistics = empty(&log_sum_exp, [batch_size, n_heads, seq_length, 2], log_sum_exp.dtype);
    // SAFETY: each row below `rows` is read and written by units of its own.
    unsafe {
        launch!(
            row_statistics_kernel::RowStatisticsKernel,
            &grad.tensor.client,
            grid(rows.div_ceil(ROWS as usize)),
            CubeDim::new_1d(ROWS * UNITS_OF_ROW),
            [N = width],
            [F = grad.tensor.dtype, O = output.tensor.dtype],
            [
                grad: Array<Vector<row_statistics_kernel::F, row_statistics_kernel::N>> = array(&grad.tensor),
                output: Array<Vector<row_statistics_kernel::O, row_statistics_kernel::N>> = array(&output.tensor),
                log_sum_exp: Array<f32> = array(&log_sum_exp),
                statistics: Array<f32> = array(&statistics),
                grad_place: Place = grad.place(width),
                output_place: Place = output.place(width),
                rows: u32 = rows as u32,
                n_heads: u32 = n_heads as u32,
                queries: u32 = seq_length as u32,
                vectors: u32 = (head_dim / width) as u32,
            ],
            []
        );
    }
    statistics
}

#[cube(launch_unchecked)]
fn row_statistics_kernel<F: Float, O: Float, N: Size>(
    grad: &Array<Vector<F, N>>,
    output: &Array<Vector<O, N>>,
    log_sum_exp: &Array<f32>,
    statistics: &mut Array<f32>,
    grad_place: &Place,
    output_place: &Place,
    rows: u32,
    n_heads: u32,
    queries: u32,
    vectors: u32,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _output_dtype: StorageType,
) {
    let mut partial = SharedMemory::<f32>::new(comptime!((ROWS * UNITS_OF_ROW) as usize));
    let row = CUBE_POS as u32 * ROWS + UNIT_POS / UNITS_OF_ROW;
    let lane = UNIT_POS % UNITS_OF_ROW;
    let mut sum = 0.0f32;
    if row < rows {
        let query = row % queries;
        let head = row / queries % n_heads;
        let batch = row / queries / n_heads;
        let grads = grad_place.rows(batch, head, queries);
        let outputs = output_place.rows(batch, head, queries);
        let grad_at = grads.at + query * grads.stride;
        let output_at = outputs.at + query * outputs.stride;
        for at in range_stepped(lane, vectors, UNITS_OF_ROW) {
            let product = Vector::<f32, N>::cast_from(grad[(grad_at + at) as usize])
                * Vector::<f32, N>::cast_from(output[(output_at + at) as usize]);
            #[unroll]
            for lane in 0..N::value() {
                sum += product[lane];
            }
        }
    }
    partial[UNIT_POS as usize] = sum;
    sync_cube();
    if row < rows && lane == 0 {
        let mut sum = 0.0f32;
        #[unroll]
        for unit in 0..UNITS_OF_ROW {
            sum += partial[(UNIT_POS + unit) as usize];
        }
        statistics[(row * 2) as usize] = log_sum_exp[row as usize];
        statistics[(row * 2 + 1) as usize] = sum;
    }
}
