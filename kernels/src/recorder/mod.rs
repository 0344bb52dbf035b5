//! Shows where the time of a region of work went, and what crossed the bus.
//!
//! Recorded are the operations of this crate with their shapes and dtypes, on every backend, and, on CUDA, what
//! NVIDIA's CUPTI tells of the driver and of the device: kernels, copies, fills, waits and allocations, each with the
//! operation that it was for. A figure that a backend cannot know is `None` in the report, and "unknown" in its table.
//!
//! One recording runs at a time in a process, and holds the operations of all its threads. Without one, an operation
//! pays for one load of a flag.
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
//! assert_eq!((op.calls, &op.shapes[0].0[0].dims[..]), (1, &[4, 8][..]));
//! assert_eq!(report.source, Source::Calls);
//! assert_eq!(report.total.launches, None, "nothing tells of launches on the CPU");
//! println!("{report}");
//! # drop(y);
//! # Ok::<(), fireclay_kernels::recorder::RecorderError>(())
//! ```

mod backends;
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
use std::time::Instant;

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, Tensor};

pub use report::{Copies, Fallback, KernelReport, OpReport, Operand, Report, Source, Work};

/// Whether calls are to be recorded.
static ON: AtomicBool = AtomicBool::new(false);
/// Whether there is a recording, its start and its end included.
static TAKEN: AtomicBool = AtomicBool::new(false);
static CALLS: Mutex<Option<Calls>> = Mutex::new(None);

thread_local! {
    static CURRENT: Cell<&'static str> = const { Cell::new("an operation") };
}

/// Why there is no recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecorderError {
    /// Another one runs.
    Running,
    /// The device failed, or could not be waited for.
    Device(String),
    /// CUPTI is missing, of an unknown version, in use by another profiler, or failed.
    Cupti(String),
}

impl Display for RecorderError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("a recording runs already, and there is one at a time"),
            Self::Device(reason) => write!(f, "the device cannot be recorded: {reason}"),
            Self::Cupti(reason) => write!(f, "CUPTI cannot record: {reason}"),
        }
    }
}

impl std::error::Error for RecorderError {}

/// A backend whose work can be recorded.
pub trait RecorderOps: Backend {
    /// What shows a [`Recording`] the work of `device`; none where calls are all that is known.
    fn probe(_device: &Self::Device) -> Option<Box<dyn Probe>> {
        None
    }
}

/// What shows the recorder the work of a device; see [`RecorderOps::probe`].
pub trait Probe: Send + Sync {
    /// Begins to watch. The device is idle.
    ///
    /// # Errors
    /// Where the device cannot be watched.
    fn start(&self) -> Result<(), RecorderError>;
    /// What this thread asks of the device from here on is for operation `op`.
    fn enter(&self, op: u32);
    /// The innermost operation of this thread is over.
    fn leave(&self);
    /// All that was asked of the device so far is in the driver's hands, and what is asked from here on is not watched.
    fn close(&self);
    /// Ends, and tells what was seen. The device is idle again, unless it failed.
    ///
    /// # Errors
    /// Where it was not seen after all.
    fn finish(&self) -> Result<Trace, RecorderError>;
}

/// What a [`Probe`] saw.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Work by operation.
    pub ops: HashMap<u32, Work>,
    /// Work of an operation that is not among them.
    pub idle: Work,
    /// Work outside any operation.
    pub outside: Work,
    /// All of it.
    pub total: Work,
    /// Kernels, longest first.
    pub kernels: Option<Vec<KernelReport>>,
}

/// What is known from the host's side.
#[derive(Default)]
struct Calls {
    ops: Vec<OpCalls>,
    by_name: HashMap<&'static str, usize>,
    fallbacks: Vec<Fallback>,
    uploaded: Copies,
    read_back: Copies,
    probe: Option<Arc<dyn Probe>>,
}

