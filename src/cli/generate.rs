//! `fireclay generate`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fireclay::Failure;
use fireclay::inference::generation::{GenerationEvent, GenerationOptions, GenerationRun};
use fireclay::stdout;
use fireclay_datasets::TextSource;
use serde_json::json;

use super::arguments::{DrawArgs, DtypeArgs, RunArgs, done_line, fetched_source};
use super::signals::{exit_code, interrupt_on_signals};

/// A first decode step is mentioned if it takes this long, in seconds.
const LONG_WARM_UP: f64 = 0.5;

#[derive(Args)]
pub(super) struct GenerateArgs {
    /// Run or model folder, .gguf file, or model on the hub: OWNER/NAME, or OWNER/NAME:QUANT for
    /// one GGUF quantization, such as :Q4_K_M
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Folder of a LoRA adapter to apply
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Prompt to continue
    #[arg(long, value_name = "TEXT", required_unless_present = "prompts")]
    prompt: Option<String>,
    /// File of prompts: text, one per line, or JSON, CSV, TSV or Parquet
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompts: Option<PathBuf>,
    /// Field or column of --prompts that holds the prompt [default: text]
    #[arg(long, value_name = "NAME", requires = "prompts")]
    field: Option<String>,
    /// Maximum number of tokens to generate [default: what fits in the context, up to 256]
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    temperature: f64,
    /// Top-p sampling: sample from the smallest set of tokens with this total probability [default:
    /// off]
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    #[command(flatten)]
    draw: DrawArgs,
    /// Stop string: generation ends before it; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    dtypes: DtypeArgs,
    /// Seed for sampling
    #[arg(long, value_name = "N", default_value_t = 1337)]
    seed: u64,
}

pub(super) fn generate(mut args: GenerateArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    args.run.without_recipe("generate")?;
    let prompts = match (&args.prompts, args.prompt) {
        (Some(file), _) => {
            let text = TextSource::open(file, args.field.as_deref().unwrap_or("text"))?.text()?;
            text.lines().map(str::to_string).filter(|line| !line.is_empty()).collect()
        }
        (None, prompt) => vec![prompt.unwrap_or_default()],
    };
    let options = GenerationOptions {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        top_k: args.draw.top_k,
        top_p: args.top_p,
        min_p: args.draw.min_p,
        penalties: args.draw.penalties(),
        stop: args.stop,
        seed: args.seed,
    };
    options.validate()?;
    let json = args.run.json;
    let show = move |event: GenerationEvent<'_>| match event {
        GenerationEvent::Begun(prompt) if !json => stdout::write(prompt),
        GenerationEvent::Text(text) if json => stdout::line(json!({ "event": "text", "text": text })),
        GenerationEvent::Text(text) => stdout::write(text),
        GenerationEvent::Done(done) if json => stdout::line(done_line(done)),
        GenerationEvent::Done(done) => {
            stdout::write("\n");
            let (tokens, prompt, speed) = (done.tokens.len(), done.prompt_tokens, done.decode_tokens_per_second());
            let (warm_up, warm_tokens) = (done.warm_up.0.as_secs_f64(), done.warm_up.1 as f64);
            let warm_up = match warm_up > LONG_WARM_UP && warm_up > 4.0 * warm_tokens / speed {
                true => format!(" after {warm_up:.1} s of compiling and loading kernels"),
                false => String::new(),
            };
            eprintln!("({tokens} tokens after {prompt}; {speed:.0} tokens/s{warm_up})");
        }
        GenerationEvent::Begun(_) => {}
        GenerationEvent::Refused(number, failure) => {
            if json {
                stdout::line(json!({ "event": "error", "prompt": number, "message": failure.to_string() }));
            }
            eprintln!("fireclay: prompt {number}: {failure}");
        }
    };
    let backend = args.run.backend();
    let model = fetched_source(&args.model, args.adapter.as_deref(), backend)?;
    let interrupt = interrupt_on_signals(false)?;
    let DtypeArgs { precision, cache_dtype: cache } = args.dtypes;
    let run = GenerationRun { model, prompts, options, precision, cache, interrupt: interrupt.clone(), show };
    backend.run(run)?;
    Ok(exit_code(&interrupt))
}
