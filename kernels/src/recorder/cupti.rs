//! Records of NVIDIA's CUPTI for a CUDA device.
//!
//! CUPTI is loaded when a recording first needs it. Its activity records describe the device:
//! kernels, copies and fills with their times. Its callbacks describe the host: each driver call.
//!
//! CubeCL makes driver calls on a thread per device, which runs closures in the order in which user
//! threads queue them. The start and end of an operation are therefore queued as closures, too,
//! around its launches. While a closure runs, CubeCL sets the device thread's stream id to that of
//! the thread that queued it. The callback of a driver call reads this id, and so assigns the call
//! to the right thread even if several threads use the device. The call's correlation id then links
//! the device's records to the operation.
//!
//! Records are read only as far as their layout has been the same since CUDA 11.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{CStr, c_char, c_void};
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use cubecl::Runtime;
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::stream_id::StreamId;
use cudarc::driver::result::ctx;

use super::trace::{Activity, Call, Direction, Tracer};
use super::{Probe, RecorderError, Trace, lock};

/// `cuptiGetVersion` of CUDA 11.4, the oldest version whose layouts were checked.
const OLDEST: u32 = 14;
/// `cuptiGetVersion` of CUDA 14, whose layouts are unknown.
const TOO_NEW: u32 = 140_000;

const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;
const KERNEL: u32 = 3;
const CONCURRENT_KERNEL: u32 = 10;
const MEMCPY_BETWEEN_DEVICES: u32 = 22;
/// The requested kinds of records. Of both kernel kinds, this one does not serialize kernels.
const KINDS: [u32; 4] = [CONCURRENT_KERNEL, MEMCPY, MEMSET, MEMCPY_BETWEEN_DEVICES];

const DRIVER_DOMAIN: u32 = 1;
const ENTRY: u32 = 0;
const EXIT: u32 = 1;
const FLUSH_FORCED: u32 = 1;
const SUCCESS: u32 = 0;
const OTHER_SUBSCRIBER: u32 = 39;

/// About 40,000 records; CUPTI requests as many buffers as it needs.
const BUFFER: Layout = match Layout::from_size_align(8 << 20, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("a power of two"),
};

type Subscriber = *mut c_void;
type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const CallbackData);
type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// The functions of CUPTI that are used.
struct Cupti {
    subscribe: unsafe extern "C" fn(*mut Subscriber, Callback, *mut c_void) -> u32,
    unsubscribe: unsafe extern "C" fn(Subscriber) -> u32,
    enable_domain: unsafe extern "C" fn(u32, Subscriber, u32) -> u32,
    register_callbacks: unsafe extern "C" fn(Requested, Completed) -> u32,
    enable: unsafe extern "C" fn(u32) -> u32,
    disable: unsafe extern "C" fn(u32) -> u32,
    flush_all: unsafe extern "C" fn(u32) -> u32,
    next_record: unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> u32,
    dropped_records: unsafe extern "C" fn(*mut c_void, u32, *mut usize) -> u32,
    device_id: unsafe extern "C" fn(*mut c_void, *mut u32) -> u32,
    result_string: unsafe extern "C" fn(u32, *mut *const c_char) -> u32,
    timestamp: unsafe extern "C" fn(*mut u64) -> u32,
}

/// `CUpti_CallbackData`.
#[repr(C)]
struct CallbackData {
    site: u32,
    function_name: *const c_char,
    function_params: *const c_void,
    function_return: *mut c_void,
    symbol_name: *const c_char,
    context: *mut c_void,
    context_uid: u32,
    correlation_data: *mut u64,
    correlation: u32,
}

/// The beginning of `CUpti_ActivityKernel4` to `13`.
#[repr(C)]
struct KernelRecord {
    kind: u32,
    configuration: [u32; 3],
    start: u64,
    end: u64,
    completed: u64,
    device: u32,
    context: u32,
    stream: u32,
    grid: [i32; 6],
    memory: [u32; 4],
    correlation: u32,
    grid_id: i64,
    name: *const c_char,
}

/// The beginning of `CUpti_ActivityMemcpy` to `7` and, except for the four bytes of `copy`, of
/// `CUpti_ActivityMemset` to `5`.
#[repr(C)]
struct CopyRecord {
    kind: u32,
    copy: [u8; 4],
    bytes: u64,
    start: u64,
    end: u64,
    device: u32,
    context: u32,
    stream: u32,
    correlation: u32,
}

