//! NCCL, on a stream of its own, next to CubeCL's.
//!
//! The library is loaded when several ranks first need it. CubeCL does not expose its stream: a
//! thread per device makes the driver calls and runs queued closures in order. A collective is
//! therefore queued as a closure, too. The closure
//!
//! 1. records an event of the context after everything launched before, and lets NCCL's stream wait
//!    for it;
//! 2. launches the collective;
//! 3. records an event after the collective, and lets everything launched later wait for it.
//!
//! The host does not wait.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use burn::cubecl::cuda::{CudaDevice, CudaRuntime};
use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::Runtime;
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::{Binding, ComputeServer};
use cubecl::stream_id::StreamId;
use cudarc::driver::sys::{self, CUcontext, CUevent, CUresult, CUstream};

use crate::cuda::in_context_of;

/// NCCL 2.10, the first version with bf16.
const OLDEST: c_int = 21_000;
const SUCCESS: c_int = 0;
/// A non-blocking communicator has not finished an operation yet.
const IN_PROGRESS: c_int = 7;
const SUM: c_int = 0;

type Comm = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

type Reduces = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;
type Gathers = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, CUstream) -> c_int;

/// The functions of NCCL that are used, and two of the driver that cudarc has only for CUDA 12.5
/// and newer.
struct Nccl {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    all_reduce: Reduces,
    reduce_scatter: Reduces,
    all_gather: Gathers,
    record_context: unsafe extern "C" fn(CUcontext, CUevent) -> CUresult,
    context_waits: unsafe extern "C" fn(CUcontext, CUevent) -> CUresult,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
}

/// This rank's NCCL communicator.
pub(crate) struct Communicator {
    nccl: &'static Nccl,
    comm: Comm,
    stream: CUstream,
    /// Recorded before and after a collective.
    ready: CUevent,
    done: CUevent,
    context: CUcontext,
    device: usize,
    aborted: AtomicBool,
    /// The first error of a call.
    fault: Mutex<Option<String>>,
}

// SAFETY: the driver's handles may be used on any thread. Only the device's thread uses the
// communicator, except for `ncclCommGetAsyncError` and `ncclCommAbort`, which other threads may
// call concurrently.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator of CUDA device {}", self.device)
    }
}

/// Rank 0 maps the messages of all ranks to one answer per rank.
pub(crate) type Answer<'a> = &'a mut dyn FnMut(Vec<Vec<u8>>) -> Vec<Vec<u8>>;

