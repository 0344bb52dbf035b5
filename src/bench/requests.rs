//! Continuous batching: requests of random lengths, settings and arrival, compared with a uniform
//! batch.

use std::collections::HashMap;
use std::time::Instant;

use fireclay_kernels::{Backend, Penalties, RandomKey, Sampling};
use fireclay_model::{PAGE_TOKENS, Transformer};

use super::decode::{Drawn, LAST, TIMED, decode};
use super::{BenchOptions, Measurement};
use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::inference::generation::Generator;
use crate::inference::generation::scheduler::{Load, Request, RequestId, Scheduler, SchedulerOptions};

/// Number of requests, and their tokens, on a GPU; the CPU gets a fraction.
const REQUESTS: usize = 200;
const PROMPT: [usize; 2] = [32, 2000];
const ANSWER: [usize; 2] = [16, 512];
const CPU_FRACTION: usize = 8;
/// Requests also decoded alone.
const ALONE: usize = 40;

/// Continuous batching; `show` receives each case when measured.
pub struct RequestsBench<S> {
    /// The options.
    pub options: BenchOptions,
    /// Receives each measurement.
    pub show: S,
}

/// The result of a run.
struct Served {
    /// Generated tokens per second, from the first request to the last token.
    tokens_per_second: f64,
    /// Longest time that a decoding sequence waited for its next token, in ms.
    longest_wait: f64,
    preemptions: usize,
    /// Maximum ratio of page capacity to stored tokens, without one page per sequence, while a
    /// sequence waited for pages; 0 if none did.
    memory: f64,
    /// The tokens of each request.
    outputs: Vec<Vec<u32>>,
}

impl<S: FnMut(Measurement) -> Result<(), Failure>> OnBackend for RequestsBench<S> {
    type Output = ();

    fn run<B: Backend>(mut self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        let cpu = B::is_synchronous();
        let own = if cpu { "llama-15m" } else { "qwen3-0.6b" };
        let sizes = if self.options.sizes.is_empty() { vec![own.to_string()] } else { self.options.sizes.clone() };
        let fraction = if cpu { CPU_FRACTION } else { 1 };
        let rows = self.options.batch.unwrap_or(if cpu { 8 } else { 32 });
        for name in sizes {
            let Drawn { model, dtype, .. } = Drawn::<B>::new(&name, &self.options, &device)?;
            let what = format!("requests {name} {dtype}");
            let context = model.config().context_length;
            let requests = requests(model.config().vocab_size, context, fraction);
            let length = |request: &Request| request.prompt.len() + request.max_tokens;
            let most: usize = {
                let mut lengths: Vec<usize> =
                    requests.iter().map(|request| length(request).next_multiple_of(PAGE_TOKENS)).collect();
                lengths.sort_unstable();
                lengths.iter().rev().take(rows).sum()
            };
            let longest = requests.iter().map(length).max().unwrap_or(0).next_multiple_of(PAGE_TOKENS);
            let alike: Vec<Request> = (0..rows).map(|row| Request::new(vec![row as u32; 16], 256)).collect();
            let alike_tokens = rows * (16 + 256usize).next_multiple_of(PAGE_TOKENS);
            let full = most.max(alike_tokens);
            // The reference: a batch of the sequences' average length and sampling.
            let ways: Vec<Sampling> = requests.iter().cycle().take(rows).map(unpenalised).collect();
            let position = (mean_keys(&requests) + TIMED / 2).min(context - 1).max(LAST);
            let keys = position - TIMED / 2;
            let steady = decode(&model, &ways, position, self.options.repeats, &device)?;
            let steady = steady.iter().map(|seconds| rows as f64 / seconds).collect();
            let steady = Measurement::new(&what, format!("a batch of {rows} at {keys} keys"), "tokens/s", steady);
            let steady_rate = steady.value;
            (self.show)(steady)?;
            let cases = [
                (format!("{rows} alike"), &alike, full, None),
                (format!("{} mixed requests, {rows} at a time", requests.len()), &requests, full, Some(steady_rate)),
                (
                    "the same with a quarter of the cache".to_string(),
                    &requests,
                    (most / 4).max(longest),
                    Some(steady_rate),
                ),
            ];
            let mut alone: Vec<Vec<u32>> = Vec::new();
            for (case, requests, cache_tokens, steady_rate) in cases {
                let options =
                    SchedulerOptions { rows, step_tokens: Generator::<B>::step_tokens() / fraction, cache_tokens };
                let mut served = Vec::new();
                // The first run compiles kernels.
                for _ in 0..self.options.repeats + 1 {
                    served.push(serve(&model, requests, options, &device)?);
                }
                served.remove(0);
                let of = |value: fn(&Served) -> f64| served.iter().map(value).collect();
                let rate = Measurement::new(&what, &case, "tokens/s", of(|served| served.tokens_per_second));
                (self.show)(match steady_rate {
                    Some(steady_rate) => {
                        let share = rate.value / steady_rate;
                        rate.of(share, "the batch's rate")
                    }
                    None => rate,
                })?;
                let waits = format!("{case}, longest wait for a token");
                (self.show)(Measurement::new(&what, waits, "ms", of(|served| served.longest_wait)))?;
                if steady_rate.is_some() {
                    let first = &requests[..requests.len().min(ALONE)];
                    for request in &first[alone.len()..] {
                        let cache_tokens = length(request).next_multiple_of(PAGE_TOKENS);
                        let one = std::slice::from_ref(request);
                        alone.append(
                            &mut serve(&model, one, SchedulerOptions { cache_tokens, ..options }, &device)?.outputs,
                        );
                    }
                    let equal = |served: &Served| {
                        let equal = served.outputs.iter().zip(&alone).filter(|(text, alone)| text == alone).count();
                        100.0 * equal as f64 / alone.len() as f64
                    };
                    let what_equal = format!("{case}, equal to decoding alone, of {}", alone.len());
                    (self.show)(Measurement::new(&what, what_equal, "%", served.iter().map(equal).collect()))?;
                }
                if served.iter().any(|served| served.memory > 0.0) {
                    let waiting = format!("{case}, cache memory over token bytes, without one page per sequence");
                    (self.show)(Measurement::new(&what, waiting, "times", of(|served| served.memory)))?;
                }
                let preemptions: usize = served.iter().map(|served| served.preemptions).sum();
                if preemptions > 0 {
                    let each = preemptions.div_ceil(served.len());
                    eprintln!("{case}: {each} sequences preempted and recomputed");
                }
            }
        }
        Ok(())
    }
}

