//! Skinny products with a group of units per output.
//!
//! ```text
//! weight row (an output)  |u0|u1|u2|..|u0|u1|u2|..|   vectors, round-robin over the group's units;
//! x, a block of rows      |u0|u1|u2|..|u0|u1|u2|..|   multiplied with those of all rows
//!                         -> a sum over the group's units for each row, then the epilogue
//! ```

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{CubeWeight, Epilogue, Parts, Sizes, SizesLaunch, bind, finished, residual_of};
use crate::cubecl::reduce::{RowUnits, lanes_sum, row_sum};
use crate::cubecl::{array, dtype_of, grid, optional, vector_width};
use crate::quant::Format;
use crate::quant::int8::PACKED;

/// Rows per block.
const BLOCK: usize = 8;

pub(super) fn by_simt<R: CubeRuntime>(
    (x, x_stride): (CubeTensor<R>, usize),
    weight: CubeWeight<R>,
    epilogue: Epilogue<R>,
) -> CubeTensor<R> {
    let weight = weight.stored();
    let [n_rows, d_input] = [x.meta.shape()[0], x.meta.shape()[1]];
    let bound = bind(&x, &weight, epilogue);
    let (parts, outputs) = (bound.parts, bound.outputs);
    let vector = match &weight.floats {
        // One word of bytes at a time.
        None => vector_width(&[&x], &[d_input, x_stride, PACKED]).min(PACKED),
        Some(floats) => vector_width(&[&x, floats], &[d_input, x_stride, weight.stride]),
    };
    let vectors = d_input / vector;
    let row_units = RowUnits::new(&x.client, vectors, usize::MAX, 32);
    let block = n_rows.next_power_of_two().min(BLOCK);
    // SAFETY: a group of units reads its own rows of the weight and a block's rows of `x`, below
    // `outputs` and `n_rows`, and writes its own outputs.
    unsafe {
        simt_kernel::launch_unchecked(
            &x.client,
            grid(outputs.div_ceil(row_units.rows as usize) * n_rows.div_ceil(block)),
            row_units.cube_dim(),
            vector,
            array(&x),
            optional(&weight.floats),
            optional(&weight.packed),
            optional(&weight.scales),
            optional(&bound.bias),
            optional(&bound.residual),
            bound.out_array(&[&weight.floats, &weight.packed, &weight.scales]),
            SizesLaunch::new(
                n_rows as u32,
                vectors as u32,
                outputs as u32,
                (x_stride / vector) as u32,
                (weight.stride / vector) as u32,
                bound.residual_stride as u32,
                0.0,
                0.0,
            ),
            block,
            row_units,
            parts,
            x.dtype.into(),
            dtype_of(&weight.floats, &x),
            dtype_of(&bound.bias, &x),
            dtype_of(&bound.residual, &x),
            bound.out.dtype.into(),
        );
    }
    bound.out
}

/// `d_input` and the strides count vectors here.
#[cube(launch_unchecked)]
fn simt_kernel<F: Float, W: Float, V: Float, S: Float, O: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    weight: &ComptimeOption<Array<Vector<W, N>>>,
    packed: &ComptimeOption<Array<u32>>,
    scales: &ComptimeOption<Array<f32>>,
    bias: &ComptimeOption<Array<V>>,
    residual: &ComptimeOption<Array<S>>,
    out: &mut Array<O>,
    sizes: &Sizes,
    #[comptime] block: usize,
    #[comptime] row_units: RowUnits,
    #[comptime] parts: Parts,
    #[define(F)] _dtype: StorageType,
    #[define(W)] _weight_dtype: StorageType,
    #[define(V)] _bias_dtype: StorageType,
    #[define(S)] _residual_dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let cubes = sizes.outputs.div_ceil(row_units.rows);
    let first = CUBE_POS as u32 / cubes * comptime!(block as u32);
    if first >= sizes.rows {
        terminate!();
    }
    let own = CUBE_POS as u32 % cubes * row_units.rows + UNIT_POS_Y;
    // Groups past the end repeat the last output without writing it: all units of a cube take part
    // in exchanges.
    let output = min(own, sizes.outputs - 1);
    let sides = comptime!(1 + parts.gated as usize);
    let mut sums = Array::<Vector<f32, N>>::new(comptime!(sides * block));
    #[unroll]
    for i in 0..comptime!(sides * block) {
        sums[i] = Vector::new(0.0);
    }
    let other = (output + sizes.outputs) * sizes.weight_stride;
    for column in range_stepped(UNIT_POS_X, sizes.d_input, row_units.units) {
        let weights = stored::<W, N>(weight, packed, output * sizes.weight_stride + column, parts);
        let mut others = Vector::<f32, N>::new(0.0);
        if comptime!(parts.gated) {
            others = stored::<W, N>(weight, packed, other + column, parts);
        }
        #[unroll]
        for i in 0..block {
            let row = min(first + comptime!(i as u32), sizes.rows - 1);
            let value = Vector::<f32, N>::cast_from(x[(row * sizes.x_stride + column) as usize]);
            sums[i] += value * weights;
            if comptime!(parts.gated) {
                sums[comptime!(block + i)] += value * others;
            }
        }
    }
    #[unroll]
    for i in 0..block {
        let gate = row_sum(lanes_sum::<N>(sums[i]), row_units);
        let mut other = 0.0f32;
        if comptime!(parts.gated) {
            other = row_sum(lanes_sum::<N>(sums[comptime!(block + i)]), row_units);
        }
        let row = first + comptime!(i as u32);
        if UNIT_POS_X == 0 && row < sizes.rows && own < sizes.outputs {
            let added = residual_of::<S>(residual, row, output, sizes, parts);
            let value = finished::<V>(gate, other, added, output, scales, bias, sizes, parts);
            out[(row * sizes.outputs + output) as usize] = O::cast_from(value);
        }
    }
}

/// A vector of the weight, in any format. A word has four bytes, and a vector may be part of one.
#[cube]
fn stored<W: Float, N: Size>(
    weight: &ComptimeOption<Array<Vector<W, N>>>,
    packed: &ComptimeOption<Array<u32>>,
    at: u32,
    #[comptime] parts: Parts,
) -> Vector<f32, N> {
    let width = N::value();
    if comptime!(parts.format == Some(Format::Int8)) {
        let each = comptime!((PACKED / width) as u32);
        let word = packed.as_ref().unwrap()[(at / each) as usize];
        let first = at % each * comptime!(width as u32);
        let mut vector = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..N::value() {
            let byte = ((word >> (8 * (first + comptime!(i as u32)))) & 0xff) ^ 0x80;
            vector[i] = f32::cast_from(byte) - 128.0f32;
        }
        vector
    } else {
        Vector::<f32, N>::cast_from(weight.as_ref().unwrap()[at as usize])
    }
}
