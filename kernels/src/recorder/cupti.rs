//! What NVIDIA's CUPTI tells of a CUDA device.
//!
//! CUPTI is loaded when a recording first needs it. Its activity records give the device's side:
//! kernels, copies and fills with their times. Its callbacks give the host's side: each call of the
//! driver.
//!
//! CubeCL makes its driver calls on a thread of its own for each device, which runs closures in the
//! order in which a user's thread queues them. So an operation's begin and end are queued as
//! closures too, and bracket its launches. While a closure runs, CubeCL sets that thread's stream
//! id to that of the thread that queued it: the callback of a driver call reads it, and knows whose
//! call it is even where several threads feed the device. The call's correlation id then leads from
//! the device's records back to the operation.
//!
//! Records are read by the part of their layout that CUDA has kept since its version 11.

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

/// `cuptiGetVersion` of CUDA 11.4, the oldest with these layouts that this was compared with.
const OLDEST: u32 = 14;
/// That of CUDA 14, of which nothing is known.
const TOO_NEW: u32 = 140_000;

const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;
const KERNEL: u32 = 3;
const CONCURRENT_KERNEL: u32 = 10;
const MEMCPY_BETWEEN_DEVICES: u32 = 22;
/// The kinds of records asked for. Of the two for kernels, this one lets them run side by side.
const KINDS: [u32; 4] = [CONCURRENT_KERNEL, MEMCPY, MEMSET, MEMCPY_BETWEEN_DEVICES];

const DRIVER_DOMAIN: u32 = 1;
const ENTRY: u32 = 0;
const EXIT: u32 = 1;
const FLUSH_FORCED: u32 = 1;
const SUCCESS: u32 = 0;
const OTHER_SUBSCRIBER: u32 = 39;

/// Room for some 40,000 records; CUPTI asks for as many as it needs.
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

/// The beginning of `CUpti_ActivityMemcpy` to `7`; and, but for the four bytes of `copy`, of
/// `CUpti_ActivityMemset` to
/// `5`.
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

/// The recording that runs.
struct Session {
    /// Which one, since a closure of an earlier one may still be queued.
    id: u64,
    tracer: Tracer,
    /// CUPTI's number of the device.
    device: u32,
    /// Its context.
    context: usize,
    /// Whether calls are watched.
    open: bool,
    /// Whether a buffer could not be read to its end.
    damaged: bool,
    subscriber: Handle,
}

struct Handle(Subscriber);

// SAFETY: CUPTI's subscriber is a name for it to look up; any thread may hand it back.
unsafe impl Send for Handle {}

static SESSION: Mutex<Option<Session>> = Mutex::new(None);

/// Watches a CUDA device of CubeCL's.
pub(crate) struct CuptiProbe<R: Runtime> {
    id: u64,
    /// The queue of the device's thread.
    queue: DeviceHandle<R::Server>,
}

