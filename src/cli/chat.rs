//! `fireclay chat`.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use clap::Args;
use fireclay::Failure;
use fireclay::inference::chat::{ChatEvent, ChatRun, Lines};
use fireclay::inference::generation::{GenerationOptions, Interrupt};
use fireclay::stdout;
use serde_json::json;

use super::arguments::{DrawArgs, DtypeArgs, RunArgs, done_line, fetched_source};
use super::signals::{end_on_signals, interrupt_on_signals};

#[derive(Args)]
pub(super) struct ChatArgs {
    /// Run or model folder, .gguf file, or model on the hub: OWNER/NAME, or OWNER/NAME:QUANT for
    /// one GGUF quantization, such as :Q4_K_M
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Folder of a LoRA adapter to apply
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Context length in tokens, for conversation and answer together [default: the model's
    /// context, up to 4096]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Maximum number of tokens of an answer [default: what fits in the context]
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.7)]
    temperature: f64,
    /// Top-p sampling: sample from the smallest set of tokens with this total probability
    #[arg(long, value_name = "P", default_value_t = 0.9)]
    top_p: f64,
    #[command(flatten)]
    draw: DrawArgs,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    dtypes: DtypeArgs,
    /// Seed for sampling
    #[arg(long, value_name = "N", default_value_t = 1337)]
    seed: u64,
}

pub(super) fn chat(mut args: ChatArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    args.run.without_recipe("chat")?;
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
        ChatEvent::Ready => eprintln!("Loaded {name}. Type /help for commands."),
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
        model: fetched_source(&args.model, args.adapter.as_deref(), args.run.backend())?,
        precision: args.dtypes.precision,
        cache: args.dtypes.cache_dtype,
        options,
        system: args.system,
        context: args.context,
        lines: spoken_lines(typed)?,
        // Without a terminal, an interrupt ends the program: no further input follows.
        interrupt: if typed { interrupt_on_signals(true)? } else { end_on_signals()? },
        show,
    };
    args.run.backend().run(run)?;
    // A person has seen the interruption; a script gets an exit code.
    Ok(if !typed && unanswered.load(Ordering::Relaxed) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Lines typed at a prompt with history, or lines of standard input.
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
        // On first use, the folder does not exist.
        let _ = file.parent().map(std::fs::create_dir_all);
        let _ = editor.load_history(file);
    }
    Ok(Box::new(move || match editor.readline("> ") {
        Ok(line) => {
            // Failing to save the history is not fatal.
            let _ = editor.add_history_entry(&line);
            let _ = history.as_ref().map(|file| editor.save_history(file));
            Ok(Some(line))
        }
        Err(rustyline::error::ReadlineError::Interrupted) => Ok(Some(String::new())),
        Err(rustyline::error::ReadlineError::Eof) => Ok(None),
        Err(error) => Err(failed(&error)),
    }))
}
