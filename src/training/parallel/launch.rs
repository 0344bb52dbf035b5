//! `--gpus N`: starts this program once per rank, and ends all ranks when one fails.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::environment::WATCHED;
use crate::failure::Failure;

/// After a failure, rank 0 has this long to report it before all ranks are killed.
const GRACE: Duration = Duration::from_secs(4);
/// After the lowest rank here has ended, the others have this long to exit.
const LAST: Duration = Duration::from_secs(10);

/// The ranks that this process started.
pub struct Launch {
    children: Vec<(usize, Child)>,
}

impl Launch {
    /// Starts the ranks `first..first + count` of `all` on this machine, with this process's
    /// command line. Rank 0 keeps the terminal. The stderr of other ranks is printed with a prefix,
    /// `[rank N]`.
    ///
    /// # Errors
    /// If a process cannot be started.
    pub fn begin(count: usize, first: usize, all: usize, at: Option<(String, u16)>) -> Result<Self, Failure> {
        let cannot = |error: std::io::Error| Failure::new(format!("ranks cannot be started: {error}"));
        let program = std::env::current_exe().map_err(cannot)?;
        let (host, port) = match at {
            Some(at) => at,
            None => {
                let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
                ("127.0.0.1".into(), free.map_err(cannot)?.port())
            }
        };
        // On several machines all launchers need the same run token.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let word = if count == all { format!("{}-{since}", std::process::id()) } else { "several machines".into() };
        let mut launch = Self { children: Vec::new() };
        for local in 0..count {
            let rank = first + local;
            let mut command = Command::new(&program);
            command.args(std::env::args_os().skip(1));
            let numbers = [("RANK", rank), ("LOCAL_RANK", local), ("WORLD_SIZE", all), ("MASTER_PORT", port.into())];
            command.envs(numbers.map(|(name, number)| (name, number.to_string())));
            command.env("MASTER_ADDR", &host).env(WATCHED, &word);
            if rank > 0 {
                // The rank notices the end of this process: its standard input closes.
                command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
                // Ctrl-C reaches only rank 0, which stops the others.
                #[cfg(unix)]
                std::os::unix::process::CommandExt::process_group(&mut command, 0);
            }
            let mut child = command.spawn().map_err(|error| {
                launch.end();
                cannot(error)
            })?;
            if let Some(stderr) = child.stderr.take() {
                thread::spawn(move || {
                    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                        eprintln!("[rank {rank}] {line}");
                    }
                });
            }
            launch.children.push((rank, child));
        }
        Ok(launch)
    }

    /// Process id of the lowest rank here, which receives signals.
    pub fn leader(&self) -> u32 {
        self.children.first().map_or(0, |(_, child)| child.id())
    }

    /// Waits for all ranks. Returns the exit code of the lowest rank here.
    ///
    /// # Errors
    /// If a rank failed without reporting it.
    pub fn wait(mut self) -> Result<u8, Failure> {
        let mut ended: Vec<Option<ExitStatus>> = vec![None; self.children.len()];
        let mut since: Option<(Instant, Duration)> = None;
        loop {
            for ((_, child), ended) in self.children.iter_mut().zip(&mut ended) {
                if ended.is_none() {
                    *ended =
                        child.try_wait().map_err(|error| Failure::new(format!("cannot wait for a rank: {error}")))?;
                }
            }
            if ended.iter().all(Option::is_some) {
                break;
            }
            let failed = ended.iter().flatten().any(|status| !status.success());
            if let (None, Some(wait)) = (since, if failed { Some(GRACE) } else { ended[0].map(|_| LAST) }) {
                since = Some((Instant::now(), wait));
            }
            // Rank 0 gets time to report a failure; once it has failed itself, nothing more is
            // reported.
            let lost = ended[0].is_some_and(|status| !status.success());
            if lost || since.is_some_and(|(begun, wait)| begun.elapsed() > wait) {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        self.end();
        let rank = self.children.first().map_or(0, |(rank, _)| *rank);
        match ended[0] {
            Some(status) => match status.code() {
                Some(0) if ended.iter().any(|ended| ended.is_some_and(|status| !status.success())) => {
                    Err(Failure::new("the run is saved, but a rank failed while exiting"))
                }
                Some(code) => Ok(code.try_into().unwrap_or(1)),
                None => Err(Failure::new(format!(
                    "rank {rank} was killed ({status}) and all ranks have ended; resume from the last checkpoint: \
                     fireclay train --resume"
                ))),
            },
            None => Err(Failure::new(format!(
                "rank {rank} hung and all ranks were killed; resume from the last checkpoint: fireclay train --resume"
            ))),
        }
    }

    /// Kills the ranks that still run.
    fn end(&mut self) {
        for (_, child) in &mut self.children {
            // Fails if the rank has already exited.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