impl<R: Runtime> CuptiProbe<R> {
    /// A probe of `device`, which has a client already.
    pub(crate) fn new(device: &R::Device) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), queue: DeviceHandle::new(device.to_id()) }
    }

    /// Runs on the device's thread, in its turn, with the session of this probe.
    fn submit(&self, task: impl FnOnce(&mut Session) + Send + 'static) {
        let id = self.id;
        self.queue.submit(move |_| with_session(id, task));
    }

    /// As [`submit`](Self::submit), and waits for it.
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
        // A pointer may not cross threads as such.
        let context = self.run(|| ctx::get_current().map(|context| context.map(|context| context as usize)))?;
        let context = context.map_err(|error| RecorderError::Device(error.to_string()))?;
        let context = context.ok_or_else(|| RecorderError::Device("it has no CUDA context".into()))?;
        let mut device = 0;
        // SAFETY: the context is that of the device's thread, which keeps it; the id is written to
        // a place of ours.
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
        // A thread that has panicked hands nothing more to the driver.
        let _ = self.run(move || with_session(id, |session| session.open = false));
    }

    fn finish(&self) -> Result<Trace, RecorderError> {
        let cupti = cupti()?;
        // The wait before this was for one stream.
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
        // SAFETY: the time is written to a place of ours, which keeps its zero if that fails.
        unsafe { (self.timestamp)(&mut now) };
        now
    }

    fn enable_all(&self, subscriber: Subscriber) -> Result<(), RecorderError> {
        // SAFETY: both functions live as long as the program, and keep to what CUPTI asks of them.
        self.check("cuptiActivityRegisterCallbacks", unsafe { (self.register_callbacks)(requested, completed) })?;
        for kind in KINDS {
            // SAFETY: takes a number, and refuses those that it does not know.
            self.check("cuptiActivityEnable", unsafe { (self.enable)(kind) })?;
        }
        // SAFETY: the subscriber was just given out.
        self.check("cuptiEnableDomain", unsafe { (self.enable_domain)(1, subscriber, DRIVER_DOMAIN) })
    }

    /// Has CUPTI hand over all records.
    fn flush(&self) -> Result<(), RecorderError> {
        // SAFETY: takes a flag; calls `completed` with buffers that `requested` gave.
        self.check("cuptiActivityFlushAll", unsafe { (self.flush_all)(FLUSH_FORCED) })
    }

    /// Whether CUPTI dropped records for want of room.
    fn dropped(&self) -> bool {
        let mut dropped = 0;
        // SAFETY: a null context asks for all of them, and the count is written to a place of ours.
        let code = unsafe { (self.dropped_records)(null_mut(), 0, &mut dropped) };
        code == SUCCESS && dropped > 0
    }

    /// Ends the session `id`. What fails here fails silently: there is nothing left to record.
    fn detach(&self, id: u64) -> Option<Session> {
        let subscriber =
            lock(&SESSION).as_ref().filter(|session| session.id == id).map(|session| session.subscriber.0)?;
        for kind in KINDS {
            // SAFETY: takes a number.
            unsafe { (self.disable)(kind) };
        }
        let _ = self.flush();
        // SAFETY: `start` got it from CUPTI, and only one detach finds the session.
        unsafe { (self.unsubscribe)(subscriber) };
        lock(&SESSION).take()
    }

    fn check(&self, function: &str, code: u32) -> Result<(), RecorderError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: CUPTI points `text` to a constant of its own, if it knows the code.
        let known = unsafe { (self.result_string)(code, &mut text) } == SUCCESS && !text.is_null();
        // SAFETY: a constant string of CUPTI's, as just told.
        let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "unknown error".into() };
        Err(RecorderError::Cupti(format!("{function}: {text} ({code})")))
    }
}

/// CUPTI calls this at each entry to and each exit from the driver, on the thread that calls the
/// driver.
unsafe extern "C" fn called(_user: *mut c_void, domain: u32, _function: u32, data: *const CallbackData) {
    // SAFETY: in this domain CUPTI passes its record of the call, valid until this returns.
    let Some(data) = (unsafe { data.as_ref() }) else { return };
    if domain != DRIVER_DOMAIN || ![ENTRY, EXIT].contains(&data.site) || data.function_name.is_null() {
        return;
    }
    // SAFETY: the name is a constant of CUPTI's.
    let name = unsafe { CStr::from_ptr(data.function_name) };
    // Few functions matter, and the driver has many.
    let Some(call) = name.to_str().ok().and_then(Call::of) else { return };
    let Ok(cupti) = cupti() else { return };
    let (stream, now) = (StreamId::current().value, cupti.now());
    let mut session = lock(&SESSION);
    let Some(session) = session.as_mut().filter(|session| session.open) else { return };
    // A thread that only waits has no context set.
    if !data.context.is_null() && data.context as usize != session.context {
        return;
    }
    match data.site {
        ENTRY => session.tracer.call_begins(stream, call, data.correlation, now),
        _ => session.tracer.call_ends(data.correlation, now),
    }
}