/// The beginning of `CUpti_ActivityMemcpyPtoP` to `4`.
#[repr(C)]
struct PeerRecord {
    kind: u32,
    copy: [u8; 4],
    bytes: u64,
    start: u64,
    end: u64,
    device: u32,
    context: u32,
    stream: u32,
    source_device: u32,
    source_context: u32,
    target_device: u32,
    target_context: u32,
    correlation: u32,
}

const _: () = {
    assert!(offset_of!(KernelRecord, start) == 16);
    assert!(offset_of!(KernelRecord, device) == 40);
    assert!(offset_of!(KernelRecord, correlation) == 92);
    assert!(offset_of!(KernelRecord, name) == 104);
    assert!(offset_of!(CopyRecord, bytes) == 8);
    assert!(offset_of!(CopyRecord, device) == 32);
    assert!(offset_of!(CopyRecord, correlation) == 44);
    assert!(offset_of!(PeerRecord, target_device) == 52);
    assert!(offset_of!(PeerRecord, correlation) == 60);
    assert!(offset_of!(CallbackData, context) == 40);
    assert!(offset_of!(CallbackData, correlation) == 64);
};

/// The running recording.
struct Session {
    /// Its id, because closures of an earlier recording may still be queued.
    id: u64,
    tracer: Tracer,
    /// CUPTI's device number.
    device: u32,
    /// Its context.
    context: usize,
    /// Whether driver calls are recorded.
    open: bool,
    /// Whether a buffer could not be read to its end.
    damaged: bool,
    subscriber: Handle,
}

struct Handle(Subscriber);

// SAFETY: CUPTI only looks up the subscriber handle, so any thread may pass it.
unsafe impl Send for Handle {}

static SESSION: Mutex<Option<Session>> = Mutex::new(None);

/// Records a CUDA device of CubeCL.
pub(crate) struct CuptiProbe<R: Runtime> {
    id: u64,
    /// The queue of the device's thread.
    queue: DeviceHandle<R::Server>,
}

impl<R: Runtime> CuptiProbe<R> {
    /// A probe of `device`, which must have a client.
    pub(crate) fn new(device: &R::Device) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), queue: DeviceHandle::new(device.to_id()) }
    }

    /// Queues `task` on the device's thread, with this probe's session.
    fn submit(&self, task: impl FnOnce(&mut Session) + Send + 'static) {
        let id = self.id;
        self.queue.submit(move |_| with_session(id, task));
    }

    /// Queues `task` on the device's thread, and waits for it.
    fn run<T: Send>(&self, task: impl FnOnce() -> T + Send) -> Result<T, RecorderError> {
        let broken = |_| RecorderError::Device("its thread has panicked".into());
        self.queue.submit_blocking(move |_| task()).map_err(broken)
    }
}

fn with_session(id: u64, task: impl FnOnce(&mut Session)) {
    if let Some(session) = lock(&SESSION).as_mut().filter(|session| session.id == id) {
        task(session);
    }
}

impl<R: Runtime> Probe for CuptiProbe<R> {
    fn start(&self) -> Result<(), RecorderError> {
        let cupti = cupti()?;
        // Pointers are not `Send`.
        let context = self.run(|| ctx::get_current().map(|context| context.map(|context| context as usize)))?;
        let context = context.map_err(|error| RecorderError::Device(error.to_string()))?;
        let context = context.ok_or_else(|| RecorderError::Device("it has no CUDA context".into()))?;
        let mut device = 0;
        // SAFETY: the context is current on the device's thread, which keeps it; the id is written
        // to a local variable.
        let code = unsafe { (cupti.device_id)(context as *mut c_void, &mut device) };
        cupti.check("cuptiGetDeviceId", code)?;
        let mut subscriber = null_mut();
        // SAFETY: the callback is a function of this program, and uses no user data.
        match unsafe { (cupti.subscribe)(&mut subscriber, called, null_mut()) } {
            OTHER_SUBSCRIBER => return Err(RecorderError::Cupti("another profiler in this process uses it".into())),
            code => cupti.check("cuptiSubscribe", code)?,
        }
        *lock(&SESSION) = Some(Session {
            id: self.id,
            tracer: Tracer::new(cupti.now()),
            device,
            context,
            open: false,
            damaged: false,
            subscriber: Handle(subscriber),
        });
        let enabled = cupti.enable_all(subscriber);
        match enabled {
            Ok(()) => with_session(self.id, |session| session.open = true),
            Err(_) => drop(cupti.detach(self.id)),
        }
        enabled
    }

