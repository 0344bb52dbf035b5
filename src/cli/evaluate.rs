//! `fireclay evaluate`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fireclay::Failure;
use fireclay::inference::evaluation::EvaluationRun;
use fireclay::precision::Precision;
use fireclay::stdout;
use serde_json::json;

use super::arguments::{RunArgs, fetched_source};

#[derive(Args)]
pub(super) struct EvaluateArgs {
    /// Run or model folder, .gguf file, or model on the hub: OWNER/NAME, or OWNER/NAME:QUANT for
    /// one GGUF quantization, such as :Q4_K_M
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Folder of a LoRA adapter to apply
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Evaluation data: text, JSON, CSV, TSV or Parquet, as a file or folder
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// JSON field, or CSV, TSV or Parquet column, that holds the text; A.B for a nested
    /// field
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,
    /// Window length in tokens [default: the model's context, up to 1024]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Distance between the starts of windows, in tokens [default: half a window]
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    #[command(flatten)]
    run: RunArgs,
    /// Format of the weights, and data type of the activations
    #[arg(long, default_value = "auto")]
    precision: Precision,
}

pub(super) fn evaluate(mut args: EvaluateArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    args.run.without_recipe("evaluate")?;
    let run = EvaluationRun {
        model: fetched_source(&args.model, args.adapter.as_deref(), args.run.backend())?,
        data: args.data,
        field: args.field,
        precision: args.precision,
        context: args.context,
        stride: args.stride,
    };
    let evaluation = args.run.backend().run(run)?;
    let speed = evaluation.tokens as f64 / evaluation.elapsed.as_secs_f64().max(1e-9);
    if args.run.json {
        stdout::line(json!({
            "event": "done", "perplexity": evaluation.perplexity(), "loss": evaluation.loss,
            "bits_per_byte": evaluation.bits_per_byte(), "tokens": evaluation.tokens, "bytes": evaluation.bytes,
            "tokens_per_second": speed,
        }));
    } else {
        stdout::line(format!(
            "perplexity {:.4} ({:.4} nats per token), {:.4} bits per byte; {} tokens at {speed:.0}/s",
            evaluation.perplexity(),
            evaluation.loss,
            evaluation.bits_per_byte(),
            evaluation.tokens
        ));
    }
    Ok(ExitCode::SUCCESS)
}
