//! The report of a recording: fields, a table, and JSON.

use std::fmt::{self, Display, Formatter, Write};
use std::ops::AddAssign;
use std::time::Duration;

use burn::tensor::DType;

/// Kernels in the table; fields and JSON have all.
const KERNELS_SHOWN: usize = 12;

/// Source of a report's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Calls only: the device's work is unknown.
    Calls,
    /// Calls and the host's clock: the device is the host, and operations are complete when their
    /// calls return.
    Host,
    /// Calls and the host's clock, with a wait after each operation.
    Waits,
    /// Calls, and CUPTI's records of driver and device.
    Cupti,
}

/// Shape and dtype of one input of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Its dimensions.
    pub dims: Vec<usize>,
    /// Its dtype.
    pub dtype: DType,
}

/// Copies or fills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// Count.
    pub count: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Device time, if known.
    pub time: Option<Duration>,
}

/// Work of an operation, or of a whole region. `None` is unknown, never zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Kernels launched.
    pub launches: Option<u64>,
    /// Device time of these kernels.
    pub kernel_time: Option<Duration>,
    /// Copies from the host to the device.
    pub to_device: Option<Copies>,
    /// Copies from the device to the host.
    pub to_host: Option<Copies>,
    /// Copies within the device.
    pub on_device: Option<Copies>,
    /// Copies between this device and another.
    pub between_devices: Option<Copies>,
    /// Fills of device memory.
    pub memsets: Option<Copies>,
    /// Waits for a stream, an event, or the device.
    pub synchronisations: Option<u64>,
    /// Allocations of device memory by the driver.
    pub allocations: Option<u64>,
    /// Frees of device memory by the driver.
    pub frees: Option<u64>,
    /// Allocations of pinned host memory by the driver.
    pub host_allocations: Option<u64>,
}

/// The calls of one operation in one part of a model, with equal input shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct OpReport {
    /// The part of the model; empty outside of any, see [`part`](super::part).
    pub part: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Shape and dtype of its inputs.
    pub inputs: Vec<Operand>,
    /// Number of calls.
    pub calls: u64,
    /// Minimum bytes moved by all calls; zero if not described.
    pub bytes: u64,
    /// FLOP of the matrix products of all calls.
    pub flops: u64,
    /// Host time in it, without operations that it called; `None` with [`Source::Calls`].
    pub host_time: Option<Duration>,
    /// Work in it, without operations that it called.
    pub work: Work,
    /// The kernels of that work, longest first, if known.
    pub kernels: Vec<KernelReport>,
}

/// Copies reported by callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfers {
    /// The part of the model; empty outside of any.
    pub part: &'static str,
    /// The operation; empty outside of any.
    pub op: &'static str,
    /// How many.
    pub count: u64,
    /// Total bytes.
    pub bytes: u64,
}

/// A time span, relative to the start of the recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its operation, an index of [`Report::ops`].
    pub op: Option<usize>,
    /// Its name, unless it is the operation itself.
    pub name: String,
    /// Start.
    pub start: Duration,
    /// End.
    pub end: Duration,
}

/// A driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverCall {
    /// Its kind: launch, copy, wait, allocation, free.
    pub kind: &'static str,
    /// Its operation, an index of [`Report::ops`].
    pub op: Option<usize>,
    /// Start.
    pub start: Duration,
    /// End.
    pub end: Duration,
}

/// The timeline of device and driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// Kernels, copies and fills on the device.
    pub device: Vec<Span>,
    /// Driver calls on the host.
    pub driver: Vec<DriverCall>,
}

/// The launches of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// Its name in the driver.
    pub name: String,
    /// Number of launches.
    pub launches: u64,
    /// Total device time.
    pub time: Option<Duration>,
}

/// Calls of an operation that ran its reference on a device for lack of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The operation.
    pub op: &'static str,
    /// The device.
    pub device: String,
    /// The reason.
    pub reason: String,
    /// Number of calls.
    pub count: u64,
}

