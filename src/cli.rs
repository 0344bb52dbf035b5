//! The command line: parse, resolve, run; wording and exit codes.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::train::Interrupter;
use clap::{Args, Parser, Subcommand, ValueEnum};
use fireclay::Failure;
use fireclay::backend::{BACKENDS, BackendName};
use fireclay::generation::{GenerationEvent, GenerationOptions, GenerationRun};
use fireclay::training::{Outcome, Precision, Recipe, TrainingRun, View};
use fireclay_datasets::{Tokenizer, TokenizerKind, read_text};
use fireclay_kernels::{Kernels, use_kernels};
use serde_json::json;

/// Exit code of a run that Ctrl-C ended, as shells have it.
const INTERRUPTED: u8 = 130;

#[derive(Parser)]
#[command(name = "fireclay", version, about = "Train and run transformers", arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model: the embedded stories, or your own text
    Train(TrainArgs),
    /// Write text with a trained model
    Generate(GenerateArgs),
    /// Make a tokenizer
    #[command(subcommand)]
    Tokenizer(TokenizerCommand),
    /// List backends: what is built in and what is present
    Devices {
        /// One JSON object a line on stdout
        #[arg(long)]
        json: bool,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Task {
    /// Predict the next token
    Language,
}

#[derive(Args)]
struct TrainArgs {
    /// A recipe's file, or the name of one that is shipped: stories, shakespeare-char-cpu, shakespeare-char-gpu,
    /// gpt2-124m, llama-15m
    recipe: Option<PathBuf>,
    /// What to train for
    #[arg(long, default_value = "language")]
    task: Task,
    /// Text to learn from: a file or a folder of them
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Where the run goes [default: runs/NAME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Steps to take
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Go on with the run in --out, or with the latest in runs/
    #[arg(long, conflicts_with_all = ["recipe", "data"])]
    resume: bool,
    /// Lines rather than the dashboard
    #[arg(long)]
    plain: bool,
    #[command(flatten)]
    run: RunArgs,
    /// Dtype of activations [default: the recipe's]
    #[arg(long)]
    precision: Option<Precision>,
    /// Where all randomness comes from [default: the recipe's]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

#[derive(Args)]
struct GenerateArgs {
    /// The model's folder
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Text to go on from
    #[arg(long, value_name = "TEXT", required_unless_present = "prompts")]
    prompt: Option<String>,
    /// A file with a prompt on each line
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompts: Option<PathBuf>,
    /// Tokens to write at the most
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// 0 takes the likeliest token each time
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    temperature: f64,
    /// Draw among this many likeliest tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Draw among the likeliest tokens that make up this probability
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    #[command(flatten)]
    run: RunArgs,
    /// Dtype of activations
    #[arg(long, default_value = "f32")]
    precision: Precision,
    /// Where the draws come from
    #[arg(long, value_name = "N", default_value_t = 1337)]
    seed: u64,
}

/// What every command that runs a model takes.
#[derive(Args)]
struct RunArgs {
    /// What to run on [default: the fastest that is built in and present]
    #[arg(long)]
    backend: Option<BackendName>,
    /// Change a value of the recipe; kernels=reference runs without fused kernels
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// One JSON object a line on stdout, nothing else there
    #[arg(long)]
    json: bool,
}

impl RunArgs {
    fn backend(&self) -> BackendName {
        self.backend.unwrap_or_else(BackendName::best)
    }

    /// Takes `kernels=fused` or `kernels=reference` out of the settings, and obeys it.
    fn select_kernels(&mut self) -> Result<(), Failure> {
        let (kernels, others) = std::mem::take(&mut self.set)
            .into_iter()
            .partition(|setting| setting.split('=').next().is_some_and(|key| key.trim() == "kernels"));
        self.set = others;
        let kernels: Vec<String> = kernels;
        let Some(setting) = kernels.last() else { return Ok(()) };
        match setting.split_once('=').map(|(_, value)| value.trim()) {
            Some("fused") => use_kernels(Kernels::Fused),
            Some("reference") => use_kernels(Kernels::Reference),
            _ => return Err(Failure::usage(format!("--set {setting}: kernels are fused or reference"))),
        }
        Ok(())
    }
}

#[derive(Subcommand)]
enum TokenizerCommand {
    /// Train a byte-level BPE tokenizer
    Train {
        /// Text to learn from: a file or a folder of them
        #[arg(long, value_name = "PATH")]
        data: PathBuf,
        /// Number of tokens, 257 at least
        #[arg(long, value_name = "N")]
        vocab_size: usize,
        /// The tokenizer.json to write
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
}

pub(crate) fn main() -> ExitCode {
    stop_on_device_panics();
    let result = match Cli::parse().command {
        Command::Train(args) => train(args),
        Command::Generate(args) => generate(args),
        Command::Tokenizer(TokenizerCommand::Train { data, vocab_size, out }) => {
            train_tokenizer(&data, vocab_size, &out)
        }
        Command::Devices { json } => {
            devices(json);
            Ok(ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|failure| {
        eprintln!("fireclay: {failure}");
        ExitCode::from(failure.exit_code())
    })
}

/// CubeCL swallows panics of its device threads and goes on with garbage; here they end the program.
fn stop_on_device_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        if thread.name().is_some_and(|name| name.starts_with("DS")) {
            let reason = panic.payload_as_str().unwrap_or("unknown").split_whitespace().collect::<Vec<_>>().join(" ");
            eprintln!("fireclay: the device failed: {reason}");
            std::process::exit(1);
        }
        default(panic);
    }));
}

fn train(mut args: TrainArgs) -> Result<ExitCode, Failure> {
    let Task::Language = args.task;
    args.run.select_kernels()?;
    let args = &args;
    let change = |recipe: Recipe| apply(recipe, args);
    let backend = args.run.backend();
    backend.devices()?;
    let run = if args.resume {
        let out = match &args.out {
            Some(out) => out.clone(),
            None => latest_run()?,
        };
        TrainingRun::resume(&out, change)?
    } else {
        let recipe = match &args.recipe {
            Some(path) => Recipe::open(path)?,
            None => Recipe::shipped("stories")?,
        };
        let recipe = change(recipe)?;
        let out = args.out.clone().unwrap_or_else(|| free_folder(&recipe.name));
        TrainingRun::begin(recipe, &out)?
    };
    let folder = run.folder();
    let view = match (args.run.json, args.plain || !std::io::stdout().is_terminal()) {
        (true, _) => View::Json,
        (false, true) => View::Plain,
        (false, false) => View::Dashboard,
    };
    let interrupter = Interrupter::new();
    stop_on_ctrl_c(interrupter.clone())?;
    let outcome = backend.run(run.with_view(view).with_interrupter(interrupter))?;
    match outcome {
        Outcome::Done(summary) => {
            if !args.run.json {
                tell(&summary);
                show_sample(&folder, backend)?;
            } else {
                println!("{summary}");
            }
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Interrupted(step) => {
            let folder = folder.display();
            eprintln!("stopped and saved at step {step}; go on with: fireclay train --resume --out {folder}");
            Ok(ExitCode::from(INTERRUPTED))
        }
    }
}

/// The recipe with what the command line says.
fn apply(mut recipe: Recipe, args: &TrainArgs) -> Result<Recipe, Failure> {
    if let Some(data) = &args.data {
        recipe.data.source = data.display().to_string();
        if args.recipe.is_none() {
            recipe = own_text(recipe, data)?;
        }
    }
    if let Some(steps) = args.steps {
        recipe = recipe.with("training.steps", &steps.to_string())?;
    }
    if let Some(seed) = args.seed {
        recipe = recipe.with("training.seed", &seed.to_string())?;
    }
    if let Some(precision) = args.precision {
        recipe.training.precision = precision;
    }
    for setting in &args.run.set {
        let (key, value) =
            setting.split_once('=').ok_or_else(|| Failure::usage(format!("--set {setting}: write it as key=value")))?;
        recipe = recipe.with(key.trim(), value.trim())?;
    }
    Ok(recipe)
}

/// `--data` without a recipe: a small model of the text's characters.
fn own_text(recipe: Recipe, data: &Path) -> Result<Recipe, Failure> {
    let mut own = Recipe::shipped("shakespeare-char-cpu")?;
    own.name = data.file_stem().map_or(recipe.name, |stem| stem.to_string_lossy().into_owned());
    own.data = recipe.data;
    own.data.tokenizer = "char".into();
    Ok(own)
}

/// `runs/NAME`, or `runs/NAME-2` and so on where that is taken.
fn free_folder(name: &str) -> PathBuf {
    let numbered = (2..).map(|number| PathBuf::from(format!("runs/{name}-{number}")));
    let candidates = std::iter::once(PathBuf::from(format!("runs/{name}"))).chain(numbered);
    candidates.into_iter().find(|path| !path.exists()).unwrap_or_else(|| PathBuf::from("runs").join(name))
}

/// The folder in runs/ that was written to last.
fn latest_run() -> Result<PathBuf, Failure> {
    let entries = std::fs::read_dir("runs").into_iter().flatten().flatten();
    let runs = entries.map(|entry| entry.path()).filter(|path| path.join("training").is_dir());
    let newest = runs.max_by_key(|path| std::fs::metadata(path.join("training")).and_then(|meta| meta.modified()).ok());
    newest.ok_or_else(|| Failure::new("there is no run in runs/ to go on with: say which with --out DIR"))
}

/// The first Ctrl-C asks the run to stop and save, the second ends the program.
fn stop_on_ctrl_c(interrupter: Interrupter) -> Result<(), Failure> {
    let handler = move || {
        if interrupter.should_stop() {
            std::process::exit(i32::from(INTERRUPTED));
        }
        eprintln!("stopping after this step; once more to stop without saving");
        interrupter.stop(Some("interrupted"));
    };
    ctrlc::set_handler(handler).map_err(|error| Failure::new(format!("Ctrl-C cannot be handled: {error}")))
}

/// The summary for people.
fn tell(summary: &serde_json::Value) {
    let number = |name: &str| summary[name].as_f64().unwrap_or(f64::NAN);
    let (steps, speed, first) = (number("steps"), number("tokens_per_second"), number("first_step_seconds"));
    let valid = number("valid_loss");
    eprintln!("{steps} steps at {speed:.0} tokens/s, the first after {first:.1}s");
    eprintln!("training loss {:.4}, validation loss {valid:.4} nats a token", number("train_loss"));
    if let Some(entropy) = summary["source_entropy"].as_f64() {
        let above = 100.0 * (valid / entropy - 1.0);
        eprintln!(
            "the grammar's own entropy, which no model can beat, is {entropy:.4}: the model is {above:.1}% above it"
        );
    }
    let (best, out) = (summary["best_step"].as_u64().unwrap_or(0), summary["out"].as_str().unwrap_or(""));
    eprintln!("the model of step {best}, the best on held-out text, is in {out}");
}

/// Lets the new model write a little.
fn show_sample(folder: &Path, backend: BackendName) -> Result<(), Failure> {
    let out = folder.display();
    eprintln!("\nIt writes:\n");
    let tokenizer = Tokenizer::load(&folder.join("tokenizer.json"))?;
    let prompt = if tokenizer.encode("\n").is_ok() { "\n" } else { " " };
    let options = GenerationOptions { temperature: 0.7, stop: vec!["\n\n".into()], ..Default::default() };
    let run = GenerationRun {
        model: folder.to_path_buf(),
        prompts: vec![prompt.to_string()],
        options,
        precision: Precision::F32,
        show: |event: GenerationEvent<'_>| {
            if let GenerationEvent::Text(text) = event {
                print_text(text);
            }
        },
    };
    backend.run(run)?;
    println!();
    eprintln!("\nMore: fireclay generate --model {out} --prompt \"...\"");
    Ok(())
}

/// Text on stdout at once; a reader who has gone away ends the program quietly.
fn print_text(text: &str) {
    let mut stdout = std::io::stdout();
    if stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_err() {
        std::process::exit(0);
    }
}

fn generate(mut args: GenerateArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    if let Some(setting) = args.run.set.first() {
        return Err(Failure::usage(format!("--set {setting}: generate has no recipe to change")));
    }
    let prompts = match (&args.prompts, args.prompt) {
        (Some(file), _) => read_text(file)?.lines().map(str::to_string).filter(|line| !line.is_empty()).collect(),
        (None, prompt) => vec![prompt.unwrap_or_default()],
    };
    let options = GenerationOptions {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        stop: args.stop,
        seed: args.seed,
    };
    options.validate()?;
    let json = args.run.json;
    let show = move |event: GenerationEvent<'_>| match event {
        GenerationEvent::Begun(prompt) if !json => print_text(prompt),
        GenerationEvent::Text(text) if json => print_text(&format!("{}\n", json!({ "event": "text", "text": text }))),
        GenerationEvent::Text(text) => print_text(text),
        GenerationEvent::Done(done) if json => {
            let line = json!({
                "event": "done", "text": done.text, "tokens": done.tokens, "prompt_tokens": done.prompt_tokens,
                "prefill_seconds": done.prefill.as_secs_f64(),
                "decode_tokens_per_second": done.decode_tokens_per_second(),
            });
            print_text(&format!("{line}\n"));
        }
        GenerationEvent::Done(done) => {
            print_text("\n");
            eprintln!(
                "({} tokens after {}; {:.0} tokens/s)",
                done.tokens.len(),
                done.prompt_tokens,
                done.decode_tokens_per_second()
            );
        }
        GenerationEvent::Begun(_) => {}
    };
    let backend = args.run.backend();
    let run = GenerationRun { model: args.model, prompts, options, precision: args.precision, show };
    backend.run(run)?;
    Ok(ExitCode::SUCCESS)
}

fn train_tokenizer(data: &Path, vocab_size: usize, out: &Path) -> Result<ExitCode, Failure> {
    let text = read_text(data)?;
    let tokenizer = Tokenizer::train(TokenizerKind::Bpe(vocab_size), &text)?;
    tokenizer.save(out)?;
    let tokens = tokenizer.encode(&text)?.len();
    let per_token = text.len() as f64 / tokens.max(1) as f64;
    eprintln!("{}: {} tokens, {per_token:.2} bytes of this text each", out.display(), tokenizer.vocab_size());
    Ok(ExitCode::SUCCESS)
}

fn devices(as_json: bool) {
    let best = BackendName::best();
    for backend in BACKENDS {
        let (name, built_in) = (backend.as_str(), backend.is_built_in());
        let (found, missing) = match backend.devices() {
            Ok(found) => (found, None),
            Err(failure) => (Vec::new(), Some(failure.to_string())),
        };
        if as_json {
            let devices: Vec<_> =
                found.iter().map(|device| json!({ "name": device.name, "detail": device.detail })).collect();
            println!(
                "{}",
                json!({
                    "event": "backend", "backend": name, "built_in": built_in, "devices": devices,
                    "missing": missing, "default": backend == best,
                })
            );
            continue;
        }
        match missing {
            Some(missing) => println!("{name:<7} {missing}"),
            None => {
                let default = if backend == best { ", the default" } else { "" };
                let note = if backend.note().is_empty() { String::new() } else { format!(" ({})", backend.note()) };
                println!("{name:<7} built in and present{default}{note}");
                found.iter().for_each(|device| println!("        {}: {}", device.name, device.detail));
            }
        }
    }
}
