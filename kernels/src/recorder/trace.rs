//! Assigns work of driver and device to operations.
//!
//! Its inputs are the open operation of each CubeCL stream, driver calls with their streams, and
//! device records. A driver call and the records of its work share a correlation id.

use std::collections::HashMap;
use std::time::Duration;

use super::{Copies, DriverCall, KernelReport, Span, Timeline, Trace, Work};

/// A device record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity<'a> {
    Kernel { name: &'a str },
    Copy { direction: Direction, bytes: u64 },
    Memset { bytes: u64 },
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToDevice,
    ToHost,
    OnDevice,
    BetweenDevices,
    /// From host to host, which does not involve the device.
    OnHost,
    Unknown,
}

/// Kind of a driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Launch,
    /// A copy or a fill.
    Transfer,
    /// Waits for the device.
    Wait,
    Allocation,
    Free,
    /// Allocates pinned host memory.
    HostAllocation,
}

impl Call {
    /// Its name in a report.
    fn name(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Transfer => "copy",
            Self::Wait => "wait",
            Self::Allocation => "allocation",
            Self::Free => "free",
            Self::HostAllocation => "pinned allocation",
        }
    }

    /// From the driver's function name; versions and variants are suffixes.
    pub(crate) fn of(function: &str) -> Option<Self> {
        const CALLS: [(&str, Option<Call>); 15] = [
            ("cuLaunchHostFunc", None),
            ("cuLaunch", Some(Call::Launch)),
            ("cuGraphLaunch", Some(Call::Launch)),
            ("cuMemcpy", Some(Call::Transfer)),
            ("cuMemset", Some(Call::Transfer)),
            ("cuStreamSynchronize", Some(Call::Wait)),
            ("cuEventSynchronize", Some(Call::Wait)),
            ("cuCtxSynchronize", Some(Call::Wait)),
            ("cuMemAllocHost", Some(Call::HostAllocation)),
            ("cuMemHostAlloc", Some(Call::HostAllocation)),
            ("cuMemAlloc", Some(Call::Allocation)),
            ("cuMemCreate", Some(Call::Allocation)),
            ("cuMemFreeHost", None),
            ("cuMemFree", Some(Call::Free)),
            ("cuMemRelease", Some(Call::Free)),
        ];
        CALLS.into_iter().find(|(prefix, _)| function.starts_with(prefix))?.1
    }
}

/// Figures of one operation, as they accumulate.
#[derive(Default)]
struct Tally {
    kernels: Timed,
    copies: [Timed; 4],
    memsets: Timed,
    synchronisations: u64,
    allocations: u64,
    frees: u64,
    host_allocations: u64,
}

#[derive(Clone, Copy, Default)]
struct Timed {
    count: u64,
    bytes: u64,
    time: Duration,
    /// Without a time.
    untimed: u64,
}

struct Launch {
    op: Option<u32>,
    recorded: bool,
}

/// Collects one recording.
#[derive(Default)]
pub(crate) struct Tracer {
    /// Open operations per stream, innermost last.
    open: HashMap<u64, Vec<u32>>,
    /// The operation of each driver call with device work, by correlation id.
    calls: HashMap<u32, Option<u32>>,
    /// Those that launch kernels.
    launches: HashMap<u32, Launch>,
    ops: HashMap<Option<u32>, Tally>,
    total: Tally,
    kernels: HashMap<Option<u32>, HashMap<String, Timed>>,
    unknown_direction: bool,
    /// Start of the recording in CUPTI's time, in nanoseconds.
    origin: u64,
    timeline: Timeline,
    /// Open driver calls by correlation id: their indices in the timeline.
    begun: HashMap<u32, usize>,
}

impl Timed {
    fn add(&mut self, bytes: u64, time: Option<Duration>) {
        self.count += 1;
        self.bytes += bytes;
        self.time += time.unwrap_or_default();
        self.untimed += u64::from(time.is_none());
    }

    fn join(&mut self, other: &Self) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.time += other.time;
        self.untimed += other.untimed;
    }

    fn time(&self) -> Option<Duration> {
        (self.untimed == 0).then_some(self.time)
    }

    fn copies(&self) -> Copies {
        Copies { count: self.count, bytes: self.bytes, time: self.time() }
    }
}

fn longest_first(kernels: HashMap<String, Timed>) -> Vec<KernelReport> {
    let report = |(name, kernel): (String, Timed)| KernelReport { name, launches: kernel.count, time: kernel.time() };
    let mut kernels: Vec<_> = kernels.into_iter().map(report).collect();
    kernels.sort_by(|a, b| b.time.cmp(&a.time).then_with(|| a.name.cmp(&b.name)));
    kernels
}

