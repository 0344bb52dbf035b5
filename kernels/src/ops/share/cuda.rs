//! Sharing on CUDA: other libraries use the same primary context as CubeCL.
//!
//! CubeCL does not expose its stream. A reader's stream therefore waits for an event of the whole
//! context (`cuCtxRecordEvent`, CUDA 12.5); with older drivers the host waits. When a reader drops
//! the memory, an event is recorded on its stream, and the buffer stays allocated until the event
//! has completed.

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

/// The memory of a CUDA tensor; `None` for other runtimes.
pub(super) fn share(tensor: Box<dyn Any>) -> Result<Option<SharedMemory>, ExecutionError> {
    let Ok(tensor) = tensor.downcast::<Buffer>() else { return Ok(None) };
    reclaim();
    // Strides describe padded rows, but not packed quantized values.
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

/// A buffer with a reader.
struct HeldBuffer {
    /// Moved out on drop.
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
            // SAFETY: the driver's function, called with a context and an event of it.
            accepted(unsafe { record(context, event.0) })?;
            // SAFETY: the event is recorded, and the reader guarantees that the handle is a stream.
            // An event may be destroyed while a stream waits for it.
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
        // SAFETY: `drop` runs once, and nothing else moves the buffer out.
        let buffer = unsafe { ManuallyDrop::take(&mut self.buffer) };
        let passed = self.context.within(|_| {
            let event = Event::new()?;
            match self.reader {
                // SAFETY: the reader guarantees that the handle is a stream; the driver refuses a
                // destroyed one.
                Reader::Stream(stream) => accepted(unsafe { sys::cuEventRecord(event.0, stream as CUstream) })?,
                // The stream is unknown.
                // SAFETY: synchronizes the current context.
                Reader::Unordered => accepted(unsafe { sys::cuCtxSynchronize() })?,
            }
            Ok(event)
        });
        match passed {
            Ok(event) => lock().push(Passed { event, context: self.context, buffer }),
            // The stream was destroyed, or the driver is unloaded.
            // SAFETY: synchronizes the current context.
            Err(_) => {
                let _ = self.context.within(|_| accepted(unsafe { sys::cuCtxSynchronize() }));
            }
        }
    }
}

/// A buffer that its reader has dropped, and the event that ends its use.
struct Passed {
    event: Event,
    context: Context,
    buffer: Buffer,
}

static PASSED: Mutex<Vec<Passed>> = Mutex::new(Vec::new());

fn lock() -> std::sync::MutexGuard<'static, Vec<Passed>> {
    PASSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frees buffers whose readers have finished; returns how many remain.
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
        // Fails only if the driver is unloaded, and the event with it.
        let _ = context.within(|_| {
            drop(event);
            Ok(())
        });
        drop(buffer);
    }
    left
}

/// The primary context of a device; CubeCL retains it until the process ends.
#[derive(Clone, Copy)]
struct Context(CUcontext);

// SAFETY: any thread may make a context current.
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

    /// Runs `work` with this context current, and restores the thread's context.
    fn within<T>(self, work: impl FnOnce(CUcontext) -> Result<T, CUresult>) -> Result<T, CUresult> {
        // SAFETY: the context exists.
        accepted(unsafe { sys::cuCtxPushCurrent_v2(self.0) })?;
        let done = work(self.0);
        let mut popped = ptr::null_mut();
        // SAFETY: pops the context that was pushed.
        accepted(unsafe { sys::cuCtxPopCurrent_v2(&mut popped) })?;
        done
    }
}

/// An event of the current context; drop it with the same context current.
struct Event(CUevent);

// SAFETY: any thread may query an event.
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
        // SAFETY: the last reference; the driver defers destruction while streams wait.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// `cuCtxRecordEvent`, if the driver has it.
fn record_context() -> Option<RecordEvent> {
    static FOUND: OnceLock<Option<RecordEvent>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
        // SAFETY: the driver is already loaded, so no constructors run.
        let driver = ManuallyDrop::new(unsafe { Library::new(name) }.ok()?);
        // SAFETY: the driver's function of this name has this type, and the library is never
        // unloaded.
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