/// Creates the communicator of `rank` among `ranks`. The ranks exchange NCCL's id through `round`,
/// over their hosts. Waits for all ranks. `None` unless `device` is a CUDA device.
///
/// # Errors
/// If NCCL is missing or fails.
pub(crate) fn communicator(
    device: &dyn Any,
    rank: usize,
    ranks: usize,
    round: impl FnOnce(Vec<u8>, Answer<'_>) -> Vec<u8>,
) -> Option<Result<Communicator, String>> {
    let CudaDevice { index } = device.downcast_ref::<CudaDevice>()?;
    Some(begin(*index, rank, ranks, round))
}

fn begin(
    device: usize,
    rank: usize,
    ranks: usize,
    round: impl FnOnce(Vec<u8>, Answer<'_>) -> Vec<u8>,
) -> Result<Communicator, String> {
    let loaded = nccl();
    // Every rank takes part in the round, even without NCCL: otherwise the others would wait for
    // it.
    let mut id = UniqueId([0; 128]);
    let made = match (loaded, rank) {
        // SAFETY: the id is written to a local variable.
        (Ok(nccl), 0) => nccl.check("ncclGetUniqueId", unsafe { (nccl.unique_id)(&mut id) }),
        (Ok(_), _) => Ok(()),
        (Err(reason), _) => Err(reason.clone()),
    };
    let own = [&[u8::from(made.is_ok())], &id.0[..]].concat();
    let told = round(own, &mut |parts: Vec<Vec<u8>>| {
        let all = parts.iter().all(|part| part.first() == Some(&1));
        vec![[&[u8::from(all)], &parts[0][1..]].concat(); parts.len()]
    });
    made?;
    let nccl = loaded?;
    if told.first() != Some(&1) {
        return Err("NCCL is missing on another rank".into());
    }
    id.0.copy_from_slice(&told[1..]);
    let begun = in_context_of(device, || {
        // NCCL's objects need the device's context, and CubeCL may not have created it yet.
        // SAFETY: the driver returned the device. The context is retained until the process ends.
        let kept = cudarc::driver::result::device::get(device as i32)
            .and_then(|device| unsafe { cudarc::driver::result::primary_ctx::retain(device) });
        kept.map_err(|error| error.to_string())?;
        let context = cudarc::driver::result::ctx::get_current().map_err(|error| error.to_string())?;
        let context = context.ok_or("the device has no CUDA context")?;
        let (mut comm, mut stream, mut ready, mut done) = (null_mut(), null_mut(), null_mut(), null_mut());
        // SAFETY: the communicator is written to a local variable; the context of the device is
        // current.
        let code = unsafe { (nccl.init_rank)(&mut comm, ranks as c_int, id, rank as c_int) };
        nccl.check("ncclCommInitRank", code)?;
        let (mut low, mut high) = (0, 0);
        // SAFETY: each call writes to local variables, in the current context, which is retained
        // until the process ends.
        unsafe {
            driver("cuCtxGetStreamPriorityRange", sys::cuCtxGetStreamPriorityRange(&mut low, &mut high))?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            driver("cuStreamCreateWithPriority", sys::cuStreamCreateWithPriority(&mut stream, flags, high))?;
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            driver("cuEventCreate", sys::cuEventCreate(&mut ready, flags))?;
            driver("cuEventCreate", sys::cuEventCreate(&mut done, flags))?;
        }
        let (aborted, fault) = (AtomicBool::new(false), Mutex::new(None));
        Ok(Communicator { nccl, comm, stream, ready, done, context, device, aborted, fault })
    });
    begun.map_err(|error| error.to_string())?
}

/// Queues a collective of `sent`, all of one dtype, into `received`. The operation determines the
/// lengths.
pub(crate) fn submit<R: CubeRuntime>(
    communicator: &Arc<Communicator>,
    operation: Operation,
    sent: &[CubeTensor<R>],
    received: &[CubeTensor<R>],
) {
    let dtype = match sent[0].dtype {
        DType::F32 => 7,
        DType::F16 => 6,
        DType::BF16 => 9,
        dtype => unreachable!("{dtype:?} was refused before"),
    };
    let binding = |tensor: &CubeTensor<R>| tensor.handle.clone().binding();
    let parts: Vec<(Binding, Binding, usize)> = sent
        .iter()
        .zip(received)
        .map(|(from, to)| {
            // NCCL counts elements per rank: the sent ones of an all-gather, the received ones of a
            // reduce-scatter.
            let count = from.meta.num_elements().min(to.meta.num_elements());
            (binding(from), binding(to), count)
        })
        .collect();
    let queue = DeviceHandle::<<CudaRuntime as Runtime>::Server>::new(CudaDevice::new(communicator.device).to_id());
    let communicator = Arc::clone(communicator);
    queue.submit(move |server| {
        let stream = StreamId::current();
        let mut resource = |binding| server.get_resource(binding, stream).map_err(|error| error.to_string());
        let resources = parts.into_iter().map(|(from, to, count)| Ok((resource(from)?, resource(to)?, count)));
        let result = resources.collect::<Result<Vec<_>, String>>().and_then(|resources| {
            let pointers = resources.iter().map(|(from, to, count)| (from.resource().ptr, to.resource().ptr, *count));
            // SAFETY: the buffers have as many elements as the operation reads and writes, checked
            // by `Exchange`. They stay allocated until CubeCL's next launch waits for the
            // collective.
            unsafe { communicator.exchange(operation, pointers, dtype) }
        });
        if let Err(reason) = result {
            communicator.fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
        }
    });
    // The queue would otherwise run only when it is full or read, while other ranks wait.
    queue.flush_queue();
}

impl Communicator {
    /// # Safety
    /// The addresses must be buffers of this device, large enough for the operation. Nothing else
    /// may write to them before later launches wait for it.
    unsafe fn exchange(
        &self,
        operation: Operation,
        parts: impl Iterator<Item = (u64, u64, usize)>,
        dtype: c_int,
    ) -> Result<(), String> {
        let Self { nccl, comm, stream, ready, done, context, .. } = self;
        if self.aborted.load(Ordering::Acquire) {
            return Ok(());
        }
        // SAFETY: all handles are valid as long as `self`, and the context is current on this
        // thread. The caller guarantees the addresses.
        unsafe {
            driver("cuCtxRecordEvent", (nccl.record_context)(*context, *ready))?;
            driver("cuStreamWaitEvent", sys::cuStreamWaitEvent(*stream, *ready, 0))?;
            nccl.check("ncclGroupStart", (nccl.group_start)())?;
            for (from, to, count) in parts {
                let (from, to) = (from as *const c_void, to as *mut c_void);
                let code = match operation {
                    Operation::AllReduce => (nccl.all_reduce)(from, to, count, dtype, SUM, *comm, *stream),
                    Operation::ReduceScatter => (nccl.reduce_scatter)(from, to, count, dtype, SUM, *comm, *stream),
                    Operation::AllGather => (nccl.all_gather)(from, to, count, dtype, *comm, *stream),
                };
                nccl.check("NCCL", code)?;
            }
            nccl.check("ncclGroupEnd", (nccl.group_end)())?;
            driver("cuEventRecord", sys::cuEventRecord(*done, *stream))?;
            driver("cuCtxWaitEvent", (nccl.context_waits)(*context, *done))
        }
    }

    /// The first error of a call, or an asynchronous error of NCCL.
    pub(crate) fn fault(&self) -> Option<String> {
        if self.aborted.load(Ordering::Acquire) {
            return None;
        }
        let mut code = SUCCESS;
        // SAFETY: the communicator is valid, and the code is written to a local variable. Any
        // thread may call this.
        let asked = unsafe { (self.nccl.async_error)(self.comm, &mut code) };
        let wrong = [asked, code].into_iter().find(|code| ![SUCCESS, IN_PROGRESS].contains(code));
        let told = self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone();
        told.or_else(|| wrong.map(|code| self.nccl.message("NCCL", code)))
    }

    /// Aborts running collectives.
    pub(crate) fn abort(&self) {
        if !self.aborted.swap(true, Ordering::AcqRel) {
            // SAFETY: the communicator is valid, and only one call gets here. NCCL allows this on
            // another thread than the one that launches collectives.
            unsafe { (self.nccl.abort)(self.comm) };
        }
    }
}

impl Nccl {
    fn check(&self, function: &str, code: c_int) -> Result<(), String> {
        if [SUCCESS, IN_PROGRESS].contains(&code) { Ok(()) } else { Err(self.message(function, code)) }
    }

    fn message(&self, function: &str, code: c_int) -> String {
        // SAFETY: accepts any code, and returns a static string.
        let text = unsafe { (self.error_string)(code) };
        // SAFETY: a static string, as above.
        let text =
            if text.is_null() { "unknown error".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() };
        format!("{function}: {text} ({code}); for details set NCCL_DEBUG=WARN")
    }
}

fn driver(function: &str, result: CUresult) -> Result<(), String> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{function}: {result:?}")) }
}

/// NCCL, loaded once and never unloaded.
fn nccl() -> Result<&'static Nccl, &'static String> {
    static NCCL: OnceLock<Result<Nccl, String>> = OnceLock::new();
    NCCL.get_or_init(load).as_ref()
}

fn load() -> Result<Nccl, String> {
    let named = std::env::var_os("FIRECLAY_NCCL").map(PathBuf::from);
    let candidates = match &named {
        Some(folder) if folder.is_dir() => vec![folder.join("libnccl.so.2")],
        Some(file) => vec![file.clone()],
        None => [PathBuf::from("libnccl.so.2"), PathBuf::from("libnccl.so")].into_iter().chain(wheels()).collect(),
    };
    let mut failures = Vec::new();
    for candidate in candidates {
        // SAFETY: loading NCCL has no preconditions.
        match unsafe { libloading::Library::new(&candidate) } {
            Ok(library) => return functions(library, &candidate),
            // A name that is not on the loader's path is expected; a file that fails to load is
            // reported.
            Err(error) if candidate.is_absolute() || named.is_some() => failures.push(error.to_string()),
            Err(_) => {}
        }
    }
    let mend = "several GPUs need NCCL 2.10 or newer: pip install nvidia-nccl-cu13 (or -cu12), or FIRECLAY_NCCL=PATH \
                of libnccl.so.2";
    let tried = if failures.is_empty() { "libnccl.so.2 was not found".into() } else { failures.join("; ") };
    Err(format!("{tried}: {mend}"))
}

/// `libnccl.so.2` in the installed Python packages.
fn wheels() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let environments =
        [variable("VIRTUAL_ENV"), variable("CONDA_PREFIX"), variable("HOME").map(|home| home.join(".local"))];
    let roots = environments.into_iter().flatten().chain(["/usr/local", "/usr", "/opt/conda"].map(PathBuf::from));
    let mut found = Vec::new();
    for library in roots.flat_map(|root| [root.join("lib"), root.join("lib64")]) {
        let entries = std::fs::read_dir(library).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut versions: Vec<PathBuf> = entries
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")))
            .collect();
        versions.sort();
        let packages =
            versions.iter().flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.join(name)));
        found.extend(
            packages.map(|packages| packages.join("nvidia/nccl/lib/libnccl.so.2")).filter(|file| file.exists()),
        );
    }
    found
}

