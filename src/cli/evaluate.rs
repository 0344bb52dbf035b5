//! `fireclay evaluate`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fireclay::Failure;
use fireclay::inference::classification::ClassEvaluationRun;
use fireclay::inference::evaluation::EvaluationRun;
use fireclay::model_folder::ModelSource;
use fireclay::precision::Precision;
use fireclay::stdout;
use fireclay_model::ModelFolder;
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
    /// Evaluation data: text, JSON, CSV, TSV or Parquet, as a file or folder. For a classifier,
    /// records with a text and a label field; of a folder with splits, the test split
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// JSON field, or CSV, TSV or Parquet column, that holds the text; A.B for a nested
    /// field [default: text; for a classifier, detected automatically]
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// For a classifier, the field or column that holds the label [default: detected automatically]
    #[arg(long, value_name = "NAME")]
    label_field: Option<String>,
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
    let model = fetched_source(&args.model, args.adapter.as_deref(), args.run.backend())?;
    if ModelFolder::new(model.weights()).config()?.1.classifier.is_some() {
        return evaluate_classifier(args, &model);
    }
    if args.label_field.is_some() {
        return Err(Failure::usage(format!("--label-field is for classifiers: {} is none", args.model.display())));
    }
    let run = EvaluationRun {
        model,
        data: args.data,
        field: args.field.unwrap_or_else(|| "text".into()),
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

/// Evaluates a classifier on labelled examples.
fn evaluate_classifier(args: EvaluateArgs, model: &ModelSource) -> Result<ExitCode, Failure> {
    let without_effect = [
        ("--adapter", args.adapter.is_some()),
        ("--context", args.context.is_some()),
        ("--stride", args.stride.is_some()),
    ];
    if let Some((flag, _)) = without_effect.into_iter().find(|(_, given)| *given) {
        let model = args.model.display();
        return Err(Failure::usage(format!("{flag} is for language models: {model} is a classifier")));
    }
    let evaluation = args.run.backend().run(ClassEvaluationRun {
        model: model.weights().to_path_buf(),
        data: args.data,
        field: args.field.unwrap_or_default(),
        label_field: args.label_field.unwrap_or_default(),
        precision: args.precision,
    })?;
    let report = &evaluation.report;
    let speed = report.examples as f64 / evaluation.elapsed.as_secs_f64().max(1e-9);
    if args.run.json {
        stdout::line(json!({
            "event": "done", "part": report.part, "loss": evaluation.loss, "accuracy": report.scores.accuracy,
            "macro_f1": report.scores.macro_f1, "examples": report.examples, "examples_per_second": speed,
            "labels": report.labels_json(),
        }));
    } else {
        stdout::line(format!("{report}; loss {:.4}; {speed:.0} examples/s", evaluation.loss));
    }
    Ok(ExitCode::SUCCESS)
}
