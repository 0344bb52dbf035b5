//! Scales gradients by the gradient of the loss, a scalar on the device. It is usually one, and
//! then unshared gradients stay unchanged.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::cubecl::{array, contiguous, empty, grid, vector_width};
use crate::multiprocessors::multiprocessors;

const UNITS: u32 = 256;
/// Cubes per multiprocessor.
const CUBES: u32 = 8;

/// `x * scale`, in place if `x` is not shared.
pub(super) fn scaled<R: CubeRuntime>(x: CubeTensor<R>, scale: &CubeTensor<R>) -> CubeTensor<R> {
    let x = contiguous(x);
    let in_place = x.can_mut();
    let out = if in_place { x.clone() } else { empty(&x, [x.meta.shape()[0], x.meta.shape()[1]], x.dtype) };
    let size = x.meta.num_elements();
    let vector = vector_width(&[&x, &out], &[size]);
    // SAFETY: each unit reads and writes its own vectors of `x` and `out`, which is as large and
    // not shared; `scale` has one element.
    unsafe {
        scale_kernel::launch_unchecked(
            &x.client,
            cubes(&x, size / vector),
            CubeDim::new_1d(UNITS),
            vector,
            array(&x),
            array(scale),
            array(&out),
            (size / vector) as u32,
            in_place,
            x.dtype.into(),
        );
    }
    out
}

/// `sum + x * scale` in f32, in place of `sum` or `x` if not shared.
pub(super) fn add_scaled<R: CubeRuntime>(sum: CubeTensor<R>, x: CubeTensor<R>, scale: &CubeTensor<R>) -> CubeTensor<R> {
    let (sum, x) = (contiguous(sum), contiguous(x));
    let out = match (sum.can_mut(), x.can_mut()) {
        (true, _) => sum.clone(),
        (_, true) => x.clone(),
        _ => empty(&x, [x.meta.shape()[0], x.meta.shape()[1]], DType::F32),
    };
    let size = x.meta.num_elements();
    let vector = vector_width(&[&sum, &x, &out], &[size]);
    // SAFETY: each unit reads its own vectors of `sum` and `x` and writes those of `out`. All have
    // the same size, and `out` is not shared.
    unsafe {
        add_scaled_kernel::launch_unchecked(
            &x.client,
            cubes(&x, size / vector),
            CubeDim::new_1d(UNITS),
            vector,
            array(&sum),
            array(&x),
            array(scale),
            array(&out),
            (size / vector) as u32,
        );
    }
    out
}

/// At most as many cubes as run concurrently: each has a cost even without work.
fn cubes<R: CubeRuntime>(x: &CubeTensor<R>, vectors: usize) -> CubeCount {
    grid(vectors.div_ceil(UNITS as usize).min((multiprocessors(x) * CUBES) as usize))
}

#[cube(launch_unchecked)]
fn scale_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    scale: &Array<f32>,
    out: &mut Array<Vector<F, N>>,
    size: u32,
    #[comptime] in_place: bool,
    #[define(F)] _dtype: StorageType,
) {
    let scale = scale[0];
    if in_place && scale == 1.0f32 {
        terminate!();
    }
    let mut at = ABSOLUTE_POS as u32;
    while at < size {
        out[at as usize] = Vector::cast_from(Vector::<f32, N>::cast_from(x[at as usize]) * Vector::new(scale));
        at += CUBE_COUNT as u32 * UNITS;
    }
}

#[cube(launch_unchecked)]
fn add_scaled_kernel<N: Size>(
    sum: &Array<Vector<f32, N>>,
    x: &Array<Vector<f32, N>>,
    scale: &Array<f32>,
    out: &mut Array<Vector<f32, N>>,
    size: u32,
) {
    let scale = Vector::<f32, N>::new(scale[0]);
    let mut at = ABSOLUTE_POS as u32;
    while at < size {
        out[at as usize] = sum[at as usize] + x[at as usize] * scale;
        at += CUBE_COUNT as u32 * UNITS;
    }
}
