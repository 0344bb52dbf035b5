//! Reusable scratch buffers. A decode step writes the same few sizes in every layer, and allocation
//! in the runtime costs more than the launch that writes there.

use std::any::TypeId;
use std::cell::RefCell;
use std::collections::HashMap;

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::device::{Device, DeviceId};
use cubecl::server::Handle;

use super::{empty, one_stream};

/// Buffers kept per size, for the life of their thread.
const KEPT: usize = 8;
/// Minimum and maximum size of kept buffers, in bytes.
const LEAST: usize = 256;
const MOST: usize = 4 << 20;

/// Runtime, device and size.
type Size = (TypeId, DeviceId, usize);

thread_local! {
    /// Per thread: a reference count does not show that another thread is about to take the same
    /// buffer.
    static SCRATCH: RefCell<HashMap<Size, Vec<Handle>>> = RefCell::new(HashMap::new());
}

/// An uninitialised tensor on the same device with contiguous rows, in a buffer that is not in use
/// any more. Its `can_mut` is false.
///
/// Queued launches may still read the buffer. They run first if all launches are in one order:
/// those of one thread, or of all threads on a shared stream. With a stream per thread, another
/// thread might read it later, so nothing is kept.
pub(crate) fn scratch<R: CubeRuntime>(like: &CubeTensor<R>, shape: impl Into<Shape>, dtype: DType) -> CubeTensor<R> {
    let shape = shape.into();
    let bytes = shape.num_elements() * dtype.size();
    let size = bytes.next_power_of_two().max(LEAST);
    if size > MOST || !one_stream() {
        return empty(like, shape, dtype);
    }
    let handle = SCRATCH.with_borrow_mut(|scratch| {
        let kept = scratch.entry((TypeId::of::<R>(), like.device.to_id(), size)).or_default();
        if let Some(free) = kept.iter().find(|handle| handle.can_mut()) {
            return free.clone();
        }
        let handle = like.client.empty(size);
        if kept.len() < KEPT {
            kept.push(handle.clone());
        }
        handle
    });
    let handle = if size > bytes { handle.offset_end((size - bytes) as u64) } else { handle };
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, dtype)
}
