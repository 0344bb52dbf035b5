//! `fireclay train`.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use burn::train::Interrupter;
use clap::Args;
use fireclay::Failure;
use fireclay::backend::BackendName;
use fireclay::download::show_fetching;
use fireclay::inference::generation::{GenerationEvent, GenerationOptions, GenerationRun, Interrupt};
use fireclay::precision::{CachePrecision, Precision};
use fireclay::recipe::TaskName;
use fireclay::recipe::schema::Keep;
use fireclay::recipe::{Recipe, RecipeRequest, shipped_names};
use fireclay::runs::{Comparison, Run, RunRecord};
use fireclay::stdout;
use fireclay::training::parallel::{Launch, Ranks, Start};
use fireclay::training::{Follower, Outcome, TrainingRun, View, leave_terminal};
use fireclay_datasets::Tokenizer;
use serde_json::{Value, json};

use super::arguments::{RunArgs, fetched_source};
use super::signals::{pass_signals_on, signalled, stop_on_signals};

#[derive(Args)]
pub(super) struct TrainArgs {
    #[arg(help = recipe_help())]
    recipe: Option<PathBuf>,
    /// Task to train for [default: the recipe's, or language]
    #[arg(long)]
    task: Option<TaskName>,
    /// Training data: text, JSON, CSV, TSV or Parquet, as a file or folder; a dataset on the hub,
    /// OWNER/NAME; or a folder made by `prepare`. For intent-slot, a folder with train.jsonl,
    /// valid.jsonl and test.jsonl, or with folders train, valid and test that each hold seq.in,
    /// seq.out and label. For classify, records with a text and a label field, as a file or as a
    /// folder with files or folders train, valid and test
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// JSON field, or CSV, TSV or Parquet column, that holds the text; A.B for a nested field
    /// [default: the recipe's, or text; for classify, detected automatically]
    #[arg(long, value_name = "NAME", conflicts_with = "resume")]
    field: Option<String>,
    /// Initialize from this model: folder, .gguf file, or name on the hub, OWNER/NAME
    #[arg(long, value_name = "MODEL", conflicts_with = "resume")]
    init: Option<PathBuf>,
    /// Output folder [default: runs/NAME, named after the data or the recipe]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Total number of optimizer steps, those before --resume included [default: the recipe's]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Train N models, with seeds from --seed on, and report mean and standard deviation
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "resume")]
    seeds: Option<u64>,
    /// Train one model per value of a setting, and compare them; repeat it to train every
    /// combination
    #[arg(long, value_name = "KEY=A,B,..", conflicts_with_all = ["resume", "seeds"])]
    sweep: Vec<String>,
    /// Resume the run in --out, or the latest in runs/
    #[arg(long, conflicts_with_all = ["recipe", "data", "task"])]
    resume: bool,
    /// Resume even if the data or the tokenizer changed since the run began
    #[arg(long)]
    allow_changed_data: bool,
    /// Print plain lines instead of the dashboard
    #[arg(long)]
    plain: bool,
    /// Log to this Weights & Biases project, through its Python package, wandb
    #[arg(long, value_name = "PROJECT")]
    wandb: Option<String>,
    /// Data-parallel training on N GPUs of this machine, one process per GPU (with --backend cpu, N
    /// processes). batch_size is that of all together. For several machines see docs/distributed.md
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), visible_alias = "ranks")]
    gpus: Option<u16>,
    #[command(flatten)]
    run: RunArgs,
    /// Data type of activations [default: the recipe's]
    #[arg(long)]
    precision: Option<Precision>,
    /// Random seed [default: the recipe's]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

pub(super) fn train(mut args: TrainArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    let args = &args;
    let backend = args.run.backend();
    let devices = backend.devices()?.len();
    let place = match Start::of(args.gpus.map(usize::from))? {
        Start::Alone => None,
        start => {
            takes_ranks(args, backend, devices, &start)?;
            match start {
                Start::Launch { count, first, all, at } => return launch(Launch::begin(count, first, all, at)?),
                Start::Rank(place) => Some(place),
                Start::Alone => None,
            }
        }
    };
    let interrupter = Interrupter::new();
    let Some(place) = place else {
        stop_on_signals(interrupter.clone(), Duration::ZERO)?;
        return train_here(args, backend, interrupter, Ranks::only());
    };
    if place.rank.rank == 0 {
        stop_on_signals(interrupter.clone(), Duration::from_secs(1))?;
    }
    let stop = interrupter.clone();
    let ranks = Ranks::join(&place, before_exit, move || stop.stop(Some("another rank asks for it")))?;
    if place.rank.rank > 0 {
        let asks = ranks.clone();
        pass_signals_on(move |_| asks.ask_to_stop())?;
        backend.run_as(place.rank, place.local, Follower::new(ranks))?;
        return Ok(ExitCode::SUCCESS);
    }
    let trained = train_here(args, backend, interrupter, ranks.clone());
    if let Err(failure) = &trained {
        // A failure before the other ranks have started.
        ranks.failed(failure);
    }
    trained
}

