//! Dropout in CubeCL, and the random bits alone.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::Dropout;
use crate::RandomKey;
use crate::cubecl::reduce::Team;
use crate::cubecl::{array, empty, grid, rows, vector_width};
use crate::random::cubecl::{Rounds, column_bits, column_halves, row_bits};

const UNITS: u32 = 256;
/// Vectors that a unit has.
const RUN: usize = 4;

/// Dropout over `[rows, columns]`.
pub(crate) fn dropout<R: CubeRuntime>(x: CubeTensor<R>, dropout: Dropout) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let out = empty(&x, [n_rows, columns], x.dtype);
    let vector = vector_width(&[&x, &out], &[columns, stride]);
    let vectors = columns / vector;
    let team = Team::new(&x.client, vectors, RUN, UNITS);
    let pieces = vectors.div_ceil(RUN * team.units as usize);
    // SAFETY: a team reads and writes its own piece of its own row, below `n_rows`, at columns of the row's width.
    unsafe {
        dropout_kernel::launch_unchecked(
            &x.client,
            grid(n_rows.div_ceil(team.rows as usize) * pieces),
            team.cube_dim(),
            vector,
            array(&x),
            array(&out),
            n_rows as u32,
            vectors as u32,
            (stride / vector) as u32,
            pieces as u32,
            dropout.threshold(),
            dropout.scale() as f32,
            dropout.key.rounds(),
            team,
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

/// A team has a piece of a row, so that the row's bits are made once for several vectors.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dropout_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<Vector<F, N>>,
    rows: u32,
    columns: u32,
    stride: u32,
    pieces: u32,
    threshold: u32,
    scale: f32,
    rounds: &Rounds,
    #[comptime] team: Team,
    #[define(F)] _dtype: StorageType,
) {
    let row = CUBE_POS as u32 / pieces * team.rows + UNIT_POS_Y;
    if row >= rows {
        terminate!();
    }
    let first = CUBE_POS as u32 % pieces * comptime!(RUN as u32 * team.units) + UNIT_POS_X;
    let mut held = Array::<Vector<F, N>>::new(RUN);
    #[unroll]
    for i in 0..RUN {
        let column = min(first + comptime!(i as u32 * team.units), columns - 1);
        held[i] = x[(row * stride + column) as usize];
    }
    let bits = row_bits(row, rounds);
    #[unroll]
    for i in 0..RUN {
        let column = first + comptime!(i as u32 * team.units);
        if column < columns {
            let value = Vector::<f32, N>::cast_from(held[i]) * kept::<N>(bits, column, threshold, scale, rounds);
            out[(row * columns + column) as usize] = Vector::cast_from(value);
        }
    }
}

/// The factors on a vector of elements: zero where dropped, `scale` where kept. `row` is the row's [`row_bits`],
/// `column` counts vectors.
#[cube]
pub(crate) fn kept<N: Size>(row: u32, column: u32, threshold: u32, scale: f32, rounds: &Rounds) -> Vector<f32, N> {
    let width = N::value();
    let mut factors = Vector::<f32, N>::empty();
    if comptime!(width == 1) {
        let half = (column_halves(row, column / 2, rounds) >> (16 * (column % 2))) & 0xffff;
        factors[0] = select(half < threshold, 0.0f32, scale);
    } else {
        #[unroll]
        for pair in 0..comptime!(width / 2) {
            let halves = column_halves(row, column * comptime!(width as u32 / 2) + comptime!(pair as u32), rounds);
            factors[comptime!(2 * pair)] = select(halves & 0xffff < threshold, 0.0f32, scale);
            factors[comptime!(2 * pair + 1)] = select(halves >> 16 < threshold, 0.0f32, scale);
        }
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
