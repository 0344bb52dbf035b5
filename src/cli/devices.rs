//! `fireclay devices`.

use std::process::ExitCode;

use clap::Args;
use fireclay::backend::{BACKENDS, BackendName};
use fireclay::stdout;
use serde_json::json;

#[derive(Args)]
pub(super) struct DevicesArgs {
    /// Print JSON, one object per line, on stdout; everything else goes to stderr
    #[arg(long)]
    json: bool,
}

pub(super) fn devices(args: &DevicesArgs) -> ExitCode {
    let best = BackendName::best();
    for backend in BACKENDS {
        let (name, built_in) = (backend.as_str(), backend.is_built_in());
        let (found, missing) = match backend.devices() {
            Ok(found) => (found, None),
            Err(failure) => (Vec::new(), Some(failure.to_string())),
        };
        if args.json {
            let devices: Vec<_> =
                found.iter().map(|device| json!({ "name": device.name, "detail": device.detail })).collect();
            stdout::line(json!({
                "event": "backend", "backend": name, "built_in": built_in, "devices": devices, "missing": missing,
                "default": backend == best,
            }));
            continue;
        }
        match missing {
            Some(missing) => stdout::line(format!("{name:<7} {missing}")),
            None => {
                let default = if backend == best { ", the default" } else { "" };
                let note = if backend.note().is_empty() { String::new() } else { format!(" ({})", backend.note()) };
                stdout::line(format!("{name:<7} built in and present{default}{note}"));
                for device in found {
                    stdout::line(format!("        {}: {}", device.name, device.detail));
                }
            }
        }
    }
    ExitCode::SUCCESS
}
