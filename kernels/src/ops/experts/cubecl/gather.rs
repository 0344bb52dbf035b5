//! Rows gathered in the order of their experts.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::sort::Order;
use crate::cubecl::{array, empty, grid, rows, vector_width};

const UNITS: u32 = 256;

/// For each place the row `slot / share` of `x`: `[slots, columns]`.
pub(in crate::ops::experts) fn gathered<R: CubeRuntime>(
    x: CubeTensor<R>,
    share: usize,
    order: &Order<R>,
) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    let (slots, columns) = (order.slots.meta.shape()[0], x.meta.shape()[1]);
    let out = empty(&x, [slots, columns], x.dtype);
    let vector = vector_width(&[&x, &out], &[columns, stride]);
    let units = slots * columns / vector;
    // SAFETY: each unit below `units` writes its own vector of `out`, and reads one of the row of a
    // slot, of which the order has as many.
    unsafe {
        gather_kernel::launch_unchecked(
            &x.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&x),
            array(&order.slots),
            array(&out),
            units as u32,
            (columns / vector) as u32,
            (stride / vector) as u32,
            share as u32,
            x.dtype.into(),
        );
    }
    out
}

#[cube(launch_unchecked)]
fn gather_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    order: &Array<u32>,
    out: &mut Array<Vector<F, N>>,
    units: u32,
    columns: u32,
    stride: u32,
    share: u32,
    #[define(F)] _dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let row = order[(at / columns) as usize] / share;
    out[at as usize] = x[(row * stride + at % columns) as usize];
}
