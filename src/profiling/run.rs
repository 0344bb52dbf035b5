//! The profiled work: a few warm steps of training, generation or prediction.

use std::path::PathBuf;
use std::time::Instant;

use fireclay_kernels::Backend;
use fireclay_kernels::recorder::{RecorderError, Recording, Report};
use fireclay_model::ModelFolder;

use super::{Ceilings, Profile};
use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::inference::generation::{GenerationOptions, Generator, Prepared};
use crate::inference::prediction::AnyPredictor;
use crate::precision::{CachePrecision, Precision};
use crate::process_memory::process_memory;
use crate::recipe::Recipe;
use crate::training::{StepOutput, Trainer, read_steps};

/// Options of every profile.
#[derive(Clone, Debug)]
pub struct ProfileOptions {
    /// Warm-up units, in which kernels are compiled and memory is allocated.
    pub warm_up: u64,
    /// Recorded units.
    pub count: u64,
    /// The device's name, to look up its datasheet.
    pub device: String,
    /// TFLOP/s of its matrix products, instead of the datasheet's.
    pub peak: Option<f64>,
}

/// A profile of training steps.
pub struct ProfileTraining {
    /// The recipe.
    pub recipe: Recipe,
    /// The options.
    pub options: ProfileOptions,
}

impl OnBackend for ProfileTraining {
    type Output = Profile;

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<Profile, Failure> {
        let Self { recipe, options } = self;
        let mut trainer = Trainer::<B>::new(&recipe, recipe.task()?, device.clone())?;
        let mut steps = |count: u64| -> Result<Vec<StepOutput<B>>, Failure> {
            let steps = (0..count).map(|_| trainer.train_step()).collect::<Result<_, _>>()?;
            sync::<B>(&device)?;
            Ok(steps)
        };
        // Losses are read late, as in training.
        read_steps(&steps(options.warm_up)?)?;
        let begun = Instant::now();
        drop(steps(options.count)?);
        let seconds = begun.elapsed().as_secs_f64() / options.count as f64;
        let (recording, note) = start::<B>(&device)?;
        let outputs = steps(options.count)?;
        let report = recording.stop().map_err(unrecorded)?;
        for (loss, _) in read_steps(&outputs)? {
            if !loss.is_finite() {
                return Err(Failure::new("the loss is not a number: training failed"));
            }
        }
        let name = format!("train {}, {}", recipe.name, recipe.training.precision.name());
        finish::<B>(&options, (name, "step", options.count, seconds), recipe.training.precision, report, note, &device)
    }
}

/// A profile of text generation.
pub struct ProfileGeneration {
    /// The model's folder.
    pub model: PathBuf,
    /// The prompts, run as one batch.
    pub prompts: Vec<String>,
    /// Sampling and limits.
    pub generation: GenerationOptions,
    /// Data type of matrices and activations.
    pub precision: Precision,
    /// Data type of the KV cache.
    pub cache: CachePrecision,
    /// The options.
    pub options: ProfileOptions,
}

impl OnBackend for ProfileGeneration {
    type Output = Profile;

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<Profile, Failure> {
        let Self { model, prompts, generation, precision, cache, options } = self;
        let generator = Generator::<B>::open(&model, precision, device.clone())?.with_cache(cache)?.without_ends();
        let write = |tokens: u64, decoding: &mut dyn FnMut() -> Result<(), Failure>| {
            let generation = GenerationOptions { max_tokens: Some(tokens as usize + 1), ..generation.clone() };
            let prepared = prompts.iter().map(|prompt| generator.prepare(prompt, &generation));
            let prepared = prepared.collect::<Result<Vec<Prepared>, Failure>>()?;
            let prepared: Vec<&Prepared> = prepared.iter().collect();
            generator.generate_watched(&prepared, 0, &generation, |_, _| {}, decoding)
        };
        write(options.warm_up, &mut || Ok(()))?;
        let mut begun = Instant::now();
        let mut begin = || {
            sync::<B>(&device)?;
            begun = Instant::now();
            Ok(())
        };
        write(options.count, &mut begin)?;
        let seconds = begun.elapsed().as_secs_f64() / options.count as f64;

        let mut started = None;
        let mut record = || {
            started = Some(start::<B>(&device)?);
            Ok(())
        };
        write(options.count, &mut record)?;
        let (recording, note) = started.ok_or_else(|| Failure::new("nothing was written"))?;
        let report = recording.stop().map_err(unrecorded)?;
        let rows = prompts.len();
        let dtypes = precision.described(&ModelFolder::new(&model))?;
        let name = format!("generate with {}, {dtypes}, batch {rows}", model.display());
        finish::<B>(&options, (name, "token", options.count, seconds), precision, report, note, &device)
    }
}

/// A profile of prediction: of intents and slots, or of labels.
pub struct ProfilePrediction {
    /// The model's folder.
    pub model: PathBuf,
    /// The utterances, predicted as one batch.
    pub utterances: Vec<String>,
    /// Data type of matrices and activations.
    pub precision: Precision,
    /// The options.
    pub options: ProfileOptions,
}

impl OnBackend for ProfilePrediction {
    type Output = Profile;

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<Profile, Failure> {
        let Self { model, utterances, precision, options } = self;
        let predictor = AnyPredictor::<B>::open(&model, precision, device.clone())?;
        let utterances: Vec<&str> = utterances.iter().map(String::as_str).collect();
        let predict = |count: u64| (0..count).try_for_each(|_| predictor.predict(&utterances).map(drop));
        predict(options.warm_up)?;
        let begun = Instant::now();
        predict(options.count)?;
        let seconds = begun.elapsed().as_secs_f64() / options.count as f64;
        let (recording, note) = start::<B>(&device)?;
        predict(options.count)?;
        let report = recording.stop().map_err(unrecorded)?;
        let dtypes = precision.described(&ModelFolder::new(&model))?;
        let name = format!("predict with {}, {dtypes}, {} utterances", model.display(), utterances.len());
        finish::<B>(&options, (name, "batch", options.count, seconds), precision, report, note, &device)
    }
}

fn sync<B: Backend>(device: &B::Device) -> Result<(), Failure> {
    B::sync(device).map_err(|error| Failure::new(format!("the device failed: {error:?}")))
}

fn unrecorded(error: RecorderError) -> Failure {
    Failure::new(format!("cannot profile: {error}"))
}

/// A recording with the best available clock, and why it is not the device's, if it should be.
fn start<B: Backend>(device: &B::Device) -> Result<(Recording, Option<String>), Failure> {
    let clocked = B::is_synchronous() || B::probe(device).is_some();
    let recording = if clocked { Recording::start::<B>(device) } else { Recording::start_waiting::<B>(device) };
    match recording {
        Ok(recording) => Ok((recording, None)),
        Err(error @ RecorderError::Cupti(_)) => {
            let note = format!("warning: {error}; timing each operation by waiting for it instead");
            Ok((Recording::start_waiting::<B>(device).map_err(unrecorded)?, Some(note)))
        }
        Err(error) => Err(unrecorded(error)),
    }
}

fn finish<B: Backend>(
    options: &ProfileOptions,
    (name, unit, count, seconds): (String, &'static str, u64, f64),
    precision: Precision,
    report: Report,
    note: Option<String>,
    device: &B::Device,
) -> Result<Profile, Failure> {
    let memory = B::memory(device).or_else(|| B::is_synchronous().then(process_memory).flatten());
    let ceilings = Ceilings::measure::<B>(&options.device, options.peak, precision.f32_products(), device)?;
    Ok(Profile { name, unit, count, seconds, device: options.device.clone(), report, ceilings, memory, note })
}