/// The report of a recording.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Source of the times.
    pub source: Source,
    /// The device.
    pub device: String,
    /// Host time from the wait before the region to the wait after it.
    pub elapsed: Duration,
    /// Operations on all devices, in order of their first calls.
    pub ops: Vec<OpReport>,
    /// Device work outside of operations.
    pub outside: Work,
    /// The kernels of that work, longest first, if known.
    pub kernels_outside: Vec<KernelReport>,
    /// All device work.
    pub total: Work,
    /// Kernels by device time, longest first, if known.
    pub kernels: Option<Vec<KernelReport>>,
    /// References run for lack of a kernel.
    pub fallbacks: Vec<Fallback>,
    /// Copies reported to [`uploaded`](super::uploaded); others are missing.
    pub uploads: Vec<Transfers>,
    /// Copies reported to [`read_back`](super::read_back); others are missing.
    pub reads: Vec<Transfers>,
    /// Waits reported to [`waited_while_busy`](super::waited_while_busy): they did not leave the
    /// device without work.
    pub waits_while_busy: u64,
    /// Operation calls by the host's clock, in the order of their ends.
    pub spans: Vec<Span>,
    /// The device's timeline, if known.
    pub timeline: Option<Timeline>,
}

impl Operand {
    /// From dimensions and dtype.
    pub fn new(dims: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self { dims: dims.into(), dtype }
    }

    /// Bytes of all its elements.
    pub fn bytes(&self) -> u64 {
        (self.dims.iter().product::<usize>() * self.dtype.size()) as u64
    }
}

impl Work {
    /// No work, and known to be none.
    pub fn none() -> Self {
        let copies = Some(Copies { time: Some(Duration::ZERO), ..Copies::default() });
        Self {
            launches: Some(0),
            kernel_time: Some(Duration::ZERO),
            to_device: copies,
            to_host: copies,
            on_device: copies,
            between_devices: copies,
            memsets: copies,
            synchronisations: Some(0),
            allocations: Some(0),
            frees: Some(0),
            host_allocations: Some(0),
        }
    }

    /// Device time of kernels, copies and fills, if completely known. Kernels of several streams
    /// may overlap, so it can exceed the elapsed time.
    pub fn device_time(&self) -> Option<Duration> {
        let copies = [self.to_device, self.to_host, self.on_device, self.between_devices, self.memsets];
        copies.into_iter().try_fold(self.kernel_time?, |sum, copies| Some(sum + copies?.time?))
    }
}

impl AddAssign for Copies {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.time = self.time.zip(other.time).map(|(a, b)| a + b);
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        fn add<T: AddAssign>(a: &mut Option<T>, b: Option<T>) {
            *a = a.take().zip(b).map(|(mut a, b)| {
                a += b;
                a
            });
        }
        add(&mut self.launches, other.launches);
        add(&mut self.kernel_time, other.kernel_time);
        add(&mut self.to_device, other.to_device);
        add(&mut self.to_host, other.to_host);
        add(&mut self.on_device, other.on_device);
        add(&mut self.between_devices, other.between_devices);
        add(&mut self.memsets, other.memsets);
        add(&mut self.synchronisations, other.synchronisations);
        add(&mut self.allocations, other.allocations);
        add(&mut self.frees, other.frees);
        add(&mut self.host_allocations, other.host_allocations);
    }
}

impl Report {
    /// The operation of this name, if it was called; the first one, if there are several input
    /// shapes.
    pub fn op(&self, name: &str) -> Option<&OpReport> {
        self.ops.iter().find(|op| op.name == name)
    }

    /// Number of calls of this operation, with any inputs.
    pub fn calls(&self, name: &str) -> u64 {
        self.ops.iter().filter(|op| op.name == name).map(|op| op.calls).sum()
    }

