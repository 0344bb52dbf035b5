//! Weights & Biases, through its own Python client, if installed.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use serde_json::json;

use crate::failure::Failure;
use crate::runs::record::RunRecord;
use crate::training::events::{Event, Sink};

/// Reads a run's events, one per line, and logs them.
const CLIENT: &str = include_str!("wandb.py");

/// A run at Weights & Biases: a client process that receives every event.
pub struct Wandb {
    client: Child,
    events: Option<ChildStdin>,
    told: bool,
}

impl Wandb {
    /// Starts a run in `project`; the client's files go to `folder`.
    ///
    /// # Errors
    /// If Python or the client is missing, or the client refuses, for example without a login.
    pub fn begin(project: &str, record: &RunRecord, folder: &Path) -> Result<Self, Failure> {
        let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
        let mut command = Command::new(&python);
        command.args(["-c", CLIENT]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut client = command.spawn().map_err(|error| {
            Failure::new(format!("--wandb: {python}: {error}; its client needs Python: install it, or set PYTHON=PATH"))
        })?;
        let (events, answers, errors) = (client.stdin.take(), client.stdout.take(), client.stderr.take());
        let mut run = Self { client, events, told: false };
        let run_config = json!({
            "project": project, "name": record.recipe.name, "dir": folder.display().to_string(), "config": record,
        });
        let asked = run.send(&run_config.to_string());
        let mut answer = String::new();
        if let Some(answers) = answers {
            // An unreadable answer counts as none.
            let _ = BufReader::new(answers).read_line(&mut answer);
        }
        if asked.is_err() || answer.trim() != "ready" {
            let lines = errors.map(BufReader::new).into_iter().flat_map(|errors| errors.lines().map_while(Result::ok));
            let reason = lines.filter(|line| !line.trim().is_empty()).last().unwrap_or_else(|| "it ended".into());
            return Err(Failure::new(format!("--wandb: the Weights & Biases client did not start: {reason}")));
        }
        // Drain its output, so that a verbose client does not block.
        if let Some(errors) = errors {
            std::thread::spawn(move || BufReader::new(errors).lines().map_while(Result::ok).for_each(drop));
        }
        Ok(run)
    }

    fn send(&mut self, line: &str) -> std::io::Result<()> {
        match &mut self.events {
            Some(events) => writeln!(events, "{line}"),
            None => Err(std::io::ErrorKind::BrokenPipe.into()),
        }
    }
}

impl Sink for Wandb {
    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        if self.send(&event.to_json().to_string()).is_err() && !self.told {
            // Training continues: its own files have everything.
            self.told = true;
            self.events = None;
            eprintln!("the Weights & Biases client ended; the run continues without it");
        }
        Ok(())
    }
}

impl Drop for Wandb {
    fn drop(&mut self) {
        self.events = None;
        // It uploads the rest.
        let _ = self.client.wait();
    }
}