impl Tracer {
    /// A tracer of a recording that starts at this CUPTI time, in nanoseconds.
    pub(crate) fn new(origin: u64) -> Self {
        Self { origin, ..Self::default() }
    }

    fn since_start(&self, time: u64) -> Duration {
        Duration::from_nanos(time.saturating_sub(self.origin))
    }

    /// A driver call starts.
    pub(crate) fn call_begins(&mut self, stream: u64, call: Call, correlation: u32, time: u64) {
        self.call(stream, call, correlation);
        let start = self.since_start(time);
        self.begun.insert(correlation, self.timeline.driver.len());
        let op = self.op_of(stream).map(|op| op as usize);
        self.timeline.driver.push(DriverCall { kind: call.name(), op, start, end: start });
    }

    /// It ends.
    pub(crate) fn call_ends(&mut self, correlation: u32, time: u64) {
        let end = self.since_start(time);
        if let Some(at) = self.begun.remove(&correlation) {
            self.timeline.driver[at].end = end;
        }
    }

    /// A device record with its times; zeros if unknown.
    pub(crate) fn device_did(&mut self, correlation: u32, activity: Activity<'_>, start: u64, end: u64) {
        let known = start > 0 && end >= start;
        self.activity(correlation, activity, known.then(|| Duration::from_nanos(end - start)));
        if known {
            let name = match activity {
                Activity::Kernel { name } => name,
                Activity::Memset { .. } => "fill",
                Activity::Copy { direction: Direction::ToDevice, .. } => "copy to device",
                Activity::Copy { direction: Direction::ToHost, .. } => "copy to host",
                Activity::Copy { .. } => "copy",
            };
            let op = self.calls.get(&correlation).copied().flatten().map(|op| op as usize);
            let (start, end) = (self.since_start(start), self.since_start(end));
            self.timeline.device.push(Span { op, name: name.into(), start, end });
        }
    }

    fn op_of(&self, stream: u64) -> Option<u32> {
        self.open.get(&stream).and_then(|open| open.last().copied())
    }

    /// Calls for `stream` from here on belong to operation `op`.
    pub(crate) fn enter(&mut self, stream: u64, op: u32) {
        self.open.entry(stream).or_default().push(op);
    }

    /// The innermost operation of `stream` ends.
    pub(crate) fn leave(&mut self, stream: u64) {
        self.open.entry(stream).or_default().pop();
    }

    /// A driver call for `stream`.
    pub(crate) fn call(&mut self, stream: u64, call: Call, correlation: u32) {
        let op = self.op_of(stream);
        for tally in [&mut self.total, self.ops.entry(op).or_default()] {
            match call {
                Call::Launch | Call::Transfer => {}
                Call::Wait => tally.synchronisations += 1,
                Call::Allocation => tally.allocations += 1,
                Call::Free => tally.frees += 1,
                Call::HostAllocation => tally.host_allocations += 1,
            }
        }
        if matches!(call, Call::Launch | Call::Transfer) {
            self.calls.insert(correlation, op);
        }
        if call == Call::Launch {
            self.launches.insert(correlation, Launch { op, recorded: false });
        }
    }

    /// A device record for the driver call of that correlation id.
    pub(crate) fn activity(&mut self, correlation: u32, activity: Activity<'_>, time: Option<Duration>) {
        let op = self.calls.get(&correlation).copied().flatten();
        let (slot, bytes): (fn(&mut Tally) -> &mut Timed, u64) = match activity {
            Activity::Kernel { name } => {
                if let Some(launch) = self.launches.get_mut(&correlation) {
                    launch.recorded = true;
                }
                let kernels = self.kernels.entry(op).or_default();
                match kernels.get_mut(name) {
                    Some(kernel) => kernel.add(0, time),
                    None => kernels.entry(name.to_string()).or_default().add(0, time),
                }
                (|tally| &mut tally.kernels, 0)
            }
            Activity::Memset { bytes } => (|tally| &mut tally.memsets, bytes),
            Activity::Copy { direction, bytes } => {
                let slot: fn(&mut Tally) -> &mut Timed = match direction {
                    Direction::ToDevice => |tally| &mut tally.copies[0],
                    Direction::ToHost => |tally| &mut tally.copies[1],
                    Direction::OnDevice => |tally| &mut tally.copies[2],
                    Direction::BetweenDevices => |tally| &mut tally.copies[3],
                    Direction::OnHost => return,
                    Direction::Unknown => {
                        self.unknown_direction = true;
                        return;
                    }
                };
                (slot, bytes)
            }
        };
        slot(&mut self.total).add(bytes, time);
        slot(self.ops.entry(op).or_default()).add(bytes, time);
    }

