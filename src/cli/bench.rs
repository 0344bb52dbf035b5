//! `fireclay bench`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use fireclay::Failure;
use fireclay::backend::{BackendName, OnBackend, RunContext};
use fireclay::bench::{
    BenchOptions, DecodeBench, Earlier, KernelBench, Measurement, RequestsBench, TrainBench, compare, peer_ratios,
    read_lines, run_peer, shown,
};
use fireclay::precision::{CachePrecision, Precision};
use fireclay::stdout;
use serde_json::{Value, json};

use super::arguments::{RunArgs, chosen};

/// The benchmarks.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Benchmark {
    /// Training throughput, in tokens per second
    Train,
    /// Decode and prefill throughput, in tokens per second
    Decode,
    /// Throughput with continuous batching of many concurrent requests, in tokens per second
    Requests,
    /// Every operation, forward and backward, compared with the hardware's limits
    Kernels,
    /// Training and decoding on the CPU
    Cpu,
}

#[derive(Args)]
pub(super) struct BenchArgs {
    /// What to measure
    benchmark: Benchmark,
    #[arg(long, value_name = "NAME", help = size_help())]
    size: Vec<String>,
    /// Batch size [default: that of the named size]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65_536))]
    batch: Option<u64>,
    /// Sequence length, or prompt length for prefill [default: that of the named size]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    length: Option<u64>,
    /// decode: number of tokens in the KV cache when timing ends [default: 150]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(150..=1_048_576))]
    position: Option<u64>,
    /// Data type [default: that of the named size]
    #[arg(long)]
    precision: Option<Precision>,
    /// decode and requests: data type of the KV cache
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    cache_dtype: CachePrecision,
    /// Number of measurements per case
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    repeats: u64,
    /// Peak matrix-multiplication throughput of the device [default: the datasheet's]
    #[arg(long, value_name = "TFLOPS")]
    peak: Option<f64>,
    /// Compare with an earlier run: a file with the output of --json
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Run this command between two Fireclay runs and compare; it must print JSON lines with
    /// "what", "case", "value" and "unit"
    #[arg(long, value_name = "COMMAND")]
    peer: Option<String>,
    /// Print a Markdown table, preceded by the command
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    #[command(flatten)]
    run: RunArgs,
}

/// Help of `--size`.
fn size_help() -> String {
    let [train, decode] = [fireclay::bench::TRAINERS.join(", "), fireclay::bench::DECODERS.join(", ")];
    format!("Named model and batch; may be repeated. train: {train}. decode: {decode}")
}

/// Output formats of measurements.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Text,
    Json,
    Markdown,
}

