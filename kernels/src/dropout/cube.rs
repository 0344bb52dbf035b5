//! Dropout in CubeCL, and the random bits alone.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::Dropout;
use crate::RandomKey;
use crate::cube::{array, empty, grid, rows, vector_width};
use crate::random::cube::{Rounds, column_bits, row_bits};

const UNITS: u32 = 256;

/// Dropout over `[rows, columns]`.
pub(crate) fn dropout<R: CubeRuntime>(x: CubeTensor<R>, dropout: Dropout) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let out = empty(&x, [n_rows, columns], x.dtype);
    let vector = vector_width(&[&x, &out], &[columns, stride]);
    let units = n_rows * columns / vector;
    // SAFETY: each unit below `units` reads and writes its own vector of a [rows, columns] matrix.
    unsafe {
        dropout_kernel::launch_unchecked(
            &x.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&x),
            array(&out),
            units as u32,
            (columns / vector) as u32,
            (stride / vector) as u32,
            dropout.threshold(),
            dropout.scale() as f32,
            dropout.key.rounds(),
            x.dtype.into(),
        );
    }
    out
}

/// The bits of `key` over `[rows, columns]`, into `out`, 32-bit integers.
pub(crate) fn random_bits<R: CubeRuntime>(out: CubeTensor<R>, key: RandomKey) -> CubeTensor<R> {
    let [n_rows, columns] = [out.meta.shape()[0], out.meta.shape()[1]];
    debug_assert_eq!(out.dtype, DType::I32);
    let units = n_rows * columns;
    // SAFETY: each unit below `units` writes its own element.
    unsafe {
        random_bits_kernel::launch_unchecked(
            &out.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            array(&out),
            units as u32,
            columns as u32,
            key.rounds(),
        );
    }
    out
}

#[cube(launch_unchecked)]
fn dropout_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<Vector<F, N>>,
    units: u32,
    columns: u32,
    stride: u32,
    threshold: u32,
    scale: f32,
    rounds: &Rounds,
    #[define(F)] _dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let row = at / columns;
    let column = at % columns;
    let value = Vector::<f32, N>::cast_from(x[(row * stride + column) as usize]);
    out[at as usize] = Vector::cast_from(value * kept::<N>(row_bits(row, rounds), column, threshold, scale, rounds));
}

/// The factors on a vector of elements: zero where dropped, `scale` where kept. `row` is the row's [`row_bits`],
/// `column` counts vectors.
#[cube]
pub(crate) fn kept<N: Size>(row: u32, column: u32, threshold: u32, scale: f32, rounds: &Rounds) -> Vector<f32, N> {
    let mut factors = Vector::<f32, N>::empty();
    #[unroll]
    for lane in 0..N::value() {
        let bits = column_bits(row, column * N::value() as u32 + lane as u32, rounds);
        factors[lane] = select(bits < threshold, 0.0f32, scale);
    }
    factors
}

#[cube(launch_unchecked)]
fn random_bits_kernel(out: &mut Array<i32>, units: u32, columns: u32, rounds: &Rounds) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    out[at as usize] = i32::cast_from(column_bits(row_bits(at / columns, rounds), at % columns, rounds));
}
