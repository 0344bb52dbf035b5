//! Progress of long work, on a terminal's last line.

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use fireclay_datasets::Progress;

/// Receives the path that is tokenized and the progress; breaks to stop.
pub type Watch<'a> = &'a mut dyn FnMut(&Path, Progress) -> ControlFlow<()>;

/// A duration as text: `7s`, `2m 05s`, `3h 10m`.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m {seconds:02}s"),
        (hours, minutes, _) => format!("{hours}h {minutes:02}m"),
    }
}

/// A terminal's last line; cleared at the end.
#[derive(Default)]
pub(crate) struct Line(String);

impl Line {
    pub(crate) fn show(&mut self, text: String) {
        if text != self.0 {
            let line = format!("\r{:width$}\r{text}", "", width = self.0.chars().count());
            let mut stderr = io::stderr();
            // A closed terminal is not an error.
            let _ = stderr.write_all(line.as_bytes()).and_then(|()| stderr.flush());
            self.0 = text;
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.show(String::new());
    }
}

/// Shows the progress of tokenization on a terminal, and stops it when `stop` says so.
pub fn show_preparing(stop: impl Fn() -> bool) -> impl FnMut(&Path, Progress) -> ControlFlow<()> {
    let (terminal, begun, mut line) = (io::stderr().is_terminal(), Instant::now(), Line::default());
    move |path, progress| {
        if terminal {
            line.show(preparing(path, progress, begun.elapsed().as_secs_f64()));
        }
        if stop() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

fn preparing(path: &Path, progress: Progress, seconds: f64) -> String {
    const WIDTH: usize = 20;
    let Progress { read, total, encoded, tokens } = progress;
    let name = path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned());
    let rate = encoded as f64 / seconds.max(1e-3);
    let done = format!("{:.1} million tokens, {:.1} MB/s", tokens as f64 / 1e6, rate / 1e6);
    if total == 0 {
        return format!("tokenizing {name}: {done}");
    }
    let share = (read as f64 / total as f64).min(1.0);
    let filled = (share * WIDTH as f64) as usize;
    let bar = format!("{}{}", "█".repeat(filled), "░".repeat(WIDTH - filled));
    // Bytes of text per byte of the files, which may be compressed.
    let left = (total - read.min(total)) as f64 * (encoded as f64 / read.max(1) as f64) / rate.max(1.0);
    format!("tokenizing {name}: {bar} {:>3.0}%  {done}, {} left", 100.0 * share, duration(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well() {
        let shown = [duration(6.6), duration(125.0), duration(11_400.0)];
        assert_eq!(shown.each_ref().map(|s| s.as_str()), ["7s", "2m 05s", "3h 10m"]);
    }

    #[test]
    fn the_bar_shows_share_rate_and_time_left() {
        let progress = Progress { read: 25_000_000, total: 100_000_000, encoded: 50_000_000, tokens: 12_300_000 };
        let shown = preparing(Path::new("a/corpus.jsonl.gz"), progress, 10.0);
        let bar = format!("{}{}", "█".repeat(5), "░".repeat(15));
        let expected = format!("tokenizing corpus.jsonl.gz: {bar}  25%  12.3 million tokens, 5.0 MB/s, 30s left");
        assert_eq!(shown, expected);
        let unknown = Progress { total: 0, ..progress };
        assert_eq!(preparing(Path::new("-"), unknown, 10.0), "tokenizing -: 12.3 million tokens, 5.0 MB/s");
    }
}