pub(super) fn bench(mut args: BenchArgs) -> Result<ExitCode, Failure> {
    args.run.select_kernels()?;
    if let (Some(setting), true) = (args.run.set.first(), args.benchmark != Benchmark::Train) {
        return Err(Failure::usage(format!("--set {setting}: settings are for bench train")));
    }
    if let Some(peak) = args.peak.filter(|peak| !(peak.is_finite() && *peak > 0.0)) {
        return Err(Failure::usage(format!("--peak {peak} must be above 0")));
    }
    let decodes = matches!(args.benchmark, Benchmark::Decode | Benchmark::Requests);
    if args.cache_dtype != CachePrecision::Auto && !decodes {
        return Err(Failure::usage("--cache-dtype is for bench decode and bench requests only"));
    }
    if args.position.is_some() && args.benchmark != Benchmark::Decode {
        return Err(Failure::usage("--position is for bench decode"));
    }
    let earlier = args.compare.as_deref().map(read_lines).transpose()?.unwrap_or_default();
    let backend = match (args.benchmark, args.run.backend) {
        (Benchmark::Cpu, None | Some(BackendName::Cpu)) => chosen(Some(BackendName::Cpu)),
        (Benchmark::Cpu, Some(_)) => return Err(Failure::usage("bench cpu runs on the CPU: leave out --backend")),
        _ => args.run.backend(),
    };
    let devices = backend.devices()?;
    let device = devices.first().map_or_else(|| backend.as_str().to_string(), |device| device.name.clone());
    let options = BenchOptions {
        sizes: args.size.clone(),
        batch: args.batch.map(|batch| batch as usize),
        length: args.length.map(|length| length as usize),
        position: args.position.map(|position| position as usize),
        precision: args.precision,
        cache: args.cache_dtype,
        repeats: args.repeats as usize,
        device,
        peak: args.peak,
        settings: args.run.set.clone(),
    };
    let format = match (args.run.json, args.markdown) {
        (true, _) => Format::Json,
        (_, true) => Format::Markdown,
        _ => Format::Text,
    };
    if format == Format::Markdown {
        let words = std::env::args().skip(1).filter(|word| word != "--markdown");
        let quoted = words.map(|word| if word.contains(' ') { format!("'{word}'") } else { word });
        let command = quoted.collect::<Vec<String>>().join(" ");
        stdout::line(format!("`fireclay {command}`, on {}:\n", options.device));
        stdout::line(
            "| what | case | median | least to most | of what the hardware allows | peer; ratio |\n\
             |---|---|---|---|---|---|",
        );
    }
    let Some(peer) = &args.peer else {
        measure(args.benchmark, backend, &options, &mut |measured| {
            tell(&measured, &earlier, &[], format);
            Ok(())
        })?;
        return Ok(ExitCode::SUCCESS);
    };
    // Ours, theirs, ours: drift of the machine shows in the spread.
    let mut first = Vec::new();
    let half = BenchOptions { repeats: options.repeats.div_ceil(2), ..options };
    let mut keep = |measured: Measurement| {
        first.push(measured);
        Ok(())
    };
    measure(args.benchmark, backend, &half, &mut keep)?;
    let theirs = run_peer(peer)?;
    let mut first = first.into_iter();
    measure(args.benchmark, backend, &half, &mut |measured| {
        let both = match first.next() {
            Some(first) => first.joined(measured),
            None => measured,
        };
        tell(&both, &earlier, &theirs, format);
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Called with each measurement.
type Show<'a> = &'a mut (dyn FnMut(Measurement) -> Result<(), Failure> + Send);

fn measure(benchmark: Benchmark, backend: BackendName, options: &BenchOptions, show: Show<'_>) -> Result<(), Failure> {
    let options = options.clone();
    match benchmark {
        Benchmark::Train => backend.run(TrainBench { options, show }),
        Benchmark::Decode => backend.run(DecodeBench { options, show }),
        Benchmark::Requests => backend.run(RequestsBench { options, show }),
        Benchmark::Kernels => backend.run(KernelBench { options, show }),
        Benchmark::Cpu => backend.run(Both { options, show }),
    }
}

/// Training, then decoding.
struct Both<'a> {
    options: BenchOptions,
    show: Show<'a>,
}

impl OnBackend for Both<'_> {
    type Output = ();

    fn run<B: fireclay_kernels::Backend>(self, context: RunContext<B>) -> Result<(), Failure> {
        let Self { options, show } = self;
        let (training, decoding): (Vec<String>, Vec<String>) =
            options.sizes.iter().cloned().partition(|name| fireclay::bench::TRAINERS.contains(&name.as_str()));
        let (all, none) = (options.sizes.is_empty(), Vec::is_empty);
        if all || !none(&training) {
            let options = BenchOptions { sizes: training, ..options.clone() };
            TrainBench { options, show: &mut *show }.run::<B>(context.clone())?;
        }
        if all || !none(&decoding) {
            DecodeBench { options: BenchOptions { sizes: decoding, ..options }, show }.run::<B>(context)?;
        }
        Ok(())
    }
}

fn tell(measured: &Measurement, earlier: &[Earlier], theirs: &[Earlier], format: Format) {
    let comparison = compare(measured, earlier);
    let ratios = peer_ratios(measured, theirs);
    if format == Format::Markdown {
        let peers: Vec<String> =
            ratios.iter().map(|ratio| format!("{}: {}; {:.2}", ratio.peer, shown(ratio.value), ratio.speed)).collect();
        stdout::line(format!("{} {} |", measured.to_markdown(), peers.join(", ")));
        return;
    }
    if format == Format::Json {
        let mut line = measured.to_json();
        if let Some(comparison) = comparison {
            line["earlier"] = json!({ "speed": comparison.speed, "noise": comparison.noise });
        }
        let ratio =
            |ratio: &fireclay::bench::Ratio| json!({ "peer": ratio.peer, "value": ratio.value, "speed": ratio.speed });
        if !ratios.is_empty() {
            line["peers"] = Value::Array(ratios.iter().map(ratio).collect());
        }
        stdout::line(line);
        return;
    }
    stdout::line(measured.to_text());
    if let Some(comparison) = comparison {
        stdout::line(format!("    {}", comparison.to_text()));
    }
    ratios.iter().for_each(|ratio| stdout::line(format!("    {}", ratio.to_text())));
}
