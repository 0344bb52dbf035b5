//! Records where the time of a region of work goes, and what crosses the bus.
//!
//! It records this crate's operations with their shapes and dtypes on every backend. On CUDA it
//! also records NVIDIA's CUPTI data: kernels, copies, fills, waits and allocations of driver and
//! device, with their operations. Values that a backend cannot know are `None` in the report, and
//! "unknown" in its table.
//!
//! One recording runs at a time in a process and covers all of its threads. Without one, an
//! operation only loads a flag.
//!
//! ```
//! use burn::tensor::Tensor;
//! use fireclay_kernels::recorder::{Recording, Source};
//! use fireclay_kernels::{Activation, ActivationKind, activate};
//! type B = burn::backend::NdArray;
//!
//! let device = Default::default();
//! let x = Tensor::<B, 2>::ones([4, 8], &device);
//!
//! let recording = Recording::start::<B>(&device)?;
//! let y = activate(x, Activation::plain(ActivationKind::Silu));
//! let report = recording.stop()?;
//!
//! let op = report.op("activate").unwrap();
//! assert_eq!((op.calls, &op.inputs[0].dims[..]), (1, &[4, 8][..]));
//! assert_eq!(report.source, Source::Host);
//! assert_eq!(report.total.launches, None, "nothing tells of launches on the CPU");
//! println!("{report}");
//! # drop(y);
//! # Ok::<(), fireclay_kernels::recorder::RecorderError>(())
//! ```

mod backends;
mod call;
#[cfg(feature = "cuda")]
pub(crate) mod cupti;
mod report;
#[cfg(any(feature = "cuda", test))]
mod trace;

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fmt::{self, Display, Formatter};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, Tensor};

pub(crate) use call::Part;
pub use call::{Call, PartScope, part};
pub use report::{
    Copies, DriverCall, Fallback, KernelReport, OpReport, Operand, Report, Source, Span, Timeline, Transfers, Work,
};

/// Whether calls are recorded.
static ON: AtomicBool = AtomicBool::new(false);
/// Whether a recording exists, its start and end included.
static TAKEN: AtomicBool = AtomicBool::new(false);
static CALLS: Mutex<Option<Calls>> = Mutex::new(None);

thread_local! {
    static CURRENT: Cell<&'static str> = const { Cell::new(NO_OP) };
    /// Time that this thread's open operation spent in operations that it called.
    static INNER: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// This thread's open, recorded operation.
    static OPEN: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The name of no operation.
const NO_OP: &str = "an operation";

/// Why recording failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecorderError {
    /// Another one is running.
    Running,
    /// The device failed.
    Device(String),
    /// CUPTI is missing, has an unknown version, is in use by another profiler, or failed.
    Cupti(String),
}

impl Display for RecorderError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("a recording is already running"),
            Self::Device(reason) => write!(f, "the device cannot be recorded: {reason}"),
            Self::Cupti(reason) => write!(f, "CUPTI cannot record: {reason}"),
        }
    }
}

impl std::error::Error for RecorderError {}

/// A backend with recordable work.
pub trait RecorderOps: Backend {
    /// Whether an operation is complete when its call returns, so that the host's clock measures
    /// it.
    fn is_synchronous() -> bool {
        false
    }
    /// Memory on `device` used by this thread's work, if reported.
    fn memory(_device: &Self::Device) -> Option<Memory> {
        None
    }

    /// The probe of `device` for a [`Recording`]; none if only calls are known.
    fn probe(_device: &Self::Device) -> Option<Box<dyn Probe>> {
        None
    }
}

/// Memory of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes in tensors.
    pub in_use: u64,
    /// Bytes allocated from the driver, which are seldom freed: about the peak.
    pub reserved: u64,
}

/// Records the work of a device; see [`RecorderOps::probe`].
pub trait Probe: Send + Sync {
    /// Starts to record. The device is idle.
    ///
    /// # Errors
    /// If the device cannot be recorded.
    fn start(&self) -> Result<(), RecorderError>;
    /// This thread's work from here on belongs to operation `op`.
    fn enter(&self, op: u32);
    /// This thread's innermost operation ends.
    fn leave(&self);
    /// All work so far was submitted to the driver; further work is not recorded.
    fn close(&self);
    /// Stops and returns the records. The device is idle again, unless it failed.
    ///
    /// # Errors
    /// If recording failed.
    fn finish(&self) -> Result<Trace, RecorderError>;
}

