//! The command line: parse, resolve, run; wording and exit codes.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use burn::train::Interrupter;
use clap::{Args, Parser, Subcommand, ValueEnum};
use fireclay::Failure;
use fireclay::backend::{BACKENDS, BackendName};
use fireclay::chat::{ChatEvent, ChatRun, Lines};
use fireclay::download::{model_folder, show_fetching};
use fireclay::evaluation::EvaluationRun;
use fireclay::generation::{Generated, GenerationEvent, GenerationOptions, GenerationRun, Interrupt};
use fireclay::precision::Precision;
use fireclay::prediction::{PredictionRun, Texts, Understood};
use fireclay::stdout;
use fireclay::tasks::TaskName;
use fireclay::training::{EMBEDDED, Outcome, Recipe, TrainingRun, View};
use fireclay_datasets::{Tokenizer, TokenizerKind, read_text};
use fireclay_kernels::{Kernels, Penalties, use_kernels};
use serde_json::{Value, json};

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
    /// Talk with a model that has a chat template
    Chat(ChatArgs),
    /// Say how well a language model foretells a text
    Evaluate(EvaluateArgs),
    /// Say what utterances ask for: intent and slots
    Predict(PredictArgs),
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

#[derive(Args)]
struct TrainArgs {
    /// A recipe's file, or the name of one that is shipped: stories, shakespeare-char-cpu, shakespeare-char-gpu,
    /// gpt2-124m, llama-15m, home, intent-slot
    recipe: Option<PathBuf>,
    /// What to train for [default: the recipe's, or language]
    #[arg(long)]
    task: Option<TaskName>,
    /// What to learn from: text, a file or a folder of them; for intent-slot a folder with train, valid and test, each
    /// with seq.in, seq.out and label, or train.jsonl, valid.jsonl and test.jsonl
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// A model to begin from: its folder, or its name on the hub, OWNER/NAME
    #[arg(long, value_name = "MODEL", conflicts_with = "resume")]
    init: Option<PathBuf>,
    /// Where the run goes [default: runs/NAME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Steps to take
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Train this many models, each from the next seed, and report mean and standard deviation
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "resume")]
    seeds: Option<u64>,
    /// Go on with the run in --out, or with the latest in runs/
    #[arg(long, conflicts_with_all = ["recipe", "data", "task"])]
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
    /// The model's folder, or its name on the hub: OWNER/NAME
    #[arg(long, value_name = "MODEL")]
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
    /// Draw among the likeliest tokens that make up this probability
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    #[command(flatten)]
    draw: DrawArgs,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    #[command(flatten)]
    run: RunArgs,
    /// Dtype of matrices and activations
    #[arg(long, default_value = "f32")]
    precision: Precision,
    /// Where the draws come from
    #[arg(long, value_name = "N", default_value_t = 1337)]
    seed: u64,
}

/// How tokens are drawn, beyond temperature and top-p.
#[derive(Args)]
struct DrawArgs {
    /// Draw among this many likeliest tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Draw among tokens at least this likely, as a share of the likeliest one's probability
    #[arg(long, value_name = "P")]
    min_p: Option<f64>,
    /// Divide the positive logits of words that the text has, and multiply the negative ones
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    repetition_penalty: f64,
    /// Take this from the logit of each word written so far
    #[arg(long, value_name = "R", default_value_t = 0.0, allow_hyphen_values = true)]
    presence_penalty: f64,
    /// Take this from the logit of a word for each time it was written so far
    #[arg(long, value_name = "R", default_value_t = 0.0, allow_hyphen_values = true)]
    frequency_penalty: f64,
}

impl DrawArgs {
    fn penalties(&self) -> Penalties {
        Penalties {
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
        }
    }
}