fn before_exit() {
    leave_terminal();
}

/// Refuses settings that do not work with several ranks.
fn takes_ranks(args: &TrainArgs, backend: BackendName, devices: usize, start: &Start) -> Result<(), Failure> {
    if matches!(backend, BackendName::Wgpu | BackendName::Vulkan) {
        let name = backend.as_str();
        return Err(Failure::usage(format!(
            "several ranks: --backend {name} trains on one GPU; cuda and cpu take several"
        )));
    }
    if args.seeds.is_some() || !args.sweep.is_empty() {
        return Err(Failure::usage("--seeds and --sweep do not work with several ranks"));
    }
    match start {
        Start::Launch { count, .. } if backend == BackendName::Cuda && *count > devices => {
            Err(Failure::usage(format!("--gpus {count}: this machine has {devices}")))
        }
        _ => Ok(()),
    }
}

/// Waits for the ranks that this process has started.
fn launch(launch: Launch) -> Result<ExitCode, Failure> {
    #[cfg(unix)]
    {
        let leader = rustix::process::Pid::from_raw(launch.leader() as i32);
        pass_signals_on(move |signal| {
            let signal = rustix::process::Signal::from_named_raw(signal);
            if let (Some(leader), Some(signal)) = (leader, signal) {
                // The process may have exited.
                let _ = rustix::process::kill_process(leader, signal);
            }
        })?;
    }
    Ok(ExitCode::from(launch.wait()?))
}

/// Trains in this process, as the only rank or as rank 0.
fn train_here(
    args: &TrainArgs,
    backend: BackendName,
    interrupter: Interrupter,
    ranks: Ranks,
) -> Result<ExitCode, Failure> {
    if args.resume {
        let out = match &args.out {
            Some(out) => out.clone(),
            None => latest_run()?,
        };
        let run = TrainingRun::resume(&out, args.allow_changed_data, |recipe| {
            request(args).change(recipe)?.fetched(true, &mut show_fetching())
        })?;
        return train_one(run.with_ranks(ranks), args, backend, interrupter);
    }
    let recipe = request(args).recipe()?.fetched(false, &mut show_fetching())?;
    let out = args.out.clone().unwrap_or_else(|| TrainingRun::free_folder(&recipe.name));
    if !args.sweep.is_empty() {
        return train_sweep(&recipe, &out, args, backend, interrupter);
    }
    match args.seeds {
        Some(seeds) => train_seeds(&recipe, seeds, &out, args, backend, interrupter),
        None => train_one(TrainingRun::begin(recipe, &out)?.with_ranks(ranks), args, backend, interrupter),
    }
}

fn view(args: &TrainArgs) -> View {
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term.is_empty() || term == "dumb");
    match (args.run.json, args.plain || is_dumb || !std::io::stdout().is_terminal()) {
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
    let (rank, local) = run.place();
    match backend.run_as(rank, local, shown(run, args, backend).with_interrupter(interrupter))? {
        Outcome::Done(summary) if args.run.json => stdout::line(&summary),
        Outcome::Done(summary) => {
            tell(&summary, &folder);
            match task.writes_text() {
                _ if matches!(task, TaskName::Chat | TaskName::Preference) => {
                    eprintln!("\nTry it: fireclay chat --model {}", folder.display())
                }
                _ if task == TaskName::Masked => {}
                true => show_sample(&folder, backend)?,
                false => eprintln!("\nTry it: fireclay predict --model {} --text \"...\"", folder.display()),
            }
        }
        Outcome::Interrupted(step) => return Ok(interrupted(&folder, step)),
    }
    Ok(ExitCode::SUCCESS)
}

fn interrupted(folder: &Path, step: u64) -> ExitCode {
    let folder = folder.display();
    match step {
        0 => eprintln!("stopped before the first step: nothing to save"),
        _ => eprintln!("stopped and saved at step {step}; resume with: fireclay train --resume --out {folder}"),
    }
    signalled()
}

