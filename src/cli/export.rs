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
    /// Run or model folder, or name on the hub, OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Weight format of the GGUF file
    #[arg(long, value_name = "FORMAT")]
    gguf: Kind,
    /// Output file; overwritten if it exists
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Print JSON, one object per line, on stdout; everything else goes to stderr
    #[arg(long)]
    json: bool,
}

/// [`GgufKind`] as it is typed.
#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// 32 bits per weight
    F32,
    /// 16 bits per weight
    F16,
    /// 16 bits per weight, with the range of f32
    Bf16,
    /// 8.5 bits per weight
    #[value(name = "q8_0")]
    Q8_0,
    /// 4.5 bits per weight, 6.6 in the output projection
    #[value(name = "q4_0")]
    Q4_0,
    /// 4.5 bits per weight with finer scales, 6.6 in the most sensitive matrices
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
        eprintln!("{out}: {:.1} MB, {:.2} bits per weight", written.bytes as f64 / 1e6, written.bits_a_weight);
    }
    Ok(ExitCode::SUCCESS)
}