    /// The report as a JSON object: times in nanoseconds, `null` if unknown.
    pub fn to_json(&self) -> String {
        let source = match self.source {
            Source::Calls => "calls",
            Source::Host => "host",
            Source::Waits => "waits",
            Source::Cupti => "cupti",
        };
        let transfers = |transfers: &Transfers| {
            let (part, op) = (text(transfers.part), text(transfers.op));
            format!(r#"{{"part":{part},"op":{op},"count":{},"bytes":{}}}"#, transfers.count, transfers.bytes)
        };
        let fallback = |fallback: &Fallback| {
            let [op, device, reason] = [fallback.op, &fallback.device, &fallback.reason].map(text);
            format!(r#"{{"op":{op},"device":{device},"reason":{reason},"count":{}}}"#, fallback.count)
        };
        format!(
            concat!(
                r#"{{"source":"{}","device":{},"elapsed_ns":{},"ops":{},"outside":{},"total":{},"kernels":{},"#,
                r#""fallbacks":{},"uploads":{},"reads":{},"waits_beside":{}}}"#,
            ),
            source,
            text(&self.device),
            self.elapsed.as_nanos(),
            list(&self.ops, OpReport::json),
            self.outside.json(),
            self.total.json(),
            optional(self.kernels.as_ref().map(|kernels| list(kernels, KernelReport::json))),
            list(&self.fallbacks, fallback),
            list(&self.uploads, transfers),
            list(&self.reads, transfers),
            self.waits_while_busy,
        )
    }
}

impl OpReport {
    fn json(&self) -> String {
        let operand = |operand: &Operand| {
            format!(r#"{{"dims":{},"dtype":"{}"}}"#, list(&operand.dims, usize::to_string), operand.dtype.name())
        };
        format!(
            concat!(
                r#"{{"part":{},"name":{},"inputs":{},"calls":{},"bytes":{},"flops":{},"#,
                r#""host_time_ns":{},"work":{},"kernels":{}}}"#,
            ),
            text(self.part),
            text(self.name),
            list(&self.inputs, operand),
            self.calls,
            self.bytes,
            self.flops,
            optional(self.host_time.map(|time| time.as_nanos())),
            self.work.json(),
            list(&self.kernels, KernelReport::json),
        )
    }
}

impl KernelReport {
    fn json(&self) -> String {
        let (name, time) = (text(&self.name), optional(self.time.map(|time| time.as_nanos())));
        format!(r#"{{"name":{name},"launches":{},"time_ns":{time}}}"#, self.launches)
    }
}

impl Copies {
    fn json(&self) -> String {
        let time = optional(self.time.map(|time| time.as_nanos()));
        format!(r#"{{"count":{},"bytes":{},"time_ns":{time}}}"#, self.count, self.bytes)
    }
}

impl Work {
    fn json(&self) -> String {
        let copies = |copies: Option<Copies>| optional(copies.map(|copies| copies.json()));
        let fields = [
            ("launches", optional(self.launches)),
            ("kernel_time_ns", optional(self.kernel_time.map(|time| time.as_nanos()))),
            ("to_device", copies(self.to_device)),
            ("to_host", copies(self.to_host)),
            ("on_device", copies(self.on_device)),
            ("between_devices", copies(self.between_devices)),
            ("memsets", copies(self.memsets)),
            ("synchronisations", optional(self.synchronisations)),
            ("allocations", optional(self.allocations)),
            ("frees", optional(self.frees)),
            ("host_allocations", optional(self.host_allocations)),
        ];
        format!("{{{}}}", fields.map(|(name, value)| format!(r#""{name}":{value}"#)).join(","))
    }
}

fn optional(value: Option<impl Display>) -> String {
    value.map_or("null".into(), |value| value.to_string())
}

fn list<T>(items: &[T], json: impl Fn(&T) -> String) -> String {
    format!("[{}]", items.iter().map(json).collect::<Vec<_>>().join(","))
}

/// A JSON string.
fn text(value: &str) -> String {
    let mut json = String::from('"');
    for c in value.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c < ' ' => write!(json, "\\u{:04x}", u32::from(c)).expect("strings take all"),
            c => json.push(c),
        }
    }
    json + "\""
}

impl Display for Source {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Calls => "calls alone",
            Self::Host => "the host's clock",
            Self::Waits => "the host's clock, each operation waited for",
            Self::Cupti => "CUPTI",
        })
    }
}

impl Display for Operand {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.dims, self.dtype.name())
    }
}

impl Display for Copies {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.count, bytes(self.bytes))?;
        self.time.map_or(Ok(()), |time| write!(f, ", {}", milliseconds(time)))
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} on {}, from {}", milliseconds(self.elapsed), self.device, self.source)?;
        let name_width = self.ops.iter().map(|op| op.name.len()).max().unwrap_or(0).max("outside any op".len());
        let row = |f: &mut Formatter<'_>, name: &str, cells: [&str; 5]| {
            let [calls, launches, time, up, down] = cells;
            writeln!(f, "{name:name_width$} {calls:>7} {launches:>9} {time:>12} {up:>10} {down:>10}")
        };
        let work = |f: &mut Formatter<'_>, name: &str, calls: &str, work: &Work| {
            let count = |copies: Option<Copies>| known(copies.map(|copies| copies.count));
            let (launches, time) = (known(work.launches), known(work.device_time().map(milliseconds)));
            row(f, name, [calls, &launches, &time, &count(work.to_device), &count(work.to_host)])
        };
        row(f, "op", ["calls", "launches", "device time", "to device", "to host"])?;
        for op in &self.ops {
            work(f, op.name, &op.calls.to_string(), &op.work)?;
        }
        work(f, "outside any op", "", &self.outside)?;
        work(f, "total", &self.ops.iter().map(|op| op.calls).sum::<u64>().to_string(), &self.total)?;

        writeln!(f, "\nhost to device: {}", known(self.total.to_device))?;
        writeln!(f, "device to host: {}", known(self.total.to_host))?;
        writeln!(f, "within the device: {}", known(self.total.on_device))?;
        writeln!(f, "between devices: {}", known(self.total.between_devices))?;
        writeln!(f, "fills: {}", known(self.total.memsets))?;
        writeln!(f, "synchronisations: {}", known(self.total.synchronisations))?;
        let (allocations, frees) = (known(self.total.allocations), known(self.total.frees));
        writeln!(
            f,
            "driver allocations: {allocations}, frees: {frees}, pinned: {}",
            known(self.total.host_allocations)
        )?;
        for (what, transfers) in [("uploads", &self.uploads), ("reads", &self.reads)] {
            for Transfers { part, op, count, bytes: moved } in transfers {
                writeln!(f, "{what}: {count}, {} by {part} {op}", bytes(*moved))?;
            }
        }

        if !self.ops.is_empty() {
            writeln!(f, "\ncalls by shape")?;
        }
        for op in &self.ops {
            let operands: Vec<String> = op.inputs.iter().map(Operand::to_string).collect();
            writeln!(f, "{:name_width$} {:>7} x {}", op.name, op.calls, operands.join(", "))?;
        }
        match &self.kernels {
            None => writeln!(f, "\nkernels: unknown")?,
            Some(kernels) => {
                writeln!(f, "\nkernels: {}", kernels.len())?;
                for kernel in kernels.iter().take(KERNELS_SHOWN) {
                    let time = known(kernel.time.map(milliseconds));
                    writeln!(f, "{time:>12} {:>7} x {}", kernel.launches, kernel.name)?;
                }
                if kernels.len() > KERNELS_SHOWN {
                    writeln!(f, "and {} more", kernels.len() - KERNELS_SHOWN)?;
                }
            }
        }
        for Fallback { op, device, reason, count } in &self.fallbacks {
            writeln!(f, "{op} ran its reference on {device} {count} times: {reason}")?;
        }
        Ok(())
    }
}

