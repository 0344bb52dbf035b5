//! The profile as text.

use std::fmt::{self, Display, Formatter, Write};

use fireclay_kernels::recorder::{Copies, KernelReport, Operand, Source};

use super::verdicts::shown_bytes;
use super::{Profile, Row, idle, verdicts};

/// Rows with a smaller share are summed up.
const SMALL: f64 = 0.002;
/// Maximum characters of a kernel's name.
const KERNEL: usize = 44;

impl Display for Profile {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { name, unit, count, seconds, device, .. } = self;
        let plural = if *count == 1 { "" } else { "s" };
        writeln!(f, "{name} on {device}: {} per {unit}", time(*seconds))?;
        let slower = 100.0 * (self.recorded_seconds() / seconds - 1.0);
        writeln!(
            f,
            "{count} warm {unit}{plural} recorded, {slower:+.0}% compared with an unrecorded one; {}",
            self.clock()
        )?;
        if let Some(note) = &self.note {
            writeln!(f, "{note}")?;
        }
        writeln!(f)?;
        self.rows_table(f)?;
        writeln!(f)?;
        self.totals(f)?;
        let verdicts = verdicts(self);
        if !verdicts.is_empty() {
            writeln!(f)?;
        }
        verdicts.iter().try_for_each(|verdict| writeln!(f, "{verdict}"))
    }
}