/// Refuses a folder that holds a run with other settings than those of `recipe`.
fn check_settings(folder: &Path, recipe: &Recipe) -> Result<(), Failure> {
    if !TrainingRun::is_begun(folder) && TrainingRun::done(folder)?.is_none() {
        return Ok(());
    }
    let differences = RunRecord::find(folder)?.map_or_else(Vec::new, |record| record.differences(recipe));
    if differences.is_empty() {
        return Ok(());
    }
    let own = |(name, value): &(String, Option<Value>)| match value {
        None => format!("no {name}"),
        Some(Value::String(text)) => format!("{name}={text}"),
        Some(value) => format!("{name}={value}"),
    };
    let (shown, own) = (folder.display(), differences.iter().map(own).collect::<Vec<_>>().join(", "));
    Err(Failure::new(format!(
        "{shown} already holds a run, with other settings ({own}): repeat these, or choose another --out"
    )))
}

/// Trains a model per seed, one after the other, each into its own folder. Skips seeds that are
/// done and resumes one that was interrupted.
fn train_seeds(
    recipe: &Recipe,
    seeds: u64,
    out: &Path,
    args: &TrainArgs,
    backend: BackendName,
    interrupter: Interrupter,
) -> Result<ExitCode, Failure> {
    // All folders are checked before the first model is trained.
    let runs = (recipe.training.seed..).take(seeds as usize).map(|seed| {
        let (folder, recipe) = (out.join(format!("seed-{seed}")), recipe.with("training.seed", &seed.to_string())?);
        check_settings(&folder, &recipe)?;
        Ok::<_, Failure>((seed, folder, recipe))
    });
    let runs = runs.collect::<Result<Vec<_>, _>>()?;
    let mut summaries = Vec::new();
    for (seed, folder, recipe) in runs {
        if let Some(summary) = TrainingRun::done(&folder)? {
            summaries.push(of_seed(summary, seed, &folder, args.run.json));
            continue;
        }
        let run = match TrainingRun::is_begun(&folder) {
            true => TrainingRun::resume(&folder, args.allow_changed_data, Ok)?,
            false => TrainingRun::begin(recipe, &folder)?,
        };
        match backend.run(shown(run, args, backend).with_interrupter(interrupter.clone()))? {
            Outcome::Done(summary) => summaries.push(of_seed(summary, seed, &folder, args.run.json)),
            Outcome::Interrupted(step) => {
                eprintln!("stopped at step {step} of seed {seed}; run the same command again to continue");
                return Ok(signalled());
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

/// Trains a model per combination of the settings' values, one after the other, each into its own
/// folder. Skips combinations that are done and resumes one that was interrupted.
fn train_sweep(
    recipe: &Recipe,
    out: &Path,
    args: &TrainArgs,
    backend: BackendName,
    interrupter: Interrupter,
) -> Result<ExitCode, Failure> {
    let mut combinations: Vec<Vec<(&str, &str)>> = vec![Vec::new()];
    for sweep in &args.sweep {
        let Some((key, values)) = sweep.split_once('=') else {
            return Err(Failure::usage(format!("--sweep {sweep}: write it as key=a,b,c")));
        };
        combinations = combinations
            .iter()
            .flat_map(|before| {
                values.split(',').map(move |value| [before.as_slice(), &[(key.trim(), value.trim())]].concat())
            })
            .collect();
    }
    // All recipes and folders are checked before the first is trained.
    let planned = combinations.iter().map(|settings| {
        let recipe = recipe.with_all(settings.iter().copied())?;
        let name: Vec<String> = settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let folder = out.join(name.join(",").replace(['/', '\\'], "-"));
        check_settings(&folder, &recipe)?;
        Ok::<_, Failure>((name, folder, recipe))
    });
    let planned = planned.collect::<Result<Vec<_>, _>>()?;
    let mut folders = Vec::new();
    for (name, folder, recipe) in planned {
        folders.push(folder.clone());
        if TrainingRun::done(&folder)?.is_some() {
            continue;
        }
        let run = match TrainingRun::is_begun(&folder) {
            true => TrainingRun::resume(&folder, args.allow_changed_data, Ok)?,
            false => TrainingRun::begin(recipe, &folder)?,
        };
        match backend.run(shown(run, args, backend).with_interrupter(interrupter.clone()))? {
            Outcome::Done(mut summary) if args.run.json => {
                summary["event"] = json!("run");
                stdout::line(&summary);
            }
            Outcome::Done(summary) => tell(&summary, &folder),
            Outcome::Interrupted(step) => {
                eprintln!("stopped at step {step} of {}; run the same command again to continue", name.join(", "));
                return Ok(signalled());
            }
        }
    }
    let runs = folders.iter().map(|folder| Run::read(folder)).collect::<Result<Vec<_>, _>>()?;
    let comparison = Comparison::new(runs);
    comparison.picture()?.save(&out.join("compare.svg"))?;
    comparison.write_page(&out.join("compare.html"))?;
    let loss = |run: &&Run| run.best().map_or(f64::INFINITY, |best| best.1);
    let best = comparison.runs().iter().min_by(|a, b| loss(a).total_cmp(&loss(b)));
    let best = best.map_or_else(String::new, |run| run.folder.display().to_string());
    if args.run.json {
        let runs = comparison.to_json();
        stdout::line(json!({ "event": "done", "runs": runs, "best": best, "out": out.display().to_string() }));
    } else {
        stdout::line(format!("\n{}", comparison.table()));
        eprintln!("\nthe best run is {best}; all curves are in {}", out.join("compare.html").display());
    }
    Ok(ExitCode::SUCCESS)
}

/// A run with the displays and records of the command line.
fn shown(run: TrainingRun, args: &TrainArgs, backend: BackendName) -> TrainingRun {
    let device = backend.devices().ok().and_then(|devices| devices.into_iter().next());
    let memory = device.as_ref().and_then(|device| device.memory);
    let device = device.map_or_else(|| backend.as_str().to_string(), |device| device.name);
    run.with_view(view(args))
        .with_memory(memory)
        .with_record(device, std::env::args().collect())
        .with_wandb(args.wandb.clone())
}

/// Prints the summary of one of several runs.
fn of_seed(mut summary: Value, seed: u64, folder: &Path, as_json: bool) -> Value {
    summary["event"] = json!("seed");
    summary["seed"] = json!(seed);
    if as_json {
        stdout::line(&summary);
    } else {
        tell(&summary, folder);
    }
    summary
}

/// The `done` line of several runs: each measured number as its mean and (corrected) standard
/// deviation.
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

/// The recipe request of the command line.
fn request(args: &TrainArgs) -> RecipeRequest {
    let steps = args.steps.map(|steps| format!("training.steps={steps}"));
    let seed = args.seed.map(|seed| format!("training.seed={seed}"));
    RecipeRequest {
        recipe: args.recipe.clone(),
        task: args.task,
        data: args.data.clone(),
        field: args.field.clone(),
        init: args.init.clone(),
        precision: args.precision,
        settings: steps.into_iter().chain(seed).chain(args.run.set.iter().cloned()).collect(),
    }
}

/// Help of the recipe.
fn recipe_help() -> String {
    let names: Vec<&str> = shipped_names().collect();
    format!(
        "Recipe file, or a built-in recipe [default: the one for --task and --data, stories for neither]: {}",
        names.join(", ")
    )
}

/// The most recently written folder in runs/.
fn latest_run() -> Result<PathBuf, Failure> {
    let entries = std::fs::read_dir("runs").into_iter().flatten().flatten();
    let runs = entries.map(|entry| entry.path()).filter(|path| path.join("training").is_dir());
    let newest = runs.max_by_key(|path| std::fs::metadata(path.join("training")).and_then(|meta| meta.modified()).ok());
    newest.ok_or_else(|| Failure::new("no run in runs/ to resume: name one with --out DIR"))
}

/// Prints the summary of the run in `folder` as text.
fn tell(summary: &Value, folder: &Path) {
    let number = |name: &str| summary[name].as_f64().unwrap_or(f64::NAN);
    let (steps, speed, first) = (number("steps"), number("tokens_per_second"), number("first_step_seconds"));
    let valid = number("valid_loss");
    if summary["train_loss"].is_null() {
        eprintln!("{steps} steps, all in earlier runs; validation loss {valid:.4}, in nats");
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
    let is_scored = ["intent_accuracy", "accuracy"].iter().any(|name| !summary[*name].is_null());
    let why = if is_scored { "best validation scores" } else { "lowest validation loss" };
    match RunRecord::find(folder) {
        Ok(Some(record)) if record.recipe.training.keep == Keep::Last => {
            eprintln!("the last model, of step {best}, is in {out}");
        }
        _ => eprintln!("the model of step {best}, with the {why}, is in {out}"),
    }
}

/// Generates a short sample from the new model.
fn show_sample(folder: &Path, backend: BackendName) -> Result<(), Failure> {
    let out = folder.display();
    eprintln!("\nSample:\n");
    let tokenizer = Tokenizer::load(&folder.join("tokenizer.json"))?;
    let prompt = if tokenizer.encode("\n").is_ok() { "\n" } else { " " };
    let options = GenerationOptions { temperature: 0.7, stop: vec!["\n\n".into()], ..Default::default() };
    let run = GenerationRun {
        model: fetched_source(folder, None, backend)?,
        prompts: vec![prompt.to_string()],
        options,
        precision: Precision::F32,
        cache: CachePrecision::Auto,
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