    fn enter(&self, op: u32) {
        self.submit(move |session| session.tracer.enter(StreamId::current().value, op));
    }

    fn leave(&self) {
        self.submit(|session| session.tracer.leave(StreamId::current().value));
    }

    fn close(&self) {
        let id = self.id;
        // A thread that has panicked makes no more driver calls.
        let _ = self.run(move || with_session(id, |session| session.open = false));
    }

    fn finish(&self) -> Result<Trace, RecorderError> {
        let cupti = cupti()?;
        // The wait before this was for one stream only.
        let idle =
            self.run(ctx::synchronize).and_then(|idle| idle.map_err(|error| RecorderError::Device(error.to_string())));
        let (flushed, dropped) = (cupti.flush(), cupti.dropped());
        let session = cupti.detach(self.id);
        idle?;
        flushed?;
        let session = session.ok_or_else(|| RecorderError::Cupti("the recording is lost".into()))?;
        Ok(session.tracer.finish(dropped || session.damaged))
    }
}

impl Cupti {
    /// The time by the clock of the records, in nanoseconds.
    fn now(&self) -> u64 {
        let mut now = 0;
        // SAFETY: the time is written to a local variable, which stays zero if the call fails.
        unsafe { (self.timestamp)(&mut now) };
        now
    }

    fn enable_all(&self, subscriber: Subscriber) -> Result<(), RecorderError> {
        // SAFETY: both functions are static and follow CUPTI's rules for these callbacks.
        self.check("cuptiActivityRegisterCallbacks", unsafe { (self.register_callbacks)(requested, completed) })?;
        for kind in KINDS {
            // SAFETY: takes a number; unknown ones are refused.
            self.check("cuptiActivityEnable", unsafe { (self.enable)(kind) })?;
        }
        // SAFETY: CUPTI has just returned the subscriber.
        self.check("cuptiEnableDomain", unsafe { (self.enable_domain)(1, subscriber, DRIVER_DOMAIN) })
    }

    /// Makes CUPTI deliver all records.
    fn flush(&self) -> Result<(), RecorderError> {
        // SAFETY: takes a flag; calls `completed` with buffers from `requested`.
        self.check("cuptiActivityFlushAll", unsafe { (self.flush_all)(FLUSH_FORCED) })
    }

    /// Whether CUPTI dropped records for lack of buffers.
    fn dropped(&self) -> bool {
        let mut dropped = 0;
        // SAFETY: a null context means all contexts; the count is written to a local variable.
        let code = unsafe { (self.dropped_records)(null_mut(), 0, &mut dropped) };
        code == SUCCESS && dropped > 0
    }

    /// Ends session `id`. Errors are ignored, because nothing is recorded any more.
    fn detach(&self, id: u64) -> Option<Session> {
        let subscriber =
            lock(&SESSION).as_ref().filter(|session| session.id == id).map(|session| session.subscriber.0)?;
        for kind in KINDS {
            // SAFETY: takes a number.
            unsafe { (self.disable)(kind) };
        }
        let _ = self.flush();
        // SAFETY: `start` got it from CUPTI, and only one `detach` finds the session.
        unsafe { (self.unsubscribe)(subscriber) };
        lock(&SESSION).take()
    }

    fn check(&self, function: &str, code: u32) -> Result<(), RecorderError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: if CUPTI knows the code, it points `text` to a static string.
        let known = unsafe { (self.result_string)(code, &mut text) } == SUCCESS && !text.is_null();
        // SAFETY: a static string, as above.
        let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "unknown error".into() };
        Err(RecorderError::Cupti(format!("{function}: {text} ({code})")))
    }
}