#[derive(Args)]
struct ChatArgs {
    /// The model's folder, or its name on the hub: OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// What the system says first
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens of the conversation at the most [default: the model's context, up to 4096]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Tokens of an answer at the most [default: as many as fit]
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// 0 takes the likeliest token each time
    #[arg(long, value_name = "T", default_value_t = 0.7)]
    temperature: f64,
    /// Draw among the likeliest tokens that make up this probability
    #[arg(long, value_name = "P", default_value_t = 0.9)]
    top_p: f64,
    #[command(flatten)]
    draw: DrawArgs,
    #[command(flatten)]
    run: RunArgs,
    /// Dtype of matrices and activations
    #[arg(long, default_value = "f32")]
    precision: Precision,
    /// Where the draws come from
    #[arg(long, value_name = "N", default_value_t = 1337)]
    seed: u64,
}

#[derive(Args)]
struct EvaluateArgs {
    /// The model's folder, or its name on the hub: OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// The text to foretell: a file or a folder of them
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// Tokens that the model sees together [default: its context, up to 1024]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Tokens from one window to the next [default: half a window]
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    #[command(flatten)]
    run: RunArgs,
    /// Dtype of matrices and activations
    #[arg(long, default_value = "f32")]
    precision: Precision,
}

#[derive(Args)]
struct PredictArgs {
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
        Command::Chat(args) => chat(args),
        Command::Evaluate(args) => evaluate(args),
        Command::Predict(args) => predict(args),
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
    args.run.select_kernels()?;
    let args = &args;
    let backend = args.run.backend();
    backend.devices()?;
    let interrupter = Interrupter::new();
    stop_on_ctrl_c(interrupter.clone())?;
    if args.resume {
        let out = match &args.out {
            Some(out) => out.clone(),
            None => latest_run()?,
        };
        let run = TrainingRun::resume(&out, |recipe| apply(recipe, args))?;
        return train_one(run, args, backend, interrupter);
    }
    let recipe = apply(recipe_of(args)?, args)?;
    let out = args.out.clone().unwrap_or_else(|| free_folder(&recipe.name));
    match args.seeds {
        Some(seeds) => train_seeds(&recipe, seeds, &out, args, backend, interrupter),
        None => train_one(TrainingRun::begin(recipe, &out)?, args, backend, interrupter),
    }
}

/// The recipe asked for, or the one for the task and its data.
fn recipe_of(args: &TrainArgs) -> Result<Recipe, Failure> {
    let Some(path) = &args.recipe else {
        return Recipe::shipped(match (args.task.unwrap_or_default(), &args.data, &args.init) {
            (TaskName::Language, None, None) => "stories",
            (TaskName::Language, ..) => "shakespeare-char-cpu",
            (TaskName::IntentSlot, None, _) => "home",
            (TaskName::IntentSlot, ..) => "intent-slot",
        });
    };
    let recipe = Recipe::open(path)?;
    match args.task {
        Some(task) if task != recipe.task => {
            let (name, wanted) = (&recipe.name, task.to_possible_value());
            let wanted = wanted.as_ref().map_or("", |value| value.get_name());
            Err(Failure::usage(format!("recipe {name} is for another task than {wanted}: leave out --task, or it")))
        }
        _ => Ok(recipe),
    }
}

fn view(args: &TrainArgs) -> View {
    match (args.run.json, args.plain || !std::io::stdout().is_terminal()) {
        (true, _) => View::Json,
        (false, true) => View::Plain,
        (false, false) => View::Dashboard,
    }
}

fn train_one(
    run: TrainingRun,
    args: &TrainArgs,
    backend: BackendName,
    interrupter: Interrupter,
) -> Result<ExitCode, Failure> {
    let (folder, task) = (run.folder(), run.task());
    match backend.run(run.with_view(view(args)).with_interrupter(interrupter))? {
        Outcome::Done(summary) if args.run.json => stdout::line(&summary),
        Outcome::Done(summary) => {
            tell(&summary);
            match task {
                TaskName::Language => show_sample(&folder, backend)?,
                TaskName::IntentSlot => {
                    eprintln!("\nTry it: fireclay predict --model {} --text \"...\"", folder.display());
                }
            }
        }
        Outcome::Interrupted(step) => return Ok(interrupted(&folder, step)),
    }
    Ok(ExitCode::SUCCESS)
}

fn interrupted(folder: &Path, step: u64) -> ExitCode {
    let folder = folder.display();
    match step {
        0 => eprintln!("stopped before the first step: there is nothing to save"),
        _ => eprintln!("stopped and saved at step {step}; go on with: fireclay train --resume --out {folder}"),
    }
    ExitCode::from(INTERRUPTED)
}

/// Trains a model from each of several seeds, one after the other, into folders of their own. A seed that is done
/// already is not trained again, and one that was interrupted goes on.
fn train_seeds(
    recipe: &Recipe,
    seeds: u64,
    out: &Path,
    args: &TrainArgs,
    backend: BackendName,
    interrupter: Interrupter,
) -> Result<ExitCode, Failure> {
    let mut summaries = Vec::new();
    for seed in (recipe.training.seed..).take(seeds as usize) {
        let folder = out.join(format!("seed-{seed}"));
        if let Some(summary) = TrainingRun::done(&folder)? {
            summaries.push(of_seed(summary, seed, args.run.json));
            continue;
        }
        let run = match TrainingRun::is_begun(&folder) {
            true => TrainingRun::resume(&folder, Ok)?,
            false => TrainingRun::begin(recipe.with("training.seed", &seed.to_string())?, &folder)?,
        };
        match backend.run(run.with_view(view(args)).with_interrupter(interrupter.clone()))? {
            Outcome::Done(summary) => summaries.push(of_seed(summary, seed, args.run.json)),
            Outcome::Interrupted(step) => {
                eprintln!("stopped at step {step} of seed {seed}; the same command goes on from there");
                return Ok(ExitCode::from(INTERRUPTED));
            }
        }
    }
    let summary = spread(&summaries, out);
    if args.run.json {
        stdout::line(&summary);
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("\nover {seeds} seeds, mean and standard deviation:");
    for (name, value) in summary.as_object().into_iter().flatten() {
        if let (Some(mean), Some(deviation)) = (value["mean"].as_f64(), value["std"].as_f64()) {
            eprintln!("{:<20} {mean:>10.4} {deviation:>9.4}", name.replace('_', " "));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Tells the summary of one of several runs.
fn of_seed(mut summary: Value, seed: u64, as_json: bool) -> Value {
    summary["event"] = json!("seed");
    summary["seed"] = json!(seed);
    if as_json {
        stdout::line(&summary);
    } else {
        tell(&summary);
    }
    summary
}

/// The `done` line of several runs: each measured number as its mean and (corrected) standard deviation.
fn spread(summaries: &[Value], out: &Path) -> Value {
    let mut spread = json!({ "event": "done", "seeds": summaries.len() });
    let first = summaries.first().and_then(Value::as_object);
    for (name, value) in first.into_iter().flatten() {
        let values: Vec<f64> = summaries.iter().filter_map(|summary| summary[name].as_f64()).collect();
        if name == "steps" {
            spread[name] = value.clone();
        } else if name == "seed" {
            continue;
        } else if !values.is_empty() {
            let count = values.len() as f64;
            let mean = values.iter().sum::<f64>() / count;
            let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
            let deviation = if values.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 };
            spread[name] = json!({ "mean": mean, "std": deviation });
        }
    }
    spread["out"] = json!(out.display().to_string());
    spread
}

/// The recipe with what the command line says.
fn apply(mut recipe: Recipe, args: &TrainArgs) -> Result<Recipe, Failure> {
    if let Some(data) = &args.data {
        // A folder may have the name of an embedded source.
        let shown = data.display().to_string();
        recipe.data.source = if EMBEDDED.contains(&shown.as_str()) { format!("./{shown}") } else { shown };
        if args.recipe.is_none() {
            recipe.name = data.file_stem().map_or(recipe.name, |stem| stem.to_string_lossy().into_owned());
        }
    }
    if let Some(init) = &args.init {
        recipe.init = Some(init.clone());
    }
    if let Some(steps) = args.steps {
        recipe = recipe.with("training.steps", &steps.to_string())?;
    }
    if let Some(seed) = args.seed {
        recipe = recipe.with("training.seed", &seed.to_string())?;
    }
    if let Some(precision) = args.precision {
        if !precision.trains() {
            return Err(Failure::usage(format!("--precision {}: training takes f32 or bf16", precision.name())));
        }
        recipe.training.precision = precision;
    }
    for setting in &args.run.set {
        let (key, value) =
            setting.split_once('=').ok_or_else(|| Failure::usage(format!("--set {setting}: write it as key=value")))?;
        recipe = recipe.with(key.trim(), value.trim())?;
    }
    // A run that goes on has its weights.
    if !args.resume
        && let Some(init) = recipe.begins_with()?
    {
        recipe.init = Some(fetched(init, args.run.backend())?);
    }
    Ok(recipe)
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
fn tell(summary: &Value) {
    let number = |name: &str| summary[name].as_f64().unwrap_or(f64::NAN);
    let (steps, speed, first) = (number("steps"), number("tokens_per_second"), number("first_step_seconds"));
    let valid = number("valid_loss");
    if summary["train_loss"].is_null() {
        eprintln!("{steps} steps, all of them before; validation loss {valid:.4}, in nats");
    } else {
        eprintln!("{steps} steps at {speed:.0} tokens/s, the first after {first:.1}s");
        eprintln!("training loss {:.4}, validation loss {valid:.4}, in nats", number("train_loss"));
    }
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
        interrupt: Interrupt::default(),
        show: |event: GenerationEvent<'_>| {
            if let GenerationEvent::Text(text) = event {
                stdout::write(text);
            }
        },
    };
    backend.run(run)?;
    stdout::line("");
    eprintln!("\nMore: fireclay generate --model {out} --prompt \"...\"");
    Ok(())
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
    let model = fetched(&args.model, backend)?;
    let interrupt = interrupt_on_ctrl_c()?;
    let run = GenerationRun { model, prompts, options, precision: args.precision, interrupt: interrupt.clone(), show };
    backend.run(run)?;
    Ok(if interrupt.load(Ordering::Relaxed) { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// The folder of a model; what is missing of one that is named as on the hub is fetched, shown on a terminal. Only once
/// `backend` is found to be there: a large download is not for nothing.
fn fetched(model: &Path, backend: BackendName) -> Result<PathBuf, Failure> {
    backend.devices()?;
    let mut progress = show_fetching();
    Ok(model_folder(model, &mut progress)?)
}

/// What came of a prompt, for programs.
fn done_line(done: &Generated) -> Value {
    json!({
        "event": "done", "text": done.text, "tokens": done.tokens, "prompt_tokens": done.prompt_tokens,
        "prefill_seconds": done.prefill.as_secs_f64(), "decode_tokens_per_second": done.decode_tokens_per_second(),
    })
}

/// Set by Ctrl-C; a second one in a row ends the program.
fn interrupt_on_ctrl_c() -> Result<Interrupt, Failure> {
    let interrupt = Interrupt::default();
    let set = interrupt.clone();
    let handler = move || {
        if set.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED.into());
        }
    };
    ctrlc::set_handler(handler).map_err(|error| Failure::new(format!("Ctrl-C cannot be handled: {error}")))?;
    Ok(interrupt)
}

fn chat(mut args: ChatArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    if let Some(setting) = args.run.set.first() {
        return Err(Failure::usage(format!("--set {setting}: chat has no recipe to change")));
    }
    let options = GenerationOptions {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        top_k: args.draw.top_k,
        top_p: Some(args.top_p),
        min_p: args.draw.min_p,
        penalties: args.draw.penalties(),
        stop: Vec::new(),
        seed: args.seed,
    };
    options.validate()?;
    let json = args.run.json;
    let name = args.model.display().to_string();
    let typed = std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !json;
    let unanswered = Interrupt::default();
    let failed = unanswered.clone();
    let show = move |event: ChatEvent<'_>| match event {
        ChatEvent::Ready => eprintln!("{name} is there; /help says what else there is"),
        ChatEvent::Text(text) if json => stdout::line(json!({ "event": "text", "text": text })),
        ChatEvent::Text(text) => stdout::write(text),
        ChatEvent::Done(done) if json => stdout::line(done_line(done)),
        ChatEvent::Done(_) => stdout::write("\n"),
        ChatEvent::Failed(failure) => {
            failed.store(true, Ordering::Relaxed);
            if json {
                stdout::line(json!({ "event": "error", "message": failure.to_string() }));
            }
            eprintln!("fireclay: {failure}");
        }
        ChatEvent::Notice(notice) => eprintln!("{notice}"),
    };
    let run = ChatRun {
        model: fetched(&args.model, args.run.backend())?,
        precision: args.precision,
        options,
        system: args.system,
        context: args.context,
        lines: spoken_lines(typed)?,
        interrupt: interrupt_on_ctrl_c()?,
        show,
    };
    args.run.backend().run(run)?;
    // Someone who types saw it; a script did not.
    Ok(if !typed && unanswered.load(Ordering::Relaxed) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What is typed at a prompt with a history, or else the lines of standard input.
fn spoken_lines(typed: bool) -> Result<Lines, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::new(format!("standard input: {error}"));
    if !typed {
        return Ok(Box::new(move || {
            let mut line = String::new();
            let read = std::io::stdin().read_line(&mut line).map_err(|error| failed(&error))?;
            Ok((read > 0).then_some(line))
        }));
    }
    let mut editor = rustyline::DefaultEditor::new().map_err(|error| failed(&error))?;
    let history = dirs::cache_dir().map(|folder| folder.join("fireclay").join("chat-history"));
    if let Some(file) = &history {
        // The first time there is none.
        let _ = file.parent().map(std::fs::create_dir_all);
        let _ = editor.load_history(file);
    }
    Ok(Box::new(move || match editor.readline("> ") {
        Ok(line) => {
            // A history that cannot be kept is no reason to stop.
            let _ = editor.add_history_entry(&line);
            let _ = history.as_ref().map(|file| editor.save_history(file));
            Ok(Some(line))
        }
        Err(rustyline::error::ReadlineError::Interrupted) => Ok(Some(String::new())),
        Err(rustyline::error::ReadlineError::Eof) => Ok(None),
        Err(error) => Err(failed(&error)),
    }))
}

fn evaluate(mut args: EvaluateArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    if let Some(setting) = args.run.set.first() {
        return Err(Failure::usage(format!("--set {setting}: evaluate has no recipe to change")));
    }
    let run = EvaluationRun {
        model: fetched(&args.model, args.run.backend())?,
        data: args.data,
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
            "perplexity {:.4} a token ({:.4} nats), {:.4} bits a byte; {} tokens at {speed:.0}/s",
            evaluation.perplexity(),
            evaluation.loss,
            evaluation.bits_per_byte(),
            evaluation.tokens
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn predict(mut args: PredictArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    if let Some(setting) = args.run.set.first() {
        return Err(Failure::usage(format!("--set {setting}: predict has no recipe to change")));
    }
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
}
