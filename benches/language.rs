//! Training steps of language models on a CPU, in tokens a second: nanoGPT's CPU recipe, a wider and longer one, and one
//! with a large vocabulary. Tokens are drawn at random.
//!
//! `FIRECLAY_TEST_BACKEND` names the backend (`cpu` if unset). The loss is read once, at the end of the steps.

use std::time::Instant;

use burn::tensor::FloatDType;
use clap::ValueEnum;
use criterion::{Criterion, Throughput};
use fireclay::Failure;
use fireclay::backend::{BackendName, OnBackend};
use fireclay::tasks::{Batch, Language, Task};
use fireclay::training::{Recipe, Trainer};
use fireclay_datasets::{Corpus, TextCorpus, Tokenizer};
use fireclay_kernels::Backend;

/// The program's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Case {
    vocab_size: usize,
    d_model: usize,
    n_heads: usize,
    n_layers: usize,
    seq_length: usize,
    batch_size: usize,
}

#[rustfmt::skip]
const CASES: [Case; 3] = [
    Case { vocab_size: 65, d_model: 128, n_heads: 4, n_layers: 4, seq_length: 64, batch_size: 12 },
    Case { vocab_size: 65, d_model: 384, n_heads: 6, n_layers: 6, seq_length: 256, batch_size: 8 },
    Case { vocab_size: 8192, d_model: 256, n_heads: 8, n_layers: 6, seq_length: 64, batch_size: 32 },
];

fn main() -> Result<(), Failure> {
    let name = std::env::var("FIRECLAY_TEST_BACKEND").unwrap_or_else(|_| "cpu".into());
    BackendName::from_str(&name, true).map_err(Failure::usage)?.run(Steps)
}

struct Steps;

impl OnBackend for Steps {
    type Output = ();

    fn run<B: Backend>(self, device: B::Device) -> Result<(), Failure> {
        let mut criterion = Criterion::default().configure_from_args();
        for case in CASES {
            case.run::<B>(&mut criterion, &device)?;
        }
        Ok(())
    }
}

impl Case {
    fn run<B: Backend>(&self, criterion: &mut Criterion, device: &B::Device) -> Result<(), Failure> {
        let Self { vocab_size, d_model, n_heads, n_layers, seq_length, batch_size } = self;
        let settings = [
            ("d_model", d_model.to_string()),
            ("n_layers", n_layers.to_string()),
            ("n_heads", n_heads.to_string()),
            ("seq_length", seq_length.to_string()),
            ("batch_size", batch_size.to_string()),
            ("schedule", "constant".into()),
        ];
        let recipe = Recipe::shipped("shakespeare-char-cpu")?;
        let recipe = settings.iter().try_fold(recipe, |recipe, (key, value)| recipe.with(key, value))?;
        let task = Task::Language(self.language()?);
        let batches: Vec<Batch> = (0..8).map(|step| task.batch(&recipe.training, step)).collect();
        let mut trainer = Trainer::<B>::new(&recipe, task, device.clone())?;
        assert_eq!(trainer.model().activations(), FloatDType::F32);

        let mut group = criterion.benchmark_group("language");
        group.throughput(Throughput::Elements((batch_size * seq_length) as u64));
        let name = format!("step/{n_layers}x{d_model}/T={seq_length}/B={batch_size}/vocabulary={vocab_size}");
        group.bench_function(format!("{name}/{}", B::name(device)), |bencher| {
            bencher.iter_custom(|steps| {
                let begun = Instant::now();
                let steps = batches.iter().cycle().take(steps as usize).map(|batch| trainer.train_on(batch.clone()));
                let last = steps.last().map(|step| step.loss());
                assert!(matches!(last, Some(Ok(loss)) if loss.is_finite()), "the loss is a number");
                begun.elapsed()
            });
        });
        group.finish();
        Ok(())
    }

    /// A text of words drawn at random, each a token.
    fn language(&self) -> Result<Language, Failure> {
        let words: Vec<String> = (0..self.vocab_size).map(|word| format!("w{word}")).collect();
        let tokenizer = Tokenizer::words(&words)?;
        let mut state = 7u32;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % self.vocab_size as u32
        };
        let tokens: Vec<u32> = (0..100 * self.batch_size * self.seq_length).map(|_| draw()).collect();
        let corpus = Corpus::Text(TextCorpus::new(tokens, self.seq_length, 0.1)?);
        Ok(Language { corpus, tokenizer })
    }
}