/// CUPTI calls this at entry to and exit from each driver function, on the thread that calls it.
unsafe extern "C" fn called(_user: *mut c_void, domain: u32, _function: u32, data: *const CallbackData) {
    // SAFETY: in this domain, CUPTI passes a record of the call that is valid until this returns.
    let Some(data) = (unsafe { data.as_ref() }) else { return };
    if domain != DRIVER_DOMAIN || ![ENTRY, EXIT].contains(&data.site) || data.function_name.is_null() {
        return;
    }
    // SAFETY: the name is a static string.
    let name = unsafe { CStr::from_ptr(data.function_name) };
    // Most driver functions are of no interest.
    let Some(call) = name.to_str().ok().and_then(Call::of) else { return };
    let Ok(cupti) = cupti() else { return };
    let (stream, now) = (StreamId::current().value, cupti.now());
    let mut session = lock(&SESSION);
    let Some(session) = session.as_mut().filter(|session| session.open) else { return };
    // A thread that only waits has no current context.
    if !data.context.is_null() && data.context as usize != session.context {
        return;
    }
    match data.site {
        ENTRY => session.tracer.call_begins(stream, call, data.correlation, now),
        _ => session.tracer.call_ends(data.correlation, now),
    }
}

/// CUPTI requests a buffer.
unsafe extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    // SAFETY: the layout is not empty, and CUPTI passes valid pointers for results. If the buffer
    // is null, it drops and counts records.
    unsafe {
        *buffer = alloc(BUFFER);
        *size = if (*buffer).is_null() { 0 } else { BUFFER.size() };
        *max_records = 0;
    }
}

/// CUPTI returns a buffer, with records in its first `valid` bytes.
unsafe extern "C" fn completed(_context: *mut c_void, _stream: u32, buffer: *mut u8, _size: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    if let Ok(cupti) = cupti()
        && valid > 0
        && let Some(session) = lock(&SESSION).as_mut()
    {
        session.read(cupti, buffer, valid);
    }
    // SAFETY: `requested` allocated it with this layout, and CUPTI does not use it any more.
    unsafe { dealloc(buffer, BUFFER) };
}

impl Session {
    fn read(&mut self, cupti: &Cupti, buffer: *mut u8, valid: usize) {
        /// The buffer has no further record.
        const MAX_LIMIT_REACHED: u32 = 12;
        let mut record = null_mut();
        loop {
            // SAFETY: the buffer has `valid` bytes of records, and `record` is null or the previous
            // record.
            match unsafe { (cupti.next_record)(buffer, valid, &mut record) } {
                SUCCESS if !record.is_null() => {
                    // SAFETY: CUPTI returned a whole record in the buffer.
                    unsafe { self.record(record) };
                }
                MAX_LIMIT_REACHED => return,
                _ => {
                    self.damaged = true;
                    return;
                }
            }
        }
    }

    /// # Safety
    /// `record` must point to a record of CUPTI.
    unsafe fn record(&mut self, record: *const u8) {
        // SAFETY: every record begins with its kind.
        let kind = unsafe { record.cast::<u32>().read_unaligned() };
        match kind {
            KERNEL | CONCURRENT_KERNEL => {
                // SAFETY: records of this kind begin with this structure; see the type.
                let record = unsafe { record.cast::<KernelRecord>().read_unaligned() };
                let name = match record.name.is_null() {
                    true => "unnamed".into(),
                    // SAFETY: CUPTI's name of the kernel, valid while its module is loaded.
                    false => unsafe { CStr::from_ptr(record.name) }.to_string_lossy(),
                };
                let activity = Activity::Kernel { name: &name };
                self.activity(record.device, record.correlation, activity, record.start, record.end);
            }
            MEMCPY | MEMSET => {
                // SAFETY: as above.
                let record = unsafe { record.cast::<CopyRecord>().read_unaligned() };
                let bytes = record.bytes;
                let activity = match kind {
                    MEMCPY => Activity::Copy { direction: direction(record.copy[0]), bytes },
                    _ => Activity::Memset { bytes },
                };
                self.activity(record.device, record.correlation, activity, record.start, record.end);
            }
            MEMCPY_BETWEEN_DEVICES => {
                // SAFETY: as above.
                let record = unsafe { record.cast::<PeerRecord>().read_unaligned() };
                let ours = [record.source_device, record.target_device].contains(&self.device);
                let device = if ours { self.device } else { record.device };
                let activity = Activity::Copy { direction: Direction::BetweenDevices, bytes: record.bytes };
                self.activity(device, record.correlation, activity, record.start, record.end);
            }
            _ => {}
        }
    }

