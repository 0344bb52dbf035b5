//! Continuous batching: requests with their own settings join while others decode, and one is
//! cancelled.
//!
//! `cargo run --release --example continuous_batching MODEL`, a folder with a language model.

use std::collections::BTreeMap;
use std::path::Path;

use fireclay::Failure;
use fireclay::inference::generation::Generator;
use fireclay::inference::generation::scheduler::{Request, Scheduler, SchedulerOptions};
use fireclay::precision::Precision;
use fireclay_kernels::Sampling;

type B = burn::backend::NdArray;

fn main() -> Result<(), Failure> {
    let folder = std::env::args()
        .nth(1)
        .ok_or_else(|| Failure::usage("continuous_batching MODEL: a folder with a language model"))?;
    let generator = Generator::<B>::open(Path::new(&folder), Precision::F32, Default::default())?;
    let tokenizer = generator.tokenizer();
    let options = SchedulerOptions { rows: 8, step_tokens: 256, cache_tokens: 4096 };
    let mut scheduler = Scheduler::new(generator.model(), options, Default::default());

    let prompts = ["There", "There was", "There was once", "There was once a", "There was once a"];
    let mut coming = prompts.iter().enumerate();
    let mut outputs = BTreeMap::new();
    loop {
        // A new request at each step, until all are added.
        if let Some((number, prompt)) = coming.next() {
            let sampling = Sampling::greedy().with_temperature(0.3 * number as f64).with_seed(7, number as u64);
            let request = Request { sampling, ..Request::new(tokenizer.encode_prompt(prompt)?, 24) };
            let id = scheduler.add(request)?;
            outputs.insert(id, (*prompt, tokenizer.stream(), String::new()));
            if number == 2 {
                scheduler.cancel(id);
            }
        } else if scheduler.is_idle() {
            break;
        }
        scheduler.step(generator.model())?;
        for written in scheduler.take() {
            let Some((_, stream, text)) = outputs.get_mut(&written.id) else { continue };
            for token in &written.tokens {
                text.push_str(&stream.push(token.token)?);
            }
        }
    }
    for (prompt, _, text) in outputs.into_values() {
        println!("{prompt}|{text}");
    }
    Ok(())
}