struct OpCalls {
    name: &'static str,
    calls: u64,
    shapes: Vec<(Vec<Operand>, u64)>,
    by_shape: HashMap<Vec<Operand>, usize>,
}

impl Calls {
    /// Counts a call; returns the operation's number.
    fn count(&mut self, name: &'static str, operands: Vec<Operand>) -> usize {
        let at = *self.by_name.entry(name).or_insert_with(|| {
            self.ops.push(OpCalls { name, calls: 0, shapes: Vec::new(), by_shape: HashMap::new() });
            self.ops.len() - 1
        });
        let op = &mut self.ops[at];
        op.calls += 1;
        match op.by_shape.get(&operands) {
            Some(shape) => op.shapes[*shape].1 += 1,
            None => {
                op.by_shape.insert(operands.clone(), op.shapes.len());
                op.shapes.push((operands, 1));
            }
        }
        at
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A recording that runs. Dropped, it ends without a report.
#[must_use = "a recording ends where it is dropped"]
pub struct Recording {
    device: String,
    sync: Box<dyn Fn() -> Result<(), String> + Send>,
    probe: Option<Arc<dyn Probe>>,
    started: Instant,
}

impl Recording {
    /// Waits for `device`, and records from there on.
    ///
    /// On CUDA, copies, launches and the like are those of this one device; operations are those of all.
    ///
    /// # Errors
    /// If another recording runs, if the device failed, or if it is a CUDA device and CUPTI cannot be used.
    pub fn start<B: RecorderOps>(device: &B::Device) -> Result<Self, RecorderError> {
        Self::begin::<B>(device, true)
    }

    /// As [`start`](Self::start), but for calls alone, with no need of CUPTI.
    ///
    /// # Errors
    /// If another recording runs, or if the device failed.
    pub fn start_calls<B: RecorderOps>(device: &B::Device) -> Result<Self, RecorderError> {
        Self::begin::<B>(device, false)
    }

    fn begin<B: RecorderOps>(device: &B::Device, watch: bool) -> Result<Self, RecorderError> {
        if TAKEN.swap(true, Ordering::AcqRel) {
            return Err(RecorderError::Running);
        }
        let sync = {
            let device = device.clone();
            move || B::sync(&device).map_err(|error| error.to_string())
        };
        // From here on an early return drops it, which frees the place.
        let mut recording =
            Self { device: format!("{device:?}"), sync: Box::new(sync), probe: None, started: Instant::now() };
        (recording.sync)().map_err(RecorderError::Device)?;
        if watch && let Some(probe) = B::probe(device) {
            probe.start()?;
            recording.probe = Some(probe.into());
        }
        *lock(&CALLS) = Some(Calls { probe: recording.probe.clone(), ..Calls::default() });
        recording.started = Instant::now();
        ON.store(true, Ordering::Release);
        Ok(recording)
    }

    /// Stops recording, waits for the device, and reports.
    ///
    /// # Errors
    /// If the device failed, or what it did could not be read out.
    pub fn stop(mut self) -> Result<Report, RecorderError> {
        let calls = self.close();
        let synced = (self.sync)().map_err(RecorderError::Device);
        let elapsed = self.started.elapsed();
        let trace = self.probe.take().map(|probe| probe.finish()).transpose();
        synced?;
        let trace = trace?;
        let source = if trace.is_some() { Source::Cupti } else { Source::Calls };
        let trace = trace.unwrap_or_default();
        let op = |(at, op): (usize, OpCalls)| {
            let work = trace.ops.get(&(at as u32)).copied().unwrap_or(trace.idle);
            OpReport { name: op.name, calls: op.calls, shapes: op.shapes, work }
        };
        Ok(Report {
            source,
            device: std::mem::take(&mut self.device),
            elapsed,
            ops: calls.ops.into_iter().enumerate().map(op).collect(),
            outside: trace.outside,
            total: trace.total,
            kernels: trace.kernels,
            fallbacks: calls.fallbacks,
            uploaded: calls.uploaded,
            read_back: calls.read_back,
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
        // With its probe taken it has been stopped, or never watched.
        if let Some(probe) = &self.probe {
            self.close();
            // Nobody is there to be told.
            let _ = (self.sync)().and_then(|()| probe.finish().map_err(|error| error.to_string()));
        }
        ON.store(false, Ordering::Release);
        lock(&CALLS).take();
        TAKEN.store(false, Ordering::Release);
    }
}

/// The span of an operation's call: what this thread asks of the device meanwhile is the operation's.
#[must_use = "the span ends when this is dropped"]
pub struct Scope {
    probe: Option<Arc<dyn Probe>>,
    /// The operation around this one.
    around: &'static str,
    // It must end on the thread that it began on.
    _thread: PhantomData<*const ()>,
}

impl Drop for Scope {
    fn drop(&mut self) {
        CURRENT.set(self.around);
        if let Some(probe) = &self.probe {
            probe.leave();
        }
    }
}

/// Counts a call of the operation `name`, with the inputs that `describe` names, until the scope ends. For operations of
/// your own; those of this crate count themselves. Without a recording it costs one load of a flag.
pub fn op(name: &'static str, describe: impl FnOnce() -> Vec<Operand>) -> Scope {
    // What the flag guards lies behind a lock of its own.
    let probe = if ON.load(Ordering::Relaxed) { enter(name, describe()) } else { None };
    Scope { probe, around: CURRENT.replace(name), _thread: PhantomData }
}

/// The innermost operation that this thread is in, for what it has to say.
#[cfg(feature = "cubecl")]
pub(crate) fn current() -> &'static str {
    CURRENT.get()
}

#[cold]
fn enter(name: &'static str, operands: Vec<Operand>) -> Option<Arc<dyn Probe>> {
    let (at, probe) = {
        let mut calls = lock(&CALLS);
        let calls = calls.as_mut()?;
        (calls.count(name, operands), calls.probe.clone()?)
    };
    // May wait for the device's thread, and so not under the lock.
    probe.enter(at as u32);
    Some(probe)
}

/// A tensor's shape and dtype.
pub fn operand<B, const D: usize, K>(tensor: &Tensor<B, D, K>) -> Operand
where
    B: burn::tensor::backend::Backend,
    K: BasicOps<B>,
{
    Operand::new(tensor.dims(), tensor.dtype())
}

/// Tells that `op` runs its reference on `device` for want of a kernel, and why: warns on standard error the first
/// time, and counts while a recording runs.
pub fn fell_back(op: &'static str, device: &str, reason: &str) {
    static WARNED: Mutex<Option<HashSet<[String; 3]>>> = Mutex::new(None);
    if lock(&WARNED).get_or_insert_default().insert([op, device, reason].map(String::from)) {
        eprintln!("warning: {op} runs its reference on {device}: {reason}");
    }
    told(|calls| {
        let same =
            |fallback: &&mut Fallback| (fallback.op, &*fallback.device, &*fallback.reason) == (op, device, reason);
        match calls.fallbacks.iter_mut().find(same) {
            Some(fallback) => fallback.count += 1,
            None => {
                let (device, reason) = (device.into(), reason.into());
                calls.fallbacks.push(Fallback { op, device, reason, count: 1 });
            }
        }
    });
}

/// Tells that `bytes` were copied to a device: known on every backend, where the caller says so.
pub fn uploaded(bytes: usize) {
    told(|calls| calls.uploaded += Copies { count: 1, bytes: bytes as u64, time: None });
}

/// Tells that `bytes` were copied to the host: known on every backend, where the caller says so.
pub fn read_back(bytes: usize) {
    told(|calls| calls.read_back += Copies { count: 1, bytes: bytes as u64, time: None });
}

fn told(tell: impl FnOnce(&mut Calls)) {
    if ON.load(Ordering::Relaxed)
        && let Some(calls) = lock(&CALLS).as_mut()
    {
        tell(calls);
    }
}
