//! A custom training loop, on a backend chosen at run time: `cargo run --release --example
//! any_backend -- [cpu|wgpu|vulkan|cuda]`, each enabled by the feature of its name. By default it
//! runs on the fastest available backend.
//!
//! A small Llama learns to count in words, and then counts.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use clap::ValueEnum;
use fireclay::Failure;
use fireclay::backend::{BackendName, OnBackend, RunContext};
use fireclay::recipe::schema::OptimizerKind;
use fireclay::tasks::language;
use fireclay::training::optim::{Optimizer, ParameterGradients, Settings};
use fireclay_datasets::{BatchKey, Corpus, TextCorpus, Tokenizer, TokenizerKind};
use fireclay_kernels::{Backend, HeadLossOptions, SampledRows, Sampling};
use fireclay_model::TransformerConfig;

const SETTINGS: Settings = Settings {
    learning_rate: 3e-3,
    beta_1: 0.9,
    beta_2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    max_grad_norm: Some(1.0),
    step: 0, // the optimizer counts
};

fn main() -> Result<(), Failure> {
    let backend = match std::env::args().nth(1) {
        Some(name) => BackendName::from_str(&name, true).map_err(Failure::usage)?,
        None => BackendName::best(),
    };
    println!("on {}: {}", backend.as_str(), backend.run(Counting { steps: 100 })?);
    Ok(())
}

/// Generic work for any backend, which a closure cannot be.
struct Counting {
    steps: u64,
}

impl OnBackend for Counting {
    /// The model's output.
    type Output = String;

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<String, Failure> {
        let text = "one two three four five six seven eight nine ten. ".repeat(200);
        let tokenizer = Tokenizer::train(TokenizerKind::Char, &text)?;
        let corpus = Corpus::Text(TextCorpus::new(tokenizer.encode(&text)?, 64, 0.1)?);

        let config = TransformerConfig::llama(tokenizer.vocab_size(), 128, 64, 2, 4).with_init_deviation(0.1);
        let mut model = config.init::<Autodiff<B>>(1, &device)?;
        let mut optimizer = Optimizer::new(OptimizerKind::AdamW, &model);
        for step in 0..self.steps {
            let batch = corpus.batch(BatchKey::new(1, step), 8)?;
            let loss = language::loss(&model, &batch, HeadLossOptions::new(), &device);
            let gradients = ParameterGradients::take(&model, loss.backward());
            (model, _) = optimizer.step(model, gradients, SETTINGS);
            if step % 20 == 0 {
                println!("step {step}: loss {:.3}", loss.into_scalar());
            }
        }

        let model = model.valid();
        let mut cache = model.cache(128);
        let row = cache.add_row();
        let greedy = SampledRows::new(&[Sampling::greedy().into()], &device);
        let prompt = "one two ";
        let hidden = model.prefill(&[(row, &tokenizer.encode(prompt)?)], &mut cache);
        let mut next = model.sample(hidden, &greedy, None, &cache);
        let (mut stream, mut counted) = (tokenizer.stream(), prompt.to_string());
        for _ in 0..41 {
            // Reading a token waits for the device; `generation` reads it some steps later.
            let token = next.clone().into_data().iter::<i64>().next().unwrap_or_default();
            counted.push_str(&stream.push(token as u32)?);
            (next, _) = model.next_tokens(Some((next, &[row])), &[], &greedy, None, &mut cache);
        }
        Ok(counted)
    }
}
