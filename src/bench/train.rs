//! Training throughput in tokens per second, and epochs of utterances.

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use fireclay_datasets::{Corpus, Labels, PieceTokenizer, TextCorpus, Tokenizer, Utterance, Utterances};
use fireclay_kernels::Backend;
use fireclay_model::{Family, LoraConfig, Transformer, TransformerConfig};

use super::sizes::{TrainSize, trainer};
use super::{BenchOptions, Measurement, seconds};
use crate::backend::{OnBackend, RunContext};
use crate::ceilings::Peaks;
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::tasks::{Batch, IntentSlot, Language, Task};
use crate::training::Trainer;

/// Training with some sizes; `show` receives each case when measured.
pub struct TrainBench<S> {
    /// The options.
    pub options: BenchOptions,
    /// Receives each measurement.
    pub show: S,
}

impl<S: FnMut(Measurement) -> Result<(), Failure>> OnBackend for TrainBench<S> {
    type Output = ();

    fn run<B: Backend>(mut self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        let cpu = B::is_synchronous();
        let own: &[&str] = if cpu {
            &["cpu-4x128", "cpu-6x384", "cpu-6x256", "intent-slot"]
        } else {
            &["gpt2-124m", "shakespeare-char", "intent-slot"]
        };
        let sizes = match self.options.sizes.is_empty() {
            true => own.iter().map(|name| name.to_string()).collect(),
            false => self.options.sizes.clone(),
        };
        for name in sizes {
            let measured = match name.as_str() {
                "intent-slot" => vec![epoch::<B>(&self.options, &device)?],
                name => steps::<B>(trainer(name)?, &self.options, &device)?,
            };
            measured.into_iter().try_for_each(&mut self.show)?;
        }
        Ok(())
    }
}

/// The recipe with the requested overrides.
fn asked(recipe: Recipe, options: &BenchOptions) -> Result<Recipe, Failure> {
    let mut recipe = recipe;
    let settings = [("batch_size", options.batch), ("seq_length", options.length)];
    for (key, value) in settings.into_iter().filter_map(|(key, value)| Some((key, value?))) {
        recipe = recipe.with(key, &value.to_string())?;
    }
    if let Some(precision) = options.precision {
        recipe = recipe.with("precision", precision.name())?;
    }
    changed(recipe, options)
}

/// The recipe with the requested settings.
fn changed(recipe: Recipe, options: &BenchOptions) -> Result<Recipe, Failure> {
    if options.settings.is_empty() { Ok(recipe) } else { recipe.with_settings(&options.settings) }
}

/// The case's name, with the requested settings.
fn named(case: &str, options: &BenchOptions) -> String {
    let words = std::iter::once(case).chain(options.settings.iter().map(String::as_str));
    words.collect::<Vec<_>>().join(" ")
}

/// Training speed and, where the device reports it, peak memory.
fn steps<B: Backend>(size: TrainSize, options: &BenchOptions, device: &B::Device) -> Result<Vec<Measurement>, Failure> {
    let TrainSize { what, label, recipe, vocab_size, config, adapter } = size;
    let recipe = asked(recipe, options)?;
    let (batch_size, seq_length) = (recipe.training.batch_size, recipe.training.seq_length);
    let task = Task::Language(random_language(vocab_size, seq_length, batch_size)?);
    let batches = (0..8).map(|step| task.batch(&recipe.training, step)).collect::<Result<Vec<Batch>, _>>()?;
    let mut trainer = match config {
        Some(config) => {
            let model = model_of::<B>(config, adapter, &recipe, device)?;
            Trainer::<B>::with_model(&recipe, task, model, device.clone())?
        }
        None => Trainer::<B>::new(&recipe, task, device.clone())?,
    };
    let mut batches = batches.iter().cycle();
    let mut last = None;
    let seconds = seconds::<B, ()>(device, options.repeats, || {
        last = batches.next().map(|batch| trainer.train_on(batch.clone()));
        Ok(())
    })?;
    let loss = last.map_or(Ok(f64::NAN), |step| step.loss())?;
    if !loss.is_finite() {
        return Err(Failure::new(format!("{what}: the loss is {loss}: training failed")));
    }
    let tokens = (batch_size * seq_length * recipe.training.accumulation.max(1)) as f64;
    let what = if what == "train" { format!("train {}", recipe.training.precision.name()) } else { what };
    let case = named(&format!("{label} B={batch_size} T={seq_length}"), options);
    let values = seconds.iter().map(|seconds| tokens / seconds).collect();
    trainer.watch_memory();
    for batch in batches.by_ref().take(2) {
        trainer.train_on(batch.clone());
    }
    let memory = trainer
        .peak_memory()
        .map(|bytes| Measurement::new(format!("peak memory, {what}"), case.trim(), "GB", vec![bytes as f64 / 1e9]));
    let measured = Measurement::new(what, case.trim(), "tokens/s", values);
    let value = measured.value;
    let flops = trainer.model().config().training_flops(seq_length);
    let peaks = options.peak.map(Peaks::given);
    let peaks = peaks.or_else(|| Peaks::of(&options.device, trainer.model().f32_products()));
    let measured = match peaks {
        Some(peaks) => {
            measured.of(value * flops / peaks.for_dtype(trainer.model().activations().into()), "the matrix peak (MFU)")
        }
        None => measured,
    };
    Ok(std::iter::once(measured).chain(memory).collect())
}

