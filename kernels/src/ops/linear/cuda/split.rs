//! f32 as two numbers of TF32 each: 11 bits rounded to nearest, and what was rounded off.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::F32_DEPTH;
use crate::cubecl::reduce::row_vector;
use crate::cubecl::{array, empty, grid, rows};

const UNITS: u32 = 256;
/// Bits of f32 that TF32 lacks.
const LACKED: u32 = 13;
/// The exponent of what is no finite number.
const NOT_FINITE: u32 = 0x7f80_0000;

/// A matrix `[rows, k]` as `[rows, 2 * depth]`, where `depth` is K in whole stages: rounded numbers
/// and zeros up to the stage's end, then what was rounded off, and zeros.
pub(super) fn split<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    let [n_rows, k] = [x.meta.shape()[0], x.meta.shape()[1]];
    let depth = k.next_multiple_of(F32_DEPTH);
    let out = empty(&x, [n_rows, 2 * depth], DType::F32);
    let vector = row_vector(&[&x, &out], &[k, stride, depth]);
    let units = n_rows * depth / vector;
    // SAFETY: each unit below `units` reads a vector of a row where it has one, and writes the two
    // of its own.
    unsafe {
        split_kernel::launch_unchecked(
            &x.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&x),
            array(&out),
            units as u32,
            (k / vector) as u32,
            (stride / vector) as u32,
            (depth / vector) as u32,
        );
    }
    out
}

#[cube(launch_unchecked)]
fn split_kernel<N: Size>(
    x: &Array<Vector<f32, N>>,
    out: &mut Array<Vector<f32, N>>,
    units: u32,
    columns: u32,
    stride: u32,
    depth: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let (row, column) = (at / depth, at % depth);
    let mut rounded = Vector::<f32, N>::new(0.0);
    let mut rest = Vector::<f32, N>::new(0.0);
    if column < columns {
        let value = x[(row * stride + column) as usize];
        #[unroll]
        for lane in 0..N::value() {
            let number = value[lane];
            let bits = u32::reinterpret(number);
            let kept = !((1u32 << LACKED) - 1);
            let mut near = (bits + (1u32 << (LACKED - 1))) & kept;
            // What would be rounded up to no finite number is rounded down.
            if near & NOT_FINITE == NOT_FINITE {
                near = bits & kept;
            }
            // What is none itself stays as it is, whatever rounding would make of its bits.
            let finite = bits & NOT_FINITE != NOT_FINITE;
            near = select(finite, near, bits);
            let near_number = f32::reinterpret(near);
            rounded[lane] = near_number;
            rest[lane] = select(finite, number - near_number, 0.0f32);
        }
    }
    let to = row * 2 * depth + column;
    out[to as usize] = rounded;
    out[(to + depth) as usize] = rest;
}