    /// The collected records. If CUPTI dropped records or sent ambiguous ones, the affected figures
    /// are unknown; so is the device time of a launch without a record.
    pub(crate) fn finish(mut self, dropped: bool) -> Trace {
        for launch in self.launches.values().filter(|launch| !launch.recorded) {
            self.total.kernels.add(0, None);
            self.ops.entry(launch.op).or_default().kernels.add(0, None);
        }
        let copies_known = !dropped && !self.unknown_direction;
        let work = |tally: &Tally| {
            let [to_device, to_host, on_device, between_devices] =
                tally.copies.map(|copies| copies_known.then(|| copies.copies()));
            Work {
                launches: (!dropped).then_some(tally.kernels.count),
                kernel_time: tally.kernels.time().filter(|_| !dropped),
                to_device,
                to_host,
                on_device,
                between_devices,
                memsets: (!dropped).then(|| tally.memsets.copies()),
                synchronisations: Some(tally.synchronisations),
                allocations: Some(tally.allocations),
                frees: Some(tally.frees),
                host_allocations: Some(tally.host_allocations),
            }
        };
        let idle = work(&Tally::default());
        let outside = self.ops.remove(&None).map_or(idle, |tally| work(&tally));
        let ops = self.ops.iter().filter_map(|(op, tally)| Some(((*op)?, work(tally)))).collect();
        let total = work(&self.total);
        let mut all: HashMap<String, Timed> = HashMap::new();
        for (name, kernel) in self.kernels.values().flatten() {
            all.entry(name.clone()).or_default().join(kernel);
        }
        let kernels_of = self.kernels.into_iter().map(|(op, kernels)| (op, longest_first(kernels)));
        let kernels_of = if dropped { HashMap::new() } else { kernels_of.collect() };
        self.timeline.device.sort_by_key(|span| span.start);
        let timeline = (!dropped).then_some(self.timeline);
        let kernels = (!dropped).then(|| longest_first(all));
        Trace { ops, idle, outside, total, kernels, kernels_of, timeline }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NORM: u32 = 0;
    const LINEAR: u32 = 1;

    fn kernel(name: &str) -> Activity<'_> {
        Activity::Kernel { name }
    }

    fn nanoseconds(time: u64) -> Option<Duration> {
        Some(Duration::from_nanos(time))
    }

    fn call(tracer: &mut Tracer, stream: u64, function: &str, correlation: u32) {
        if let Some(call) = Call::of(function) {
            tracer.call(stream, call, correlation);
        }
    }

    #[test]
    fn work_is_of_the_innermost_operation_of_its_stream() {
        let mut tracer = Tracer::default();
        call(&mut tracer, 7, "cuLaunchKernel", 1);
        tracer.enter(7, NORM);
        call(&mut tracer, 7, "cuLaunchKernel", 2);
        tracer.enter(7, LINEAR);
        call(&mut tracer, 7, "cuLaunchKernelEx", 3);
        // Another thread has no open operation.
        call(&mut tracer, 8, "cuLaunchKernel", 4);
        tracer.leave(7);
        call(&mut tracer, 7, "cuMemcpyHtoDAsync_v2", 5);
        call(&mut tracer, 7, "cuMemAllocAsync", 6);
        tracer.leave(7);
        call(&mut tracer, 7, "cuEventSynchronize", 7);
        // Records come in any order.
        for (correlation, time) in [(3, 30), (1, 10), (4, 40), (2, 20)] {
            tracer.activity(correlation, kernel(if correlation == 3 { "product" } else { "sum" }), nanoseconds(time));
        }
        let copy = Activity::Copy { direction: Direction::ToDevice, bytes: 64 };
        tracer.activity(5, copy, nanoseconds(5));
        let trace = tracer.finish(false);

        let [norm, linear] = [NORM, LINEAR].map(|op| trace.ops[&op]);
        assert_eq!((norm.launches, norm.kernel_time, norm.allocations), (Some(1), nanoseconds(20), Some(1)));
        assert_eq!(norm.to_device, Some(Copies { count: 1, bytes: 64, time: nanoseconds(5) }));
        assert_eq!((linear.launches, linear.kernel_time, linear.allocations), (Some(1), nanoseconds(30), Some(0)));
        assert_eq!((trace.outside.launches, trace.outside.kernel_time), (Some(2), nanoseconds(50)));
        assert_eq!(trace.outside.synchronisations, Some(1));
        assert_eq!(trace.total.device_time(), nanoseconds(105));
        let mut sum = trace.outside;
        trace.ops.values().for_each(|op| sum += *op);
        assert_eq!(sum, trace.total);
        let names: Vec<_> = trace.kernels.iter().flatten().map(|kernel| (&*kernel.name, kernel.launches)).collect();
        assert_eq!(names, [("sum", 3), ("product", 1)]);
    }