/// The records of a [`Probe`].
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Work by operation.
    pub ops: HashMap<u32, Work>,
    /// Work of unknown operations.
    pub idle: Work,
    /// Work outside of operations.
    pub outside: Work,
    /// All of it.
    pub total: Work,
    /// Kernels, longest first.
    pub kernels: Option<Vec<KernelReport>>,
    /// The kernels of each operation, longest first; `None` for outside.
    pub kernels_of: HashMap<Option<u32>, Vec<KernelReport>>,
    /// The timeline.
    pub timeline: Option<Timeline>,
}

/// Records of the host.
#[derive(Default)]
struct Calls {
    ops: Vec<OpCalls>,
    by_call: HashMap<(&'static str, &'static str, Vec<Operand>), usize>,
    fallbacks: Vec<Fallback>,
    uploads: Vec<Transfers>,
    reads: Vec<Transfers>,
    waits_while_busy: u64,
    spans: Vec<Span>,
    probe: Option<Arc<dyn Probe>>,
    /// Waits for the device after each top-level operation, if requested.
    wait: Option<Wait>,
    started: Option<Instant>,
}

/// Waits for a device.
type Wait = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

struct OpCalls {
    part: &'static str,
    name: &'static str,
    calls: u64,
    sums: Call,
    host_time: Duration,
}

impl Calls {
    /// Counts a call and returns its index.
    fn count(&mut self, name: &'static str, call: Call) -> usize {
        let part = Part::current().name();
        let at = match self.by_call.get(&(part, name, call.inputs.clone())) {
            Some(at) => *at,
            None => {
                self.by_call.insert((part, name, call.inputs.clone()), self.ops.len());
                let sums = Call { inputs: call.inputs, bytes: 0, flops: 0 };
                self.ops.push(OpCalls { part, name, calls: 0, sums, host_time: Duration::ZERO });
                self.ops.len() - 1
            }
        };
        let op = &mut self.ops[at];
        op.calls += 1;
        op.sums.bytes += call.bytes;
        op.sums.flops += call.flops;
        at
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How much of a device's work is recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Watch {
    /// Everything it supports.
    Device,
    /// Nothing.
    Calls,
    /// The time waited for each operation.
    Waits,
}

/// A running recording. Dropping it ends it without a report.
#[must_use = "a recording ends where it is dropped"]
pub struct Recording {
    device: String,
    sync: Wait,
    probe: Option<Arc<dyn Probe>>,
    source: Source,
    started: Instant,
}

impl Recording {
    /// Waits for `device`, and starts recording.
    ///
    /// On CUDA, copies and launches are those of this device; operations are those of all devices.
    ///
    /// # Errors
    /// If another recording is running, if the device failed, or if it is a CUDA device and CUPTI
    /// cannot be used.
    pub fn start<B: RecorderOps>(device: &B::Device) -> Result<Self, RecorderError> {
        Self::begin::<B>(device, Watch::Device)
    }

    /// [`start`](Self::start) for calls only, without CUPTI.
    ///
    /// # Errors
    /// If another recording runs, or if the device failed.
    pub fn start_calls<B: RecorderOps>(device: &B::Device) -> Result<Self, RecorderError> {
        Self::begin::<B>(device, Watch::Calls)
    }

    /// [`start_calls`](Self::start_calls) that waits for the device after each operation, so that
    /// the host's clock measures it: for devices without a readable clock. Recorded work runs
    /// slower.
    ///
    /// # Errors
    /// If another recording runs, or if the device failed.
    pub fn start_waiting<B: RecorderOps>(device: &B::Device) -> Result<Self, RecorderError> {
        Self::begin::<B>(device, Watch::Waits)
    }

    fn begin<B: RecorderOps>(device: &B::Device, watch: Watch) -> Result<Self, RecorderError> {
        if TAKEN.swap(true, Ordering::AcqRel) {
            return Err(RecorderError::Running);
        }
        let sync: Wait = {
            let device = device.clone();
            Arc::new(move || B::sync(&device).map_err(|error| error.to_string()))
        };
        let source = match watch {
            _ if B::is_synchronous() => Source::Host,
            Watch::Waits => Source::Waits,
            Watch::Device | Watch::Calls => Source::Calls,
        };
        // From here on, an early return drops it, which allows another recording.
        let mut recording = Self { device: format!("{device:?}"), sync, probe: None, source, started: Instant::now() };
        (recording.sync)().map_err(RecorderError::Device)?;
        if watch == Watch::Device
            && let Some(probe) = B::probe(device)
        {
            probe.start()?;
            recording.probe = Some(probe.into());
            recording.source = Source::Cupti;
        }
        recording.started = Instant::now();
        *lock(&CALLS) = Some(Calls {
            probe: recording.probe.clone(),
            wait: (recording.source == Source::Waits).then(|| recording.sync.clone()),
            started: Some(recording.started),
            ..Calls::default()
        });
        ON.store(true, Ordering::Release);
        Ok(recording)
    }

