//! Dropout in CubeCL.

use burn::tensor::Tensor;
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use super::{Dropout, DropoutForward, DropoutOps};
use crate::checked::Checked;
use crate::cubecl::reduce::RowUnits;
use crate::cubecl::{array, empty, grid, rows, vector_width};
use crate::random::cubecl::{Rounds, column_halves, row_bits};
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;
/// Vectors per unit.
const RUN: usize = 4;

impl<R, F, I, BT> DropoutOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn dropout_forward(operands: Checked<DropoutForward<Self>>) -> Tensor<Self, 2> {
        let DropoutForward { x, dropout: what } = operands.into_inner();
        float(dropout(primitive(x), what))
    }
}

/// Dropout over `[rows, columns]`.
fn dropout<R: CubeRuntime>(x: CubeTensor<R>, dropout: Dropout) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let out = empty(&x, [n_rows, columns], x.dtype);
    let vector = vector_width(&[&x, &out], &[columns, stride]);
    let vectors = columns / vector;
    let row_units = RowUnits::new(&x.client, vectors, RUN, UNITS);
    let pieces = vectors.div_ceil(RUN * row_units.units as usize);
    // SAFETY: a row's units read and write their own piece of its own row, below `n_rows`, at
    // columns of the row's width.
    unsafe {
        dropout_kernel::launch_unchecked(
            &x.client,
            grid(n_rows.div_ceil(row_units.rows as usize) * pieces),
            row_units.cube_dim(),
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
            row_units,
            x.dtype.into(),
        );
    }
    out
}

/// A row's units have a contiguous piece each, so that the row's bits are computed once for several
/// vectors.
#[cube(launch_unchecked)]
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
    #[comptime] row_units: RowUnits,
    #[define(F)] _dtype: StorageType,
) {
    let row = CUBE_POS as u32 / pieces * row_units.rows + UNIT_POS_Y;
    if row >= rows {
        terminate!();
    }
    let first = CUBE_POS as u32 % pieces * comptime!(RUN as u32 * row_units.units) + UNIT_POS_X;
    let mut held = Array::<Vector<F, N>>::new(RUN);
    #[unroll]
    for i in 0..RUN {
        let column = min(first + comptime!(i as u32 * row_units.units), columns - 1);
        held[i] = x[(row * stride + column) as usize];
    }
    let bits = row_bits(row, rounds);
    #[unroll]
    for i in 0..RUN {
        let column = first + comptime!(i as u32 * row_units.units);
        if column < columns {
            let value = Vector::<f32, N>::cast_from(held[i]) * kept::<N>(bits, column, threshold, scale, rounds);
            out[(row * columns + column) as usize] = Vector::cast_from(value);
        }
    }
}

/// The dropout factors of a vector: zero or `scale`. `row` has the row's [`row_bits`], `column`
/// counts vectors.
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
