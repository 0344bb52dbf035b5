//! Buffers that are used again at once. A step of decoding writes the same few sizes in every layer, and to have the runtime
//! find memory for each costs both of its threads more than the launch that writes there.

use std::any::TypeId;
use std::cell::RefCell;
use std::collections::HashMap;

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::device::{Device, DeviceId};
use cubecl::server::Handle;

use super::{empty, one_stream};

/// Buffers of a size that are kept, as long as their thread lives.
const KEPT: usize = 8;
/// Bytes of the smallest buffer that is kept, and of the largest.
const LEAST: usize = 256;
const MOST: usize = 4 << 20;

/// A runtime, one of its devices, and bytes.
type Size = (TypeId, DeviceId, usize);

thread_local! {
    /// Kept per thread: a reference count cannot tell that another thread is about to take the same buffer.
    static SCRATCH: RefCell<HashMap<Size, Vec<Handle>>> = RefCell::new(HashMap::new());
}

/// An uninitialised tensor on the device of another, its rows without padding between them, in a buffer that nothing else
/// holds any more. `can_mut` is false of it.
///
/// Launches that were queued before may still read the buffer. They come first where all launches are in one order: those of
/// one thread, or of all threads where they share a stream. Where threads have streams of their own, another thread might
/// read it late, and nothing is kept.
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