/// Sampling of a request, without penalties.
fn unpenalised(request: &Request) -> Sampling {
    request.sampling.with_penalties(Penalties::default())
}

/// Average number of keys per generated token.
fn mean_keys(requests: &[Request]) -> usize {
    let tokens: usize = requests.iter().map(|request| request.max_tokens).sum();
    let keys = |request: &Request| request.max_tokens * (request.prompt.len() + request.max_tokens / 2);
    requests.iter().map(keys).sum::<usize>() / tokens.max(1)
}

/// Requests with varied settings, reproducible.
fn requests(vocabulary: usize, context: usize, fraction: usize) -> Vec<Request> {
    let key = RandomKey::new(5);
    let between = |at: usize, column: u32, [low, high]: [usize; 2]| {
        let (low, high) = (low / fraction, high / fraction);
        low.max(1) + (key.uniform(at as u32, column) * (high - low) as f64) as usize
    };
    let request = |at: usize| {
        let length = between(at, 0, PROMPT).min(context / 2);
        let prompt = (0..length).map(|place| key.bits(at as u32, 10 + place as u32) % vocabulary as u32).collect();
        // Random weights give flat logits: this temperature spreads them as in a trained model.
        let plain = Sampling::greedy().with_temperature(0.08 + 0.0002 * at as f64).with_seed(at as u64, 0);
        let sampling = match at % 5 {
            0 => Sampling::greedy(),
            1 => plain.with_top_k(Some(10 + at)),
            2 => plain.with_top_p(Some(0.9)),
            3 => plain.with_top_k(Some(50)).with_top_p(Some(0.8)),
            _ => plain.with_min_p(Some(0.05)).with_penalties(Penalties { presence: 0.1, ..Penalties::default() }),
        };
        Request { sampling, ..Request::new(prompt, between(at, 1, ANSWER).min(context / 2)) }
    };
    (0..REQUESTS / fraction).map(request).collect()
}

/// Runs all requests, which arrive in twos and threes as fast as slots become free.
fn serve<B: Backend>(
    model: &Transformer<B>,
    requests: &[Request],
    options: SchedulerOptions,
    device: &B::Device,
) -> Result<Served, Failure> {
    let mut scheduler = Scheduler::new(model, options, device.clone());
    B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
    let (begun, key) = (Instant::now(), RandomKey::new(9));
    let mut coming = requests.iter();
    let mut last: HashMap<RequestId, Instant> = HashMap::new();
    let (mut ids, mut outputs) = (HashMap::new(), vec![Vec::new(); requests.len()]);
    let (mut longest, mut memory) = (0.0f64, 0.0f64);
    for step in 0.. {
        if scheduler.load().waiting < options.rows / 2 {
            for request in coming.by_ref().take(key.bits(step, 0) as usize % 4) {
                ids.insert(scheduler.add(request.clone())?, ids.len());
            }
        }
        if scheduler.is_idle() && coming.len() == 0 {
            break;
        }
        scheduler.step(model)?;
        let now = Instant::now();
        let load = scheduler.load();
        let running = load.prefilling + load.decoding;
        if load.waiting > 0 && load.free_pages == 0 && running < options.rows {
            let held = (load.pages - load.free_pages).saturating_sub(running) * PAGE_TOKENS;
            memory = memory.max(held as f64 / load.tokens as f64);
        }
        for written in scheduler.take() {
            outputs[ids[&written.id]].extend(written.tokens.iter().map(|written| written.token));
            if let Some(before) = last.insert(written.id, now) {
                longest = longest.max((now - before).as_secs_f64());
            }
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let Load { preemptions, .. } = scheduler.load();
    let tokens: usize = outputs.iter().map(Vec::len).sum();
    Ok(Served { tokens_per_second: tokens as f64 / seconds, longest_wait: 1e3 * longest, preemptions, memory, outputs })
}