/// A model with random weights, and its adapter if it is to be trained with one.
fn model_of<B: Backend>(
    config: TransformerConfig,
    adapter: Option<(Family, LoraConfig)>,
    recipe: &Recipe,
    device: &B::Device,
) -> Result<Transformer<Autodiff<B>>, Failure> {
    let seed = recipe.training.seed;
    let Some((family, adapter)) = adapter else { return Ok(config.init(seed, device)?) };
    let dtype = recipe.training.precision.activations::<B>(device)?;
    let model: Transformer<Autodiff<B>> = config.init_in(seed, dtype, device)?;
    let model = model.map(&mut Frozen);
    model.with_lora(family, &adapter, None, seed).map_err(Failure::new)
}

/// Detaches matrices, as those of files are that are not trained.
struct Frozen;

impl<B: burn::tensor::backend::Backend> ModuleMapper<B> for Frozen {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if D < 2 {
            return param;
        }
        Param::initialized(param.id, param.val().detach())
    }
}

/// A text of random words, each a token.
fn random_language(vocab_size: usize, seq_length: usize, batch_size: usize) -> Result<Language, Failure> {
    let words: Vec<String> = (0..vocab_size).map(|word| format!("w{word}")).collect();
    let tokenizer = Tokenizer::words(&words)?;
    let mut draw = draws();
    let count = (20 * batch_size * seq_length).max(20_000);
    let tokens: Vec<u32> = (0..count).map(|_| draw(vocab_size as u32)).collect();
    let corpus = Corpus::Text(TextCorpus::new(tokens, seq_length, 0.1)?);
    Ok(Language::new(corpus, tokenizer))
}

/// Pseudo-random numbers below a bound, reproducible.
fn draws() -> impl FnMut(u32) -> u32 {
    let mut state = 7u32;
    move |below| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    }
}

const UTTERANCES: usize = 200;
/// Pieces of an utterance, with [CLS] and [SEP] around its words.
const PIECES: usize = 50;

/// An epoch of 200 utterances of 50 pieces in batches of 32, with two layers of 128 unless settings
/// change that; the loss is read once.
fn epoch<B: Backend>(options: &BenchOptions, device: &B::Device) -> Result<Measurement, Failure> {
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
    ];
    let recipe = Recipe::shipped("intent-slot")?;
    let recipe = recipe.with_all(settings)?;
    let recipe = match options.precision {
        Some(precision) => recipe.with("precision", precision.name())?,
        None => recipe,
    };
    let recipe = changed(recipe, options)?;
    let task = Task::IntentSlot(random_utterances(recipe.training.seq_length)?);
    // Full batches only.
    let batches = (0..8).map(|step| task.batch(&recipe.training, step));
    let mut batches = batches.collect::<Result<Vec<Batch>, _>>()?;
    let batch_size = recipe.training.batch_size;
    batches.retain(|batch| matches!(batch, Batch::Utterances(batch) if batch.batch_size() == batch_size));
    batches.truncate(UTTERANCES.div_ceil(batch_size));
    if batches.is_empty() {
        return Err(Failure::usage(format!("batch_size {batch_size} is above the 200 utterances of the benchmark")));
    }
    let mut trainer = Trainer::<B>::new(&recipe, task, device.clone())?;
    let seconds = seconds::<B, f64>(device, options.repeats, || {
        let last = batches.iter().map(|batch| trainer.train_on(batch.clone())).last();
        last.map_or(Ok(f64::NAN), |step| step.loss())
    })?;
    let values = seconds.iter().map(|seconds| 1e3 * seconds).collect();
    Ok(Measurement::new(
        format!("intent/slot epoch, {UTTERANCES} utterances of {PIECES} pieces"),
        named(recipe.training.precision.name(), options),
        "ms",
        values,
    ))
}

/// Random utterances of equal length: a word is one character and one piece.
fn random_utterances(seq_length: usize) -> Result<IntentSlot, Failure> {
    const WORDS: u32 = 1000;
    let mut draw = draws();
    let word = |index: u32| char::from_u32(0x4e00 + index).unwrap_or('x').to_string();
    let labels = Labels {
        intents: (0..26).map(|intent| format!("intent-{intent}")).collect(),
        slots: (0..64).map(|slot| format!("slot-{slot}")).collect(),
        marks: Vec::new(),
        // As the recipe has them.
        words: (0..WORDS).map(word).collect(),
        intent_slots: Default::default(),
    };
    let mut utterance = || Utterance {
        words: (0..PIECES - 2).map(|_| word(draw(WORDS))).collect(),
        tags: (0..PIECES - 2).map(|_| labels.tag(draw(labels.tag_count() as u32) as usize)).collect(),
        intent: labels.intents[draw(26) as usize].clone(),
    };
    let train: Vec<Utterance> = (0..UTTERANCES).map(|_| utterance()).collect();
    let alphabet = [Utterance { words: (0..WORDS).map(word).collect(), tags: Vec::new(), intent: String::new() }];
    let pieces = PieceTokenizer::train(&alphabet, 2 * WORDS as usize + 5)?;
    let parts = Utterances { valid: train[..2].to_vec(), test: train[..2].to_vec(), train };
    IntentSlot::new(parts, labels, pieces, seq_length)
}
