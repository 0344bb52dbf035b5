//! `fireclay export`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use fireclay::Failure;
use fireclay::backend::BackendName;
use fireclay::export::ExportRun;
use fireclay::stdout;
use fireclay_model::GgufKind;
use serde_json::json;

use super::arguments::fetched;

#[derive(Args)]
pub(super) struct ExportArgs {
    /// The model's folder, or its name on the hub: OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Write a GGUF file, its matrices in this format
    #[arg(long, value_name = "FORMAT")]
    gguf: Kind,
    /// The .gguf file to write; one of that name is replaced
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// One JSON object a line on stdout, nothing else there
    #[arg(long)]
    json: bool,
}

/// [`GgufKind`] as it is typed.
#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// 32 bits a weight
    F32,
    /// 16 bits a weight
    F16,
    /// 16 bits a weight, in f32's range
    Bf16,
    /// 8.5 bits a weight
    #[value(name = "q8_0")]
    Q8_0,
    /// 4.5 bits a weight, and 6.6 in the output projection
    #[value(name = "q4_0")]
    Q4_0,
    /// 4.5 bits a weight with finer scales, and 6.6 where it matters most
    #[value(name = "q4_k_m")]
    Q4KM,
}

impl Kind {
    fn gguf(self) -> GgufKind {
        match self {
            Self::F32 => GgufKind::F32,
            Self::F16 => GgufKind::F16,
            Self::Bf16 => GgufKind::Bf16,
            Self::Q8_0 => GgufKind::Q8_0,
            Self::Q4_0 => GgufKind::Q4_0,
            Self::Q4KM => GgufKind::Q4KM,
        }
    }
}

pub(super) fn export(args: ExportArgs) -> Result<ExitCode, Failure> {
    // Nothing is computed on it.
    let backend = if BackendName::Cpu.is_built_in() { BackendName::Cpu } else { BackendName::best() };
    let model = fetched(&args.model, backend)?;
    let written = backend.run(ExportRun { model, kind: args.gguf.gguf(), out: args.out.clone() })?;
    let out = args.out.display();
    for note in &written.notes {
        eprintln!("note: {out}: {note}");
    }
    if args.json {
        stdout::line(json!({
            "event": "done", "out": args.out, "bytes": written.bytes, "bits_a_weight": written.bits_a_weight,
        }));
    } else {
        eprintln!("{out}: {:.1} MB, {:.2} bits a weight", written.bytes as f64 / 1e6, written.bits_a_weight);
    }
    Ok(ExitCode::SUCCESS)
}