    fn activity(&mut self, device: u32, correlation: u32, activity: Activity<'_>, start: u64, end: u64) {
        if device == self.device {
            self.tracer.device_did(correlation, activity, start, end);
        }
    }
}

/// From `CUpti_ActivityMemcpyKind`. CUDA arrays are on the device.
fn direction(kind: u8) -> Direction {
    match kind {
        1 | 3 => Direction::ToDevice,
        2 | 4 => Direction::ToHost,
        5..=8 => Direction::OnDevice,
        9 => Direction::OnHost,
        10 => Direction::BetweenDevices,
        _ => Direction::Unknown,
    }
}

/// CUPTI, loaded once and never unloaded: the driver keeps pointers into it.
fn cupti() -> Result<&'static Cupti, RecorderError> {
    static CUPTI: OnceLock<Result<Cupti, String>> = OnceLock::new();
    CUPTI.get_or_init(load).as_ref().map_err(|reason| RecorderError::Cupti(reason.clone()))
}

fn load() -> Result<Cupti, String> {
    // First the loader's path, including LD_LIBRARY_PATH, then the toolkit.
    let names = ["libcupti.so.13", "libcupti.so.12", "libcupti.so", "cupti64.dll"].map(PathBuf::from);
    let mut failures = Vec::new();
    for candidate in names.into_iter().chain(toolkit_libraries()) {
        // SAFETY: loading CUPTI has no preconditions.
        match unsafe { libloading::Library::new(&candidate) } {
            Ok(library) => return functions(library, &candidate),
            // A name that is not on the loader's path is expected; a file that fails to load is
            // reported.
            Err(error) if candidate.is_absolute() => failures.push(error.to_string()),
            Err(_) => {}
        }
    }
    let reason = "libcupti was not found on the loader's path, nor in the CUDA toolkit: add the folder \
                  extras/CUPTI/lib64 of the toolkit to LD_LIBRARY_PATH, or set CUDA_PATH";
    Err(if failures.is_empty() { reason.into() } else { failures.join("; ") })
}

/// Paths at which CUDA toolkits have CUPTI.
fn toolkit_libraries() -> Vec<PathBuf> {
    let named = ["CUDA_PATH", "CUDA_HOME"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let roots = named.chain(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
    let folders = ["extras/CUPTI/lib64", "lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];
    let mut found = Vec::new();
    for folder in roots.flat_map(|root| folders.map(|folder| root.join(folder))) {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_cupti = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libcupti.so") || name.starts_with("cupti64") && name.ends_with(".dll")
        };
        let mut files: Vec<PathBuf> = files.filter(is_cupti).collect();
        files.sort();
        found.extend(files);
    }
    found
}

fn functions(library: libloading::Library, path: &Path) -> Result<Cupti, String> {
    // The driver may call into the library at any time from now on.
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    let missing = |error: libloading::Error| format!("{}: {error}", path.display());
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: CUPTI exports the function under this name with this signature.
            *unsafe { library.get($name) }.map_err(missing)?
        };
    }
    let get_version: unsafe extern "C" fn(*mut u32) -> u32 = function!(b"cuptiGetVersion\0");
    let mut version = 0;
    // SAFETY: the version is written to a local variable.
    let code = unsafe { get_version(&mut version) };
    if code != SUCCESS || !(OLDEST..TOO_NEW).contains(&version) {
        return Err(format!(
            "{} has interface version {version}; those of CUDA 11.4 to 13 are supported",
            path.display()
        ));
    }
    Ok(Cupti {
        subscribe: function!(b"cuptiSubscribe\0"),
        unsubscribe: function!(b"cuptiUnsubscribe\0"),
        enable_domain: function!(b"cuptiEnableDomain\0"),
        register_callbacks: function!(b"cuptiActivityRegisterCallbacks\0"),
        enable: function!(b"cuptiActivityEnable\0"),
        disable: function!(b"cuptiActivityDisable\0"),
        flush_all: function!(b"cuptiActivityFlushAll\0"),
        next_record: function!(b"cuptiActivityGetNextRecord\0"),
        dropped_records: function!(b"cuptiActivityGetNumDroppedRecords\0"),
        device_id: function!(b"cuptiGetDeviceId\0"),
        result_string: function!(b"cuptiGetResultString\0"),
        timestamp: function!(b"cuptiGetTimestamp\0"),
    })
}