fn known(value: Option<impl Display>) -> String {
    value.map_or("unknown".into(), |value| value.to_string())
}

fn milliseconds(time: Duration) -> String {
    format!("{:.3} ms", time.as_secs_f64() * 1e3)
}

fn bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let norm = OpReport {
            part: "attention",
            name: "norm",
            inputs: vec![Operand::new([2, 3], DType::BF16)],
            calls: 4,
            bytes: 96,
            flops: 0,
            host_time: None,
            work: Work::default(),
            kernels: Vec::new(),
        };
        let copies = Copies { count: 1, bytes: 2048, time: Some(Duration::from_nanos(7)) };
        let known = Work { to_host: Some(copies), launches: Some(5), ..Work::none() };
        Report {
            source: Source::Cupti,
            device: "Cuda(0)".into(),
            elapsed: Duration::from_micros(1500),
            ops: vec![norm],
            outside: Work::none(),
            kernels_outside: Vec::new(),
            total: known,
            kernels: Some(vec![KernelReport { name: "k\"1\"".into(), launches: 5, time: None }]),
            fallbacks: vec![Fallback { op: "rotary", device: "d".into(), reason: "a\nb".into(), count: 2 }],
            uploads: Vec::new(),
            reads: vec![Transfers { part: "head", op: "", count: 1, bytes: 4 }],
            waits_while_busy: 3,
            spans: Vec::new(),
            timeline: None,
        }
    }

    #[test]
    fn the_table_tells_the_unknown_from_zero() {
        let table = report().to_string();
        assert!(table.contains("1.500 ms on Cuda(0), from CUPTI"), "{table}");
        assert!(table.contains("device to host: 1, 2.0 KiB, 0.000 ms"), "{table}");
        let norm = table.lines().find(|line| line.starts_with("norm")).expect("a line for norm");
        assert_eq!(
            norm.split_whitespace().collect::<Vec<_>>(),
            ["norm", "4", "unknown", "unknown", "unknown", "unknown"]
        );
        let outside = table.lines().find(|line| line.starts_with("outside")).expect("a line for the rest");
        assert!(outside.contains(" 0 ") && !outside.contains("unknown"), "{outside}");
        assert!(table.contains("4 x [2, 3] bf16"), "{table}");
    }

    #[test]
    fn json_has_null_for_the_unknown_and_escapes_text() {
        let json = report().to_json();
        assert!(json.starts_with(
            r#"{"source":"cupti","device":"Cuda(0)","elapsed_ns":1500000,"ops":[{"part":"attention","name":"norm""#
        ));
        assert!(json.contains(r#""inputs":[{"dims":[2,3],"dtype":"bf16"}],"calls":4,"bytes":96"#), "{json}");
        assert!(json.contains(r#""reads":[{"part":"head","op":"","count":1,"bytes":4}],"waits_beside":3"#), "{json}");
        assert!(json.contains(r#""work":{"launches":null,"kernel_time_ns":null,"to_device":null"#), "{json}");
        assert!(json.contains(r#""to_host":{"count":1,"bytes":2048,"time_ns":7}"#), "{json}");
        assert!(json.contains(r#"{"name":"k\"1\"","launches":5,"time_ns":null}"#), "{json}");
        assert!(json.contains(r#""reason":"a\u000ab""#), "{json}");
    }

    #[test]
    fn what_is_unknown_in_a_part_is_unknown_in_the_sum() {
        let mut sum = Work { launches: Some(2), ..Work::none() };
        sum += Work { launches: Some(3), kernel_time: None, ..Work::none() };
        assert_eq!((sum.launches, sum.kernel_time, sum.device_time()), (Some(5), None, None));
        assert_eq!(Work::none().device_time(), Some(Duration::ZERO));
    }
}
