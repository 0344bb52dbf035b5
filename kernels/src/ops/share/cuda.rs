//! Buffers on a CUDA device, read by other libraries in the primary context that CubeCL uses, too.
//!
//! CubeCL keeps its stream to itself. A reader's stream therefore waits for all that the context was asked for, by one
//! event (`cuCtxRecordEvent`, CUDA 12.5), or, where the driver lacks that, the host waits. When a reader drops the memory,
//! an event on its stream says when it is through; until then the buffer is kept, so that the pool gives it to nobody.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use burn::tensor::backend::ExecutionError;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaRuntime;
use cudarc::driver::sys::{self, CUcontext, CUevent, CUresult, CUstream};
use libloading::Library;

use super::{Held, Place, Reader, SharedMemory};
use crate::cubecl::contiguous;

type Buffer = CubeTensor<CudaRuntime>;
type RecordEvent = unsafe extern "C" fn(CUcontext, CUevent) -> CUresult;

/// Where a tensor is stored; `None` if it is not CUDA's.
pub(super) fn share(tensor: Box<dyn Any>) -> Result<Option<SharedMemory>, ExecutionError> {
    let Ok(tensor) = tensor.downcast::<Buffer>() else { return Ok(None) };
    reclaim();
    // Rows may be apart, which strides tell; quantized values are packed, which they do not.
    let tensor = if tensor.qparams.is_some() { contiguous(*tensor) } else { *tensor };
    let resource = tensor.client.get_resource(tensor.handle.clone());
    let resource = resource.map_err(|error| ExecutionError::WithContext { reason: error.to_string() })?;
    let strides = tensor.meta.strides().iter().map(|stride| *stride as isize).collect();
    let (shape, dtype, device) = (tensor.meta.shape().to_vec(), tensor.dtype, tensor.device.index as i32);
    let address = resource.resource().ptr as usize;
    let context = Context::of_device(device)?;
    let held = Box::new(HeldBuffer { buffer: ManuallyDrop::new(tensor), context, reader: Reader::Unordered });
    Ok(Some(SharedMemory { address, shape, strides, dtype, place: Place::Cuda(device), held }))
}

/// A buffer that somebody reads.
struct HeldBuffer {
    /// Taken when this is dropped.
    buffer: ManuallyDrop<Buffer>,
    context: Context,
    reader: Reader,
}

impl Held for HeldBuffer {
    fn order(&mut self, reader: Reader) -> Result<(), ExecutionError> {
        self.reader = reader;
        let Reader::Stream(stream) = reader else { return Ok(()) };
        let record = record_context();
        if record.is_none() {
            return wait(&self.buffer);
        }
        let recorded = self.context.within(|context| {
            let event = Event::new()?;
            let record = record.ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
            // SAFETY: the function is the driver's of that name, and takes a context and an event of it.
            accepted(unsafe { record(context, event.0) })?;
            // SAFETY: the event is recorded, and the reader says that the handle is a stream's. An event that is waited
            // for may be destroyed.
            accepted(unsafe { sys::cuStreamWaitEvent(stream as CUstream, event.0, 0) })
        });
        match recorded {
            Ok(()) => Ok(()),
            Err(CUresult::CUDA_ERROR_NOT_SUPPORTED) => wait(&self.buffer),
            Err(error) => Err(failed("a reader's stream cannot wait", error)),
        }
    }
}

impl Drop for HeldBuffer {
    fn drop(&mut self) {
        // SAFETY: nothing takes the buffer but this, once.
        let buffer = unsafe { ManuallyDrop::take(&mut self.buffer) };
        let passed = self.context.within(|_| {
            let event = Event::new()?;
            match self.reader {
                // SAFETY: the reader said that the handle is a stream's; of one that is gone the driver knows nothing.
                Reader::Stream(stream) => accepted(unsafe { sys::cuEventRecord(event.0, stream as CUstream) })?,
                // Nobody knows which stream it is on.
                // SAFETY: waits for the context that is current.
                Reader::Unordered => accepted(unsafe { sys::cuCtxSynchronize() })?,
            }
            Ok(event)
        });
        match passed {
            Ok(event) => lock().push(Passed { event, context: self.context, buffer }),
            // The stream is gone, or the driver is unloaded: what was asked for is waited for, and the buffer is free.
            // SAFETY: waits for the context that is current.
            Err(_) => {
                let _ = self.context.within(|_| accepted(unsafe { sys::cuCtxSynchronize() }));
            }
        }
    }
}