impl Profile {
    fn rows_table(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        let (shown, small): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| row.share >= SMALL);
        let cells = |row: &Row| {
            let count = self.count.max(1) as f64;
            let each = row.time.map_or("unknown".into(), |all| time(all.as_secs_f64() / count));
            let calls = if row.calls == 0 { String::new() } else { number(row.calls as f64 / count) };
            let rate = |rate: Option<f64>, unit: f64, digits| {
                rate.map_or(String::new(), |rate| format!("{:.digits$}", rate / unit))
            };
            [
                format!("{:.1}%", 100.0 * row.share),
                each,
                calls,
                row.name(),
                inputs(&row.inputs),
                rate(row.bytes_per_second, 1e9, 0),
                rate(row.flops_per_second, 1e12, if row.flops_per_second < Some(1e12) { 3 } else { 1 }),
                row.ceiling.map_or(String::new(), |(share, bound)| format!("{:.0}% {}", 100.0 * share, bound.name())),
                kernels(&row.kernels),
            ]
        };
        let header = ["share", self.unit, "calls", "operation", "inputs", "GB/s", "TFLOP/s", "of ceiling", "kernel"];
        let lines: Vec<[String; 9]> = shown.into_iter().map(cells).collect();
        let mut widths = header.map(|cell| cell.chars().count());
        for line in &lines {
            for (width, cell) in widths.iter_mut().zip(line) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let write = |f: &mut Formatter<'_>, line: &[String; 9]| {
            let mut text = String::new();
            for (at, (cell, width)) in line.iter().zip(widths).enumerate() {
                // Names are left-aligned, numbers right-aligned.
                match at {
                    3 | 4 | 7 | 8 => write!(text, "{cell:<width$}  ")?,
                    _ => write!(text, "{cell:>width$}  ")?,
                }
            }
            writeln!(f, "{}", text.trim_end())
        };
        write(f, &header.map(String::from))?;
        lines.iter().try_for_each(|line| write(f, line))?;
        if !small.is_empty() {
            let share: f64 = small.iter().map(|row| row.share).sum();
            writeln!(f, "{:.1}% in {} more", 100.0 * share, small.len())?;
        }
        Ok(())
    }

    fn totals(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (report, count, unit) = (&self.report, self.count.max(1) as f64, self.unit);
        let bytes_per_second = self.ceilings.bytes_per_second / 1e9;
        let peak = match self.ceilings.peaks {
            Some(peaks) if peaks.half == peaks.single => {
                format!("products at {:.1} TFLOP/s, as given", peaks.half / 1e12)
            }
            Some(peaks) => {
                let (half, single) = (peaks.half / 1e12, peaks.single / 1e12);
                format!("products at {half:.0} TFLOP/s in 16 bits and {single:.0} in f32, by its datasheet")
            }
            None => "matrix peak unknown: set it with --peak TFLOPS".into(),
        };
        writeln!(f, "ceilings        a copy at {bytes_per_second:.0} GB/s, measured; {peak}")?;
        let total = &report.total;
        if let Some((busy, idle)) = self.busy().zip(idle(report)) {
            write!(f, "device          busy {:.0}%, idle {:.0}% of a {unit}", 100.0 * busy, 100.0 * (1.0 - busy))?;
            let all = idle.idle.as_secs_f64().max(1e-12);
            let by =
                idle.by.iter().take(4).map(|(what, time)| format!("{:.0}% {what}", 100.0 * time.as_secs_f64() / all));
            writeln!(f, "; of the idle time the host is {}", by.collect::<Vec<_>>().join(", "))?;
        }
        let known = |value: Option<u64>| value.map_or("unknown".into(), |value| number(value as f64 / count));
        let copies = |copies: Option<Copies>, told: u64, told_bytes: u64| match copies {
            Some(copies) => {
                format!("{} ({})", number(copies.count as f64 / count), shown_bytes(copies.bytes as f64 / count))
            }
            None => format!("{} ({})", number(told as f64 / count), shown_bytes(told_bytes as f64 / count)),
        };
        let sum = |of: &[fireclay_kernels::recorder::Transfers]| {
            of.iter().fold((0, 0), |sum, one| (sum.0 + one.count, sum.1 + one.bytes))
        };
        let ((uploads, up), (reads, down)) = (sum(&report.uploads), sum(&report.reads));
        // The host has no launches and calls no driver.
        let on_device = report.source != Source::Host;
        if on_device {
            let (launches, waits) = (known(total.launches), known(total.synchronisations));
            write!(f, "a {unit:<14}{launches} launches, {waits} waits for the device")?;
            match report.waits_while_busy {
                overlapped if overlapped == 0 || total.synchronisations.is_none() => writeln!(f)?,
                overlapped => writeln!(
                    f,
                    ", {} of them while the device had more work queued",
                    number(overlapped as f64 / count)
                )?,
            }
        }
        let (to_device, to_host) = (copies(total.to_device, uploads, up), copies(total.to_host, reads, down));
        writeln!(f, "copies          to the device {to_device}; to the host {to_host}")?;
        let all = |value: Option<u64>| value.map_or("unknown".into(), |value| value.to_string());
        if on_device {
            writeln!(f, "the driver      {} allocations in all, {} frees", all(total.allocations), all(total.frees))?;
        }
        if let Some(memory) = self.memory {
            let (in_use, reserved) = (shown_bytes(memory.in_use as f64), shown_bytes(memory.reserved as f64));
            writeln!(f, "memory          {in_use} in use at the end, {reserved} at its peak")?;
        }
        Ok(())
    }
}

/// A time in a suitable unit.
fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 1.0 => format!("{seconds:.2} s"),
        seconds if seconds >= 1e-3 => format!("{:.2} ms", seconds * 1e3),
        seconds => format!("{:.1} us", seconds * 1e6),
    }
}

/// Whole, or with two digits.
fn number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// `[2, 3] [3, 4] bf16`: a dtype shared by all inputs is shown once.
fn inputs(inputs: &[Operand]) -> String {
    let mut text = String::new();
    for (at, input) in inputs.iter().enumerate() {
        let last = inputs.get(at + 1).is_none_or(|next| next.dtype != input.dtype);
        let dtype = if last { format!(" {}", input.dtype.name()) } else { String::new() };
        text += &format!("{}{:?}{dtype}", if at == 0 { "" } else { " " }, input.dims);
    }
    text
}

fn kernels(kernels: &[KernelReport]) -> String {
    let Some(first) = kernels.first() else { return String::new() };
    let mut name: String = first.name.chars().take(KERNEL).collect();
    if name.len() < first.name.len() {
        name.push_str("..");
    }
    if kernels.len() > 1 {
        name.push_str(&format!(" and {} more", kernels.len() - 1));
    }
    name
}
