//! `fireclay predict`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fireclay::Failure;
use fireclay::inference::prediction::{Prediction, PredictionInput, PredictionRun};
use fireclay::precision::Precision;
use fireclay::stdout;
use serde_json::{Value, json};

use super::arguments::{RunArgs, fetched};

#[derive(Args)]
pub(super) struct PredictArgs {
    /// Run or model folder, or name on the hub, OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Utterance, or text to label; without --text or --file, they are read from standard input, one
    /// per line
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,
    /// File with one utterance or text per line
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    #[command(flatten)]
    run: RunArgs,
    /// Format of the weights, and data type of the activations
    #[arg(long, default_value = "auto")]
    precision: Precision,
}

pub(super) fn predict(mut args: PredictArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    args.run.without_recipe("predict")?;
    let inputs = match (args.text, &args.file) {
        (Some(text), _) => PredictionInput::one(text),
        (None, Some(path)) => {
            let name = path.display().to_string();
            let file = std::fs::File::open(path).map_err(|error| Failure::new(format!("{name}: {error}")))?;
            PredictionInput::lines(name, file)
        }
        (None, None) => PredictionInput::lines("standard input", std::io::stdin()),
    };
    let json = args.run.json;
    let show = move |text: &str, prediction: &Prediction| {
        stdout::write(&if json { prediction_line(text, prediction) } else { prediction_text(text, prediction) });
    };
    let backend = args.run.backend();
    let model = fetched(&args.model, backend)?;
    backend.run(PredictionRun { model, inputs, precision: args.precision, show })?;
    Ok(ExitCode::SUCCESS)
}

/// A prediction as JSON.
fn prediction_line(text: &str, prediction: &Prediction) -> String {
    let mut line = json!({ "event": "prediction" });
    if let (Value::Object(line), Value::Object(fields)) = (&mut line, prediction.json(text)) {
        line.extend(fields);
    }
    format!("{line}\n")
}

/// A prediction as text.
fn prediction_text(text: &str, prediction: &Prediction) -> String {
    if let Some(label) = &prediction.label {
        return format!("{text}\n  {label} ({:.1}%)\n", 100.0 * prediction.probability);
    }
    let Some(intent) = &prediction.intent else { return format!("{text}\n  empty utterance\n") };
    let mut shown = format!("{text}\n  {intent} ({:.1}%)\n", 100.0 * prediction.probability);
    let width = prediction.spans.iter().map(|span| span.slot.chars().count()).max().unwrap_or(0);
    for span in &prediction.spans {
        shown.push_str(&format!("  {:<width$}  {} [{}..{}]\n", span.slot, span.text, span.start, span.end));
    }
    shown
}