fn functions(library: libloading::Library, path: &Path) -> Result<Nccl, String> {
    // NCCL's threads run until the process ends.
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    let missing = |error: libloading::Error| format!("{}: {error}", path.display());
    let driver = ["libcuda.so.1", "nvcuda.dll"].into_iter().find_map(|name| {
        // SAFETY: the driver is already loaded.
        unsafe { libloading::Library::new(name) }.ok()
    });
    let driver: &'static libloading::Library = Box::leak(Box::new(driver.ok_or("no CUDA driver found")?));
    let old = |_: libloading::Error| "several GPUs need a driver for CUDA 12.5 or newer".to_string();
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: NCCL exports the function under this name with this signature.
            *unsafe { library.get($name) }.map_err(missing)?
        };
        (driver $name:literal) => {
            // SAFETY: as above, for the driver.
            *unsafe { driver.get($name) }.map_err(old)?
        };
    }
    let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = function!(b"ncclGetVersion\0");
    let mut version = 0;
    // SAFETY: the version is written to a local variable.
    let code = unsafe { get_version(&mut version) };
    if code != SUCCESS || version < OLDEST {
        return Err(format!("{} is version {version} of NCCL, and 2.10 or newer is needed", path.display()));
    }
    Ok(Nccl {
        unique_id: function!(b"ncclGetUniqueId\0"),
        init_rank: function!(b"ncclCommInitRank\0"),
        abort: function!(b"ncclCommAbort\0"),
        async_error: function!(b"ncclCommGetAsyncError\0"),
        error_string: function!(b"ncclGetErrorString\0"),
        group_start: function!(b"ncclGroupStart\0"),
        group_end: function!(b"ncclGroupEnd\0"),
        all_reduce: function!(b"ncclAllReduce\0"),
        reduce_scatter: function!(b"ncclReduceScatter\0"),
        all_gather: function!(b"ncclAllGather\0"),
        record_context: function!(driver b"cuCtxRecordEvent\0"),
        context_waits: function!(driver b"cuCtxWaitEvent\0"),
    })
}