    /// Stops recording, waits for the device, and reports.
    ///
    /// # Errors
    /// If the device failed, or its records could not be read.
    pub fn stop(mut self) -> Result<Report, RecorderError> {
        let calls = self.close();
        let synced = (self.sync)().map_err(RecorderError::Device);
        let elapsed = self.started.elapsed();
        let trace = self.probe.take().map(|probe| probe.finish()).transpose();
        synced?;
        let trace = trace?;
        let mut trace = trace.unwrap_or_default();
        let op = |(at, op): (usize, OpCalls)| {
            let work = trace.ops.get(&(at as u32)).copied().unwrap_or(trace.idle);
            let OpCalls { part, name, calls, sums: Call { inputs, bytes, flops }, host_time } = op;
            let kernels = trace.kernels_of.remove(&Some(at as u32)).unwrap_or_default();
            // The host's clock does not measure work that continues after the call.
            let host_time = (self.source != Source::Calls).then_some(host_time);
            OpReport { part, name, inputs, calls, bytes, flops, host_time, work, kernels }
        };
        let ops = calls.ops.into_iter().enumerate().map(op).collect();
        Ok(Report {
            source: self.source,
            device: std::mem::take(&mut self.device),
            elapsed,
            ops,
            outside: trace.outside,
            kernels_outside: trace.kernels_of.remove(&None).unwrap_or_default(),
            total: trace.total,
            kernels: trace.kernels,
            fallbacks: calls.fallbacks,
            uploads: calls.uploads,
            reads: calls.reads,
            waits_while_busy: calls.waits_while_busy,
            spans: calls.spans,
            timeline: trace.timeline,
        })
    }

    /// Ends the region.
    fn close(&self) -> Calls {
        ON.store(false, Ordering::Release);
        let calls = lock(&CALLS).take().unwrap_or_default();
        if let Some(probe) = &self.probe {
            probe.close();
        }
        calls
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Without its probe it was stopped, or never recorded.
        if let Some(probe) = &self.probe {
            self.close();
            // There is no caller to report an error to.
            let _ = (self.sync)().and_then(|()| probe.finish().map_err(|error| error.to_string()));
        }
        ON.store(false, Ordering::Release);
        lock(&CALLS).take();
        TAKEN.store(false, Ordering::Release);
    }
}

/// The scope of an operation's call, for this thread's work.
#[must_use = "the span ends when this is dropped"]
pub struct Scope {
    entered: Option<Box<Entered>>,
    /// The enclosing operation.
    around: &'static str,
    // It must end on the thread where it started.
    _thread: PhantomData<*const ()>,
}

/// A recorded call.
struct Entered {
    op: usize,
    /// The enclosing operation, if recorded.
    op_around: Option<usize>,
    began: Instant,
    /// [`INNER`] of the enclosing operation.
    inner_around: Duration,
    probe: Option<Arc<dyn Probe>>,
    wait: Option<Wait>,
}

impl Drop for Scope {
    #[inline]
    fn drop(&mut self) {
        CURRENT.set(self.around);
        if let Some(entered) = self.entered.take() {
            leave(*entered);
        }
    }
}

/// Records a call of operation `name`, described by `describe`, until the scope ends. For your own
/// operations; those of this crate record themselves. Without a recording it only loads a flag.
///
/// `describe` returns a [`Call`], or just the inputs if bytes and FLOP are unknown.
#[inline]
pub fn op<C: Into<Call>>(name: &'static str, describe: impl FnOnce() -> C) -> Scope {
    // The flag guards a lock.
    let entered = if ON.load(Ordering::Relaxed) { enter(name, describe().into()) } else { None };
    Scope { entered, around: CURRENT.replace(name), _thread: PhantomData }
}

/// Adds bytes and FLOP to this thread's open operation.
pub(crate) fn also(describe: impl FnOnce() -> Call) {
    told(|calls| {
        if let Some(op) = OPEN.get().and_then(|op| calls.ops.get_mut(op)) {
            let more = describe();
            op.sums.bytes += more.bytes;
            op.sums.flops += more.flops;
        }
    });
}

/// This thread's innermost operation, to add to its record.
pub(crate) fn current() -> &'static str {
    CURRENT.get()
}