/// CUPTI asks for room.
unsafe extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    // SAFETY: the layout is not empty; the three places are CUPTI's for its answers. With a null
    // buffer it drops records and counts them.
    unsafe {
        *buffer = alloc(BUFFER);
        *size = if (*buffer).is_null() { 0 } else { BUFFER.size() };
        *max_records = 0;
    }
}

/// CUPTI gives a buffer back, with records in its first `valid` bytes.
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
    // SAFETY: `requested` allocated it with this layout, and CUPTI is done with it.
    unsafe { dealloc(buffer, BUFFER) };
}

impl Session {
    fn read(&mut self, cupti: &Cupti, buffer: *mut u8, valid: usize) {
        /// CUPTI has no further record in the buffer.
        const MAX_LIMIT_REACHED: u32 = 12;
        let mut record = null_mut();
        loop {
            // SAFETY: the buffer holds `valid` bytes of CUPTI's, and `record` is null or the record
            // before.
            match unsafe { (cupti.next_record)(buffer, valid, &mut record) } {
                SUCCESS if !record.is_null() => {
                    // SAFETY: a record of CUPTI's, which is in the buffer as a whole.
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
    /// `record` must point to a record of CUPTI's.
    unsafe fn record(&mut self, record: *const u8) {
        // SAFETY: every record begins with its kind.
        let kind = unsafe { record.cast::<u32>().read_unaligned() };
        match kind {
            KERNEL | CONCURRENT_KERNEL => {
                // SAFETY: records of these kinds begin so; see the type.
                let record = unsafe { record.cast::<KernelRecord>().read_unaligned() };
                let name = match record.name.is_null() {
                    true => "unnamed".into(),
                    // SAFETY: CUPTI's name of the kernel, kept while its module is loaded.
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

/// `CUpti_ActivityMemcpyKind`; what CUDA calls an array is on the device.
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

/// CUPTI, loaded once and never let go: the driver keeps pointers into it.
fn cupti() -> Result<&'static Cupti, RecorderError> {
    static CUPTI: OnceLock<Result<Cupti, String>> = OnceLock::new();
    CUPTI.get_or_init(load).as_ref().map_err(|reason| RecorderError::Cupti(reason.clone()))
}

fn load() -> Result<Cupti, String> {
    // First where the loader looks, which LD_LIBRARY_PATH can set, then in the toolkit.
    let names = ["libcupti.so.13", "libcupti.so.12", "libcupti.so", "cupti64.dll"].map(PathBuf::from);
    let mut failures = Vec::new();
    for candidate in names.into_iter().chain(toolkit_libraries()) {
        // SAFETY: NVIDIA's library has no condition on being loaded.
        match unsafe { libloading::Library::new(&candidate) } {
            Ok(library) => return functions(library, &candidate),
            // That a name is not on the loader's path needs no telling; that a file does not load
            // does.
            Err(error) if candidate.is_absolute() => failures.push(error.to_string()),
            Err(_) => {}
        }
    }
    let reason = "libcupti was not found on the loader's path, nor in the CUDA toolkit: add the folder \
                  extras/CUPTI/lib64 of the toolkit to LD_LIBRARY_PATH, or set CUDA_PATH";
    Err(if failures.is_empty() { reason.into() } else { failures.join("; ") })
}

/// The files of the CUDA toolkits that may be CUPTI.
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
    // The driver may call into it at any time from now on.
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    let missing = |error: libloading::Error| format!("{}: {error}", path.display());
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: CUPTI exports the function under this name, with the signature that it is
            // used at.
            *unsafe { library.get($name) }.map_err(missing)?
        };
    }
    let get_version: unsafe extern "C" fn(*mut u32) -> u32 = function!(b"cuptiGetVersion\0");
    let mut version = 0;
    // SAFETY: the version is written to a place of ours.
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
