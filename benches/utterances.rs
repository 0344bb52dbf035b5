//! An epoch of training on utterances: 200 of them, 50 pieces each, in batches of 32; 128 wide, two layers.
//!
//! `FIRECLAY_TEST_BACKEND` names the backend (`cpu` if unset), `FIRECLAY_BENCH_DTYPE` the dtype of activations (`f32`
//! if unset). The loss is read once, at the end of the epoch.

use std::time::Instant;

use burn::tensor::{DType, FloatDType};
use clap::ValueEnum;
use criterion::{Criterion, Throughput};
use fireclay::Failure;
use fireclay::backend::{BackendName, OnBackend};
use fireclay::tasks::{Batch, IntentSlot, Task};
use fireclay::training::{Recipe, Trainer};
use fireclay_datasets::{Labels, PieceTokenizer, Utterance, Utterances};
use fireclay_kernels::Backend;

/// The program's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const UTTERANCES: usize = 200;
const PIECES: usize = 50;
const BATCH_SIZE: usize = 32;
const WORDS: u32 = 1000;
const INTENTS: usize = 26;
const SLOTS: usize = 64;

fn main() -> Result<(), Failure> {
    let name = std::env::var("FIRECLAY_TEST_BACKEND").unwrap_or_else(|_| "cpu".into());
    BackendName::from_str(&name, true).map_err(Failure::usage)?.run(Epoch)
}

struct Epoch;

impl OnBackend for Epoch {
    type Output = ();

    fn run<B: Backend>(self, device: B::Device) -> Result<(), Failure> {
        let precision = std::env::var("FIRECLAY_BENCH_DTYPE").unwrap_or_else(|_| "f32".into());
        let settings = [
            ("d_model", "128"),
            ("n_layers", "2"),
            ("n_heads", "4"),
            ("dropout", "0"),
            ("split_words", "0"),
            ("swap_values", "0"),
            ("batch_size", "32"),
            ("learning_rate", "1e-3"),
            ("schedule", "constant"),
            ("precision", &precision),
        ];
        let recipe = Recipe::shipped("intent-slot")?;
        let recipe = settings.iter().try_fold(recipe, |recipe, (key, value)| recipe.with(key, value))?;
        let task = Task::IntentSlot(task(recipe.training.seq_length)?);
        // Full batches only, as in the PyTorch peer: the last one goes back to where 32 are left.
        let mut batches: Vec<Batch> = (0..).map(|step| task.batch(&recipe.training, step)).take(8).collect();
        batches.retain(|batch| matches!(batch, Batch::Utterances(batch) if batch.batch_size() == BATCH_SIZE));
        batches.truncate(UTTERANCES.div_ceil(BATCH_SIZE));
        let mut trainer = Trainer::<B>::new(&recipe, task, device.clone())?;
        assert!(trainer.model().activations() != FloatDType::BF16 || B::supports_dtype(&device, DType::BF16));

        let mut criterion = Criterion::default().configure_from_args();
        let mut group = criterion.benchmark_group("utterances");
        group.throughput(Throughput::Elements((batches.len() * BATCH_SIZE * PIECES) as u64));
        group.bench_function(format!("epoch/{}/{precision}", B::name(&device)), |bencher| {
            bencher.iter_custom(|epochs| {
                let begun = Instant::now();
                for _ in 0..epochs {
                    let steps = batches.iter().map(|batch| trainer.train_on(batch.clone()));
                    let last = steps.last().map(|step| step.loss());
                    assert!(matches!(last, Some(Ok(loss)) if loss.is_finite()), "the loss is a number");
                }
                begun.elapsed()
            });
        });
        group.finish();
        Ok(())
    }
}

/// Utterances of as many pieces each, drawn at random: a word is a character that is a piece of its own.
fn task(seq_length: usize) -> Result<IntentSlot, Failure> {
    let mut state = 7u32;
    let mut draw = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let word = |index: u32| char::from_u32(0x4e00 + index).unwrap_or('x').to_string();
    let labels = Labels {
        intents: (0..INTENTS).map(|intent| format!("intent-{intent}")).collect(),
        slots: (0..SLOTS).map(|slot| format!("slot-{slot}")).collect(),
        marks: Vec::new(),
    };
    let mut utterance = |words: usize| Utterance {
        words: (0..words).map(|_| word(draw(WORDS))).collect(),
        tags: (0..words).map(|_| labels.tag(draw(labels.tag_count() as u32) as usize)).collect(),
        intent: labels.intents[draw(INTENTS as u32) as usize].clone(),
    };
    // [CLS] and [SEP] go around the words.
    let train: Vec<Utterance> = (0..UTTERANCES).map(|_| utterance(PIECES - 2)).collect();
    let alphabet = [Utterance { words: (0..WORDS).map(word).collect(), tags: Vec::new(), intent: String::new() }];
    let pieces = PieceTokenizer::train(&alphabet, 2 * WORDS as usize + 5)?;
    let parts = Utterances { valid: train[..2].to_vec(), test: train[..2].to_vec(), train };
    IntentSlot::new(parts, labels, pieces, seq_length)
}