#[cold]
fn enter(name: &'static str, call: Call) -> Option<Box<Entered>> {
    let (op, probe, wait) = {
        let mut calls = lock(&CALLS);
        let calls = calls.as_mut()?;
        (calls.count(name, call), calls.probe.clone(), calls.wait.clone())
    };
    if let Some(probe) = &probe {
        // This may wait for the device's thread, so not under the lock.
        probe.enter(op as u32);
    }
    let (op_around, inner_around) = (OPEN.replace(Some(op)), INNER.replace(Duration::ZERO));
    Some(Box::new(Entered { op, op_around, began: Instant::now(), inner_around, probe, wait }))
}

#[cold]
fn leave(Entered { op, op_around, began, inner_around, probe, wait }: Entered) {
    OPEN.set(op_around);
    if let Some(wait) = wait.filter(|_| op_around.is_none()) {
        // A failed device reports its error to its next reader.
        let _ = wait();
    }
    let ended = Instant::now();
    let all = ended - began;
    let own = all.saturating_sub(INNER.get());
    INNER.set(inner_around + all);
    if let Some(probe) = &probe {
        probe.leave();
    }
    if let Some(calls) = lock(&CALLS).as_mut()
        && let (Some(counted), Some(started)) = (calls.ops.get_mut(op), calls.started)
    {
        counted.host_time += own;
        let (start, end) = (began.saturating_duration_since(started), ended.saturating_duration_since(started));
        calls.spans.push(Span { op: Some(op), name: String::new(), start, end });
    }
}

/// A tensor's shape and dtype.
pub fn operand<B, const D: usize, K>(tensor: &Tensor<B, D, K>) -> Operand
where
    B: burn::tensor::backend::Backend,
    K: BasicOps<B>,
{
    Operand::new(tensor.dims(), tensor.dtype())
}

/// Records that `op` takes a slower path on `device`, usually its reference, and why: warns on
/// stderr the first time, and counts during a recording.
pub fn fell_back(op: &'static str, device: &str, reason: &str) {
    static WARNED: Mutex<Option<HashSet<[String; 3]>>> = Mutex::new(None);
    if lock(&WARNED).get_or_insert_default().insert([op, device, reason].map(String::from)) {
        eprintln!("warning: {op} has no kernel for this case on {device}: {reason}");
    }
    told(|calls| count_fallback(calls, op, device, reason));
}

/// Records `bytes` copied to a device, on every backend whose callers report it.
pub fn uploaded(bytes: usize) {
    told(|calls| count_transfer(&mut calls.uploads, bytes));
}

/// Records `bytes` copied to the host, on every backend whose callers report it.
pub fn read_back(bytes: usize) {
    told(|calls| count_transfer(&mut calls.reads, bytes));
}

/// Records a wait for the device while it had more work queued: it did not run dry.
pub fn waited_while_busy() {
    told(|calls| calls.waits_while_busy += 1);
}

fn count_transfer(transfers: &mut Vec<Transfers>, bytes: usize) {
    let op = Some(current()).filter(|op| *op != NO_OP).unwrap_or("");
    let part = Part::current().name();
    match transfers.iter_mut().find(|transfers| (transfers.part, transfers.op) == (part, op)) {
        Some(transfers) => {
            transfers.count += 1;
            transfers.bytes += bytes as u64;
        }
        None => transfers.push(Transfers { part, op, count: 1, bytes: bytes as u64 }),
    }
}

/// Counts that the open operation runs its reference on request.
pub(crate) fn asked_for_reference() {
    if ON.load(Ordering::Relaxed) {
        told(|calls| count_fallback(calls, current(), "", "kernels=reference is set"));
    }
}

fn count_fallback(calls: &mut Calls, op: &'static str, device: &str, reason: &str) {
    let same = |fallback: &&mut Fallback| (fallback.op, &*fallback.device, &*fallback.reason) == (op, device, reason);
    match calls.fallbacks.iter_mut().find(same) {
        Some(fallback) => fallback.count += 1,
        None => {
            let (device, reason) = (device.into(), reason.into());
            calls.fallbacks.push(Fallback { op, device, reason, count: 1 });
        }
    }
}

fn told(tell: impl FnOnce(&mut Calls)) {
    if ON.load(Ordering::Relaxed)
        && let Some(calls) = lock(&CALLS).as_mut()
    {
        tell(calls);
    }
}