/// A buffer whose reader has dropped it, and when it is through.
struct Passed {
    event: Event,
    context: Context,
    buffer: Buffer,
}

static PASSED: Mutex<Vec<Passed>> = Mutex::new(Vec::new());

fn lock() -> std::sync::MutexGuard<'static, Vec<Passed>> {
    PASSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frees the buffers whose readers are through; how many are left.
pub(super) fn reclaim() -> usize {
    let mut passed = lock();
    let waiting = |passed: &Passed| {
        // SAFETY: the event exists, and its context is current.
        let state = passed.context.within(|_| Ok(unsafe { sys::cuEventQuery(passed.event.0) }));
        state == Ok(CUresult::CUDA_ERROR_NOT_READY)
    };
    let (kept, free): (Vec<Passed>, Vec<Passed>) = passed.drain(..).partition(waiting);
    *passed = kept;
    let left = passed.len();
    drop(passed);
    for Passed { event, context, buffer } in free {
        // Where that cannot be done, the driver is gone, and the event with it.
        let _ = context.within(|_| {
            drop(event);
            Ok(())
        });
        drop(buffer);
    }
    left
}

/// The primary context of a device, which lasts as long as CubeCL's client: as the process.
#[derive(Clone, Copy)]
struct Context(CUcontext);

// SAFETY: a context is the driver's own, which any thread may make current.
unsafe impl Send for Context {}

impl Context {
    fn of_device(index: i32) -> Result<Self, ExecutionError> {
        static FOUND: Mutex<Vec<(i32, usize)>> = Mutex::new(Vec::new());
        let mut known = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, context)) = known.iter().find(|(device, _)| *device == index) {
            return Ok(Self(*context as CUcontext));
        }
        let found = || {
            let device = cudarc::driver::result::device::get(index)?;
            // SAFETY: the device was just given out by the driver.
            unsafe { cudarc::driver::result::primary_ctx::retain(device) }
        };
        let context = found().map_err(|error| failed("the device's context", error.0))?;
        known.push((index, context as usize));
        Ok(Self(context))
    }

    /// Runs `work` with this context current; the thread's own is current again afterwards.
    fn within<T>(self, work: impl FnOnce(CUcontext) -> Result<T, CUresult>) -> Result<T, CUresult> {
        // SAFETY: the context exists.
        accepted(unsafe { sys::cuCtxPushCurrent_v2(self.0) })?;
        let done = work(self.0);
        let mut popped = ptr::null_mut();
        // SAFETY: takes back what was pushed.
        accepted(unsafe { sys::cuCtxPopCurrent_v2(&mut popped) })?;
        done
    }
}

/// An event of the context that was current; dropped where it is current again.
struct Event(CUevent);

// SAFETY: an event is the driver's own, which any thread may ask.
unsafe impl Send for Event {}

impl Event {
    fn new() -> Result<Self, CUresult> {
        let mut event = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the driver writes one handle.
        accepted(unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Self(event))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nothing refers to it any more; one that streams wait for is destroyed when they are through.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// `cuCtxRecordEvent`, where the driver has it.
fn record_context() -> Option<RecordEvent> {
    static FOUND: OnceLock<Option<RecordEvent>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
        // SAFETY: the driver is loaded already; its constructors have run.
        let driver = ManuallyDrop::new(unsafe { Library::new(name) }.ok()?);
        // SAFETY: the driver's function of this name has this type, and the library is never unloaded.
        unsafe { driver.get::<RecordEvent>(b"cuCtxRecordEvent\0") }.ok().map(|found| *found)
    })
}

fn accepted(result: CUresult) -> Result<(), CUresult> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(result) }
}

fn wait(buffer: &Buffer) -> Result<(), ExecutionError> {
    let waited = cubecl::future::block_on(buffer.client.sync());
    waited.map_err(|error| ExecutionError::WithContext { reason: error.to_string() })
}

fn failed(what: &str, error: CUresult) -> ExecutionError {
    ExecutionError::WithContext { reason: format!("{what}: {error:?}") }
}
