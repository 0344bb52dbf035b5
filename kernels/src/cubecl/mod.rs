//! Shared parts of the CubeCL kernels: launch arguments, grids, vector widths, casts and sums.
//!
//! Kernels take only arrays and scalars. A kernel with tensor arguments uploads their shapes and
//! strides at every launch.

pub(crate) mod lazy_kernel;
pub(crate) mod reduce;
mod scratch;
pub(crate) mod tensor_cores;
pub(crate) mod transpose;

use std::sync::OnceLock;

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::prelude::*;
use cubecl::stream_id::StreamId;

use crate::recorder;

pub(crate) use self::lazy_kernel::launch;
pub(crate) use self::scratch::scratch;

/// The largest grid size along one axis that every device supports.
const MAX_CUBES: u32 = 65_535;

/// An uninitialised tensor on the same device, with contiguous rows.
pub(crate) fn empty<R: CubeRuntime>(like: &CubeTensor<R>, shape: impl Into<Shape>, dtype: DType) -> CubeTensor<R> {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// The tensor in contiguous memory, copied only if need be.
pub(crate) fn contiguous<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    burn_cubecl::kernel::into_contiguous(x)
}

/// A matrix with contiguous columns, and its row stride: copied only if need be.
pub(crate) fn rows<R: CubeRuntime>(x: CubeTensor<R>) -> (CubeTensor<R>, usize) {
    let columns = x.meta.shape()[1];
    let x = if columns == 1 || x.meta.strides()[1] == 1 { x } else { contiguous(x) };
    let stride = if x.meta.shape()[0] == 1 { columns } else { x.meta.strides()[0] };
    (x, stride)
}

/// The tensor's buffer as a kernel argument.
///
/// # Panics
/// If it has 2^32 elements or more, or belongs to another thread while threads have separate
/// streams, which do not wait for each other. Names the operation.
pub(crate) fn array<R: CubeRuntime>(x: &CubeTensor<R>) -> ArrayArg<R> {
    assert_reachable(x);
    let length = (x.handle.size_in_used() as usize) / x.dtype.size().max(1);
    assert_addressable(length);
    // SAFETY: a tensor's strides do not exceed its buffer, which has this length.
    unsafe { ArrayArg::from_raw_parts(x.handle.clone(), length) }
}

/// Panics, with the operation's name, if the tensor belongs to another thread and threads have
/// separate streams.
pub(crate) fn assert_reachable<R: CubeRuntime>(x: &CubeTensor<R>) {
    assert!(
        one_stream() || x.handle.stream == StreamId::current(),
        "{}: the tensor belongs to another thread's stream: call `devices::configure` before any \
         device is used",
        recorder::current()
    );
}

/// Whether all threads launch into one stream, in order.
pub(crate) fn one_stream() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(|| CubeClRuntimeConfig::get().streaming.max_streams == 1)
}

/// Panics, with the operation's name, unless the elements can be counted in 32 bits.
pub(crate) fn assert_addressable(length: usize) {
    let fits = u32::try_from(length).is_ok();
    assert!(fits, "{}: a tensor of {length} elements is too large, kernels index up to 2^32", recorder::current());
}

/// An optional tensor as a kernel argument.
pub(crate) fn optional<R: CubeRuntime, T>(x: &Option<CubeTensor<R>>) -> ComptimeOptionArgs<Array<T>, R>
where
    T: CubePrimitive,
    Array<T>: LaunchArg<RuntimeArg<R> = ArrayArg<R>>,
{
    x.as_ref().map(array).into()
}

/// The dtype of an optional tensor, or of its stand-in.
pub(crate) fn dtype_of<R: CubeRuntime>(x: &Option<CubeTensor<R>>, other: &CubeTensor<R>) -> StorageType {
    x.as_ref().map_or(other.dtype, |x| x.dtype).into()
}