    #[test]
    fn the_timeline_has_every_call_and_what_the_device_did_for_it() {
        let mut tracer = Tracer::new(1000);
        tracer.enter(7, NORM);
        tracer.call_begins(7, Call::Launch, 1, 1010);
        tracer.call_ends(1, 1030);
        tracer.leave(7);
        tracer.call_begins(7, Call::Wait, 2, 1040);
        tracer.device_did(1, kernel("late"), 1060, 1090);
        tracer.device_did(3, Activity::Memset { bytes: 4 }, 1000, 1020);
        tracer.device_did(1, kernel("unknown"), 0, 0);
        let trace = tracer.finish(false);
        let timeline = trace.timeline.expect("nothing was dropped");
        let at = |start: u64, end: u64| (Duration::from_nanos(start), Duration::from_nanos(end));
        let device: Vec<_> =
            timeline.device.iter().map(|span| (span.op, &*span.name, (span.start, span.end))).collect();
        assert_eq!(device, [(None, "fill", at(0, 20)), (Some(0), "late", at(60, 90))]);
        let driver: Vec<_> = timeline.driver.iter().map(|call| (call.kind, call.op, (call.start, call.end))).collect();
        // The second call did not end.
        assert_eq!(driver, [("launch", Some(0), at(10, 30)), ("wait", None, at(40, 40))]);
        let kernels = &trace.kernels_of[&Some(NORM)];
        assert_eq!(
            kernels.iter().map(|kernel| (&*kernel.name, kernel.launches)).collect::<Vec<_>>(),
            [("late", 1), ("unknown", 1)]
        );
    }

    #[test]
    fn copies_and_fills_are_told_apart() {
        let mut tracer = Tracer::default();
        let directions = [Direction::ToDevice, Direction::ToHost, Direction::OnDevice, Direction::BetweenDevices];
        for (bytes, direction) in (1..).zip(directions) {
            tracer.activity(0, Activity::Copy { direction, bytes }, nanoseconds(1));
        }
        tracer.activity(0, Activity::Memset { bytes: 5 }, None);
        let Work { to_device, to_host, on_device, between_devices, memsets, .. } = tracer.finish(false).total;
        let copies = [to_device, to_host, on_device, between_devices, memsets].map(|copies| copies.expect("known"));
        assert_eq!(copies.map(|copies| copies.bytes), [1, 2, 3, 4, 5]);
        assert_eq!(
            copies.map(|copies| copies.time),
            [nanoseconds(1), nanoseconds(1), nanoseconds(1), nanoseconds(1), None]
        );
    }

    #[test]
    fn host_memory_and_host_functions_are_no_device_work() {
        let mut tracer = Tracer::default();
        for name in ["cuMemAllocHost_v2", "cuMemFreeHost", "cuMemFree_v2", "cuMemFreeAsync", "cuLaunchHostFunc"] {
            call(&mut tracer, 1, name, 1);
        }
        tracer.activity(1, Activity::Copy { direction: Direction::OnHost, bytes: 8 }, None);
        let total = tracer.finish(false).total;
        assert_eq!((total.allocations, total.frees, total.host_allocations), (Some(0), Some(2), Some(1)));
        assert_eq!((total.launches, total.device_time()), (Some(0), nanoseconds(0)));
    }

    #[test]
    fn a_launch_without_a_record_has_no_known_time() {
        let mut tracer = Tracer::default();
        tracer.enter(1, NORM);
        call(&mut tracer, 1, "cuLaunchKernel", 1);
        tracer.leave(1);
        call(&mut tracer, 1, "cuLaunchKernel", 2);
        tracer.activity(2, kernel("k"), nanoseconds(3));
        let trace = tracer.finish(false);
        assert_eq!((trace.ops[&NORM].launches, trace.ops[&NORM].kernel_time), (Some(1), None));
        assert_eq!((trace.outside.launches, trace.outside.kernel_time), (Some(1), nanoseconds(3)));
        assert_eq!((trace.total.launches, trace.total.kernel_time), (Some(2), None));
    }

    #[test]
    fn dropped_and_odd_records_leave_their_figures_unknown() {
        let mut tracer = Tracer::default();
        call(&mut tracer, 1, "cuLaunchKernel", 1);
        call(&mut tracer, 1, "cuStreamSynchronize", 2);
        let trace = tracer.finish(true);
        assert_eq!((trace.total.launches, trace.total.to_host, trace.kernels), (None, None, None));
        assert_eq!((trace.idle.launches, trace.total.synchronisations), (None, Some(1)));

        let mut tracer = Tracer::default();
        tracer.activity(1, Activity::Copy { direction: Direction::Unknown, bytes: 8 }, None);
        let trace = tracer.finish(false);
        assert_eq!((trace.total.to_host, trace.idle.to_device, trace.total.launches), (None, None, Some(0)));
    }
}
