//! The command line, one file per command. A command parses its arguments, resolves them and runs.
//! Also messages and exit codes.

mod arguments;
mod bench;
mod chat;
mod compare;
mod devices;
mod evaluate;
mod export;
mod generate;
mod merge;
mod predict;
mod prepare;
mod profile;
mod runs;
#[cfg(feature = "serve")]
mod serve;
mod signals;
mod tokenizer;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "fireclay", version, about = "Train and run transformers", arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model on the built-in stories or on your data
    Train(train::TrainArgs),
    /// Tokenize a corpus once, into files that training reads in place
    Prepare(prepare::PrepareArgs),
    /// List the runs in runs/
    Runs(runs::RunsArgs),
    /// Compare runs: a table, an SVG plot and an HTML page
    Compare(compare::CompareArgs),
    /// Generate text
    Generate(generate::GenerateArgs),
    /// Chat with a model that has a chat template
    Chat(chat::ChatArgs),
    /// Serve an OpenAI-compatible API over HTTP, with a chat page
    #[cfg(feature = "serve")]
    Serve(serve::ServeArgs),
    /// Measure a model's perplexity and bits per byte, or a classifier's accuracy and F1
    Evaluate(evaluate::EvaluateArgs),
    /// Export a model to a GGUF file, which llama.cpp and others load
    Export(export::ExportArgs),
    /// Predict the intent and slots of utterances, or the label that a classifier gives
    Predict(predict::PredictArgs),
    /// Merge a LoRA adapter into its base model
    Merge(merge::MergeArgs),
    /// Profile a few steps, after warm-up, of training, generation or prediction
    #[command(subcommand)]
    Profile(profile::ProfileCommand),
    /// Benchmark: repeated runs, compared with the hardware's limits, an earlier run or another
    /// program
    Bench(bench::BenchArgs),
    /// Train a tokenizer
    #[command(subcommand)]
    Tokenizer(tokenizer::TokenizerCommand),
    /// List backends: which are built in, which have a device here, and which is the default
    Devices(devices::DevicesArgs),
}

pub(crate) fn main() -> ExitCode {
    stop_on_device_panics();
    let result = match Cli::parse().command {
        Command::Train(args) => train::train(args),
        Command::Prepare(args) => prepare::prepare(args),
        Command::Runs(args) => runs::runs(&args),
        Command::Compare(args) => compare::compare(&args),
        Command::Generate(args) => generate::generate(args),
        Command::Chat(args) => chat::chat(args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::serve(args),
        Command::Evaluate(args) => evaluate::evaluate(args),
        Command::Export(args) => export::export(args),
        Command::Predict(args) => predict::predict(args),
        Command::Merge(args) => merge::merge(args),
        Command::Profile(command) => profile::profile(command),
        Command::Bench(args) => bench::bench(args),
        Command::Tokenizer(command) => tokenizer::tokenizer(command),
        Command::Devices(args) => Ok(devices::devices(&args)),
    };
    result.unwrap_or_else(|failure| {
        let text = failure.to_string();
        eprintln!("fireclay: {}", fireclay::training::out_of_memory(&text).unwrap_or(text));
        ExitCode::from(failure.exit_code())
    })
}

/// CubeCL ignores panics of its device threads and continues with invalid results. Here such a
/// panic ends the program.
fn stop_on_device_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        fireclay::training::leave_terminal();
        let thread = std::thread::current();
        if thread.name().is_some_and(|name| name.starts_with("DS")) {
            let reason = panic.payload_as_str().unwrap_or("unknown").split_whitespace().collect::<Vec<_>>().join(" ");
            let told = fireclay::training::out_of_memory(&reason);
            eprintln!("fireclay: {}", told.unwrap_or_else(|| format!("the device failed: {reason}")));
            std::process::exit(1);
        }
        default(panic);
    }));
}

#[cfg(all(test, feature = "serve"))]
mod tests {
    use std::path::Path;

    use super::*;

    /// The words of a line of shell, without its comment.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None::<char>);
        for letter in line.chars() {
            match (quote, letter) {
                (Some(open), _) if letter == open => quote = None,
                (Some(_), _) => word.get_or_insert_default().push(letter),
                (None, '\'' | '"') => {
                    word.get_or_insert_default();
                    quote = Some(letter);
                }
                (None, ' ') => words.extend(word.take()),
                (None, '#') if word.is_none() => break,
                (None, _) => word.get_or_insert_default().push(letter),
            }
        }
        words.extend(word);
        words
    }

    #[test]
    fn every_command_in_the_documents_parses() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let docs = std::fs::read_dir(root.join("docs")).expect("a folder").map(|entry| entry.expect("readable").path());
        let files = docs.chain([root.join("README.md")]);
        let mut commands = 0;
        for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "md")) {
            let text = std::fs::read_to_string(&file).expect("readable").replace("\\\n", " ");
            let blocks = text.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
            for line in blocks.flat_map(str::lines) {
                let words = words(line);
                let Some(from) = words.iter().position(|word| word == "fireclay") else { continue };
                let command = words[from..].iter().take_while(|word| !matches!(word.as_str(), "|" | ">" | "<"));
                if let Err(error) = Cli::try_parse_from(command) {
                    panic!("{}: {line}\n{error}", file.display());
                }
                commands += 1;
            }
        }
        assert!(commands > 50, "only {commands} commands were found");
    }
}
