//! `fireclay predict`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fireclay::Failure;
use fireclay::precision::Precision;
use fireclay::prediction::{PredictionRun, Texts, Understood};
use fireclay::stdout;
use serde_json::{Value, json};

use super::arguments::{RunArgs, fetched};

#[derive(Args)]
pub(super) struct PredictArgs {
    /// The model's folder, or its name on the hub: OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// What was said [default: a line each of standard input]
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,
    /// A file with an utterance on each line
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    #[command(flatten)]
    run: RunArgs,
    /// Dtype of matrices and activations
    #[arg(long, default_value = "f32")]
    precision: Precision,
}

pub(super) fn predict(mut args: PredictArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    args.run.without_recipe("predict")?;
    let texts = match (args.text, &args.file) {
        (Some(text), _) => Texts::one(text),
        (None, Some(path)) => {
            let name = path.display().to_string();
            let file = std::fs::File::open(path).map_err(|error| Failure::new(format!("{name}: {error}")))?;
            Texts::lines(name, file)
        }
        (None, None) => Texts::lines("standard input", std::io::stdin()),
    };
    let json = args.run.json;
    let show = move |text: &str, understood: &Understood| {
        stdout::write(&if json { understood_line(text, understood) } else { understood_text(text, understood) });
    };
    let backend = args.run.backend();
    let model = fetched(&args.model, backend)?;
    backend.run(PredictionRun { model, texts, precision: args.precision, show })?;
    Ok(ExitCode::SUCCESS)
}

/// An utterance for programs.
fn understood_line(text: &str, understood: &Understood) -> String {
    let spans: Vec<Value> = understood
        .spans
        .iter()
        .map(|span| json!({ "slot": span.slot, "start": span.start, "end": span.end, "text": span.text }))
        .collect();
    let line = json!({
        "event": "prediction", "text": text, "intent": understood.intent, "probability": understood.probability,
        "spans": spans,
    });
    format!("{line}\n")
}

/// An utterance for people.
fn understood_text(text: &str, understood: &Understood) -> String {
    let Some(intent) = &understood.intent else { return format!("{text}\n  nothing was said\n") };
    let mut shown = format!("{text}\n  {intent} ({:.1}%)\n", 100.0 * understood.probability);
    let width = understood.spans.iter().map(|span| span.slot.chars().count()).max().unwrap_or(0);
    for span in &understood.spans {
        shown.push_str(&format!("  {:<width$}  {} [{}..{}]\n", span.slot, span.text, span.start, span.end));
    }
    shown
}