/// How many elements a kernel may read or write at once: the widest vector of the device for the
/// largest element of `tensors`, such that it divides each of `lengths` (widths and strides) and
/// every tensor is aligned to it.
pub(crate) fn vector_width<R: CubeRuntime>(tensors: &[&CubeTensor<R>], lengths: &[usize]) -> usize {
    let size = tensors.iter().map(|x| x.dtype.size()).max().unwrap_or(4);
    let fits = |width: usize| {
        lengths.iter().all(|length| length.is_multiple_of(width))
            && tensors.iter().all(|x| {
                let offset = x.handle.offset_start.unwrap_or(0) as usize;
                offset.is_multiple_of(width * x.dtype.size())
            })
    };
    tensors[0].client.io_optimized_vector_sizes(size).find(|width| fits(*width)).unwrap_or(1)
}

/// Clamps an id or position to `0..=last`: values outside, on either side, become `last`.
#[cube]
pub(crate) fn clamp_index<I: Int>(id: I, last: u32) -> u32 {
    let outside = id < I::from_int(0) || id > I::cast_from(last);
    select(outside, last, u32::cast_from(id))
}

/// A grid of at least this many cubes; kernels check `CUBE_POS` or `ABSOLUTE_POS` themselves.
pub(crate) fn grid(cubes: usize) -> CubeCount {
    let cubes = u32::try_from(cubes).expect("fewer than 2^32 cubes").max(1);
    if cubes <= MAX_CUBES {
        return CubeCount::Static(cubes, 1, 1);
    }
    let y = cubes.div_ceil(MAX_CUBES);
    CubeCount::Static(cubes.div_ceil(y), y, 1)
}

/// The tensor cast to another dtype, if need be.
pub(crate) fn cast<R: CubeRuntime>(x: CubeTensor<R>, dtype: DType) -> CubeTensor<R> {
    if x.dtype == dtype { x } else { burn_cubecl::kernel::cast(x, dtype) }
}

/// A matrix in `dtype`, padded with zero rows to `n_rows`.
pub(crate) fn cast_padded<R: CubeRuntime>(x: CubeTensor<R>, n_rows: usize, dtype: DType) -> CubeTensor<R> {
    let [own_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    if own_rows == n_rows {
        return cast(x, dtype);
    }
    let x = contiguous(x);
    let out = empty(&x, [n_rows, columns], dtype);
    let vector = vector_width(&[&x, &out], &[columns]);
    let units = n_rows * columns / vector;
    // SAFETY: each unit below `units` writes its own vector, and reads the same one where the
    // matrix has it.
    unsafe {
        cast_padded_kernel::launch_unchecked(
            &x.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&x),
            array(&out),
            (own_rows * columns / vector) as u32,
            units as u32,
            x.dtype.into(),
            dtype.into(),
        );
    }
    out
}

#[cube(launch_unchecked)]
fn cast_padded_kernel<F: Float, O: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<Vector<O, N>>,
    there: u32,
    units: u32,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at < units {
        let mut value = Vector::<O, N>::cast_from(0.0f32);
        if at < there {
            value = Vector::cast_from(x[at as usize]);
        }
        out[at as usize] = value;
    }
}

/// The sum of `[pieces, m, n]` over its pieces, in order, as `[m, n]` f32.
pub(crate) fn sum_pieces<R: CubeRuntime>(mut x: CubeTensor<R>, shape: [usize; 2]) -> CubeTensor<R> {
    if x.meta.shape()[0] == 1 {
        x.meta.remove(0);
        return x;
    }
    let out = empty(&x, shape, DType::F32);
    let size = shape[0] * shape[1];
    let vector = vector_width(&[&x, &out], &[size]);
    let units = size / vector;
    // SAFETY: each unit below `units` writes its own vector and reads the same one of every piece.
    unsafe {
        sum_pieces_kernel::launch_unchecked(
            &x.client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&x),
            array(&out),
            units as u32,
            x.meta.shape()[0] as u32,
        );
    }
    out
}

const UNITS: u32 = 256;

#[cube(launch_unchecked)]
fn sum_pieces_kernel<N: Size>(x: &Array<Vector<f32, N>>, out: &mut Array<Vector<f32, N>>, units: u32, pieces: u32) {
    let at = ABSOLUTE_POS as u32;
    if at >= units {
        terminate!();
    }
    let mut sum = Vector::<f32, N>::new(0.0);
    for piece in 0..pieces {
        sum += x[(piece * units + at) as usize];
    }
    out[at as usize] = sum;
}
