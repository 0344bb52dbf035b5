//! A model, its optimizer and its data: one step, one validation.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::{DType, FloatDType, Tensor};
use fireclay_datasets::{Corpus, TokenBatch};
use fireclay_kernels::{AdamW, Backend, RandomKey};
use fireclay_model::Transformer;

use crate::Failure;
use crate::tasks::language;
use crate::training::optimizer::{Optimizer, ParameterGradients};
use crate::training::recipe::{Precision, Recipe};

/// Everything that a training step changes, and what it reads.
pub struct Trainer<B: Backend> {
    recipe: Recipe,
    corpus: Corpus,
    model: Transformer<Autodiff<B>>,
    optimizer: Optimizer<B>,
    step: u64,
    device: B::Device,
}

/// What a step gives, still on the device.
pub struct StepOutput<B: Backend> {
    /// Which step it was, counted from zero.
    pub step: u64,
    /// Its learning rate.
    pub learning_rate: f64,
    /// Targets it learnt from.
    pub tokens: usize,
    loss: Tensor<B, 1>,
    gradient_norm: Tensor<B, 1>,
}

impl<B: Backend> StepOutput<B> {
    /// The loss before the step, nats a token; waits for the device.
    ///
    /// # Errors
    /// If the device failed.
    pub fn loss(&self) -> Result<f64, Failure> {
        Ok(read(vec![self.loss.clone()])?[0])
    }
}

/// Losses and gradient norms of several steps in one read from the device.
///
/// # Errors
/// If the device failed.
pub fn read_steps<B: Backend>(steps: &[StepOutput<B>]) -> Result<Vec<(f64, f64)>, Failure> {
    let pairs = steps.iter().flat_map(|step| [step.loss.clone(), step.gradient_norm.clone()]);
    Ok(read(pairs.collect())?.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
}

fn read<B: Backend>(scalars: Vec<Tensor<B, 1>>) -> Result<Vec<f64>, Failure> {
    if scalars.is_empty() {
        return Ok(Vec::new());
    }
    let data = Tensor::cat(scalars, 0).cast(DType::F32).try_into_data();
    let data = data.map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
    Ok(data.iter::<f64>().collect())
}

impl<B: Backend> Trainer<B> {
    /// A fresh model on `device`, drawn from the recipe's seed.
    ///
    /// # Errors
    /// If the recipe contradicts itself, or asks for a precision that the device lacks.
    pub fn new(recipe: &Recipe, corpus: Corpus, device: B::Device) -> Result<Self, Failure> {
        let model = recipe.model_config()?.init::<Autodiff<B>>(recipe.training.seed, &device)?;
        Self::with_model(recipe, corpus, model, device)
    }

    /// A given model.
    ///
    /// # Errors
    /// If the recipe asks for a precision that the device lacks.
    pub fn with_model(
        recipe: &Recipe,
        corpus: Corpus,
        model: Transformer<Autodiff<B>>,
        device: B::Device,
    ) -> Result<Self, Failure> {
        let activations = match recipe.training.precision {
            Precision::F32 => FloatDType::F32,
            Precision::Bf16 if B::supports_dtype(&device, DType::BF16) => FloatDType::BF16,
            Precision::Bf16 => {
                let name = B::name(&device);
                return Err(Failure::new(format!("{name} has no bf16: train with --precision f32, or on cuda")));
            }
        };
        let optimizer = Optimizer::new(&model);
        Ok(Self {
            recipe: recipe.clone(),
            corpus,
            model: model.with_activations(activations),
            optimizer,
            step: 0,
            device,
        })
    }

    /// Goes on from a checkpoint's step and optimizer.
    pub(crate) fn restore(&mut self, step: u64, optimizer: Optimizer<B>) {
        (self.step, self.optimizer) = (step, optimizer);
    }

    /// The model as it is.
    pub fn model(&self) -> &Transformer<Autodiff<B>> {
        &self.model
    }

    /// The optimizer as it is.
    pub fn optimizer(&self) -> &Optimizer<B> {
        &self.optimizer
    }

    /// What the model learns from.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// Steps taken.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// One optimizer step over the `batch_size * accumulation` rows that the corpus has for it.
    pub fn train_step(&mut self) -> StepOutput<B> {
        let training = &self.recipe.training;
        let rows = training.batch_size * training.accumulation;
        self.train_on(self.corpus.batch(training.seed, self.step, rows))
    }

    /// One optimizer step over `batch`, in `accumulation` parts; nothing is read from the device.
    pub fn train_on(&mut self, batch: TokenBatch) -> StepOutput<B> {
        let training = self.recipe.training.clone();
        let tokens = batch.target_count().max(1);
        let key = RandomKey::new(training.seed).fold(self.step);

        let mut gradients: Option<ParameterGradients<B>> = None;
        let mut loss: Option<Tensor<B, 1>> = None;
        for (part, batch) in batch.split(training.accumulation).into_iter().enumerate() {
            self.model.set_dropout(Some(key.fold(part as u64)));
            // Each part counts by its targets, so that the sum is the mean over the whole batch.
            let share = batch.target_count() as f64 / tokens as f64;
            let part_loss = language::loss(&self.model, &batch, training.label_smoothing, &self.device);
            let part_loss = if share == 1.0 { part_loss } else { part_loss.mul_scalar(share) };
            let part_gradients = ParameterGradients::take(&self.model, part_loss.backward());
            let part_loss = part_loss.inner();
            gradients = Some(match gradients {
                Some(sum) => sum + part_gradients,
                None => part_gradients,
            });
            loss = Some(match loss {
                Some(sum) => sum + part_loss,
                None => part_loss,
            });
        }
        self.model.set_dropout(None);

        let learning_rate = self.recipe.schedule().learning_rate(self.step);
        let adamw = AdamW {
            learning_rate,
            beta_1: training.beta_1,
            beta_2: training.beta_2,
            epsilon: training.epsilon,
            weight_decay: training.weight_decay,
            max_grad_norm: (training.max_grad_norm > 0.0).then_some(training.max_grad_norm),
            step: 0,
        };
        let zero = || Tensor::zeros([1], &self.device);
        let gradient_norm = match gradients {
            Some(gradients) => self.optimizer.update(&mut self.model, gradients, adamw),
            None => zero(),
        };
        self.step += 1;
        let loss = loss.unwrap_or_else(zero);
        StepOutput { step: self.step - 1, learning_rate, tokens, loss, gradient_norm }
    }

    /// Mean loss over the held-out part, nats a token, about `tokens` of it; one read from the device.
    ///
    /// # Errors
    /// If the device failed.
    pub fn validate(&self, tokens: usize) -> Result<f64, Failure> {
        let model = self.model.valid().with_activations(self.model.activations());
        let batches = self.corpus.valid_batches(self.recipe.training.batch_size, tokens);
        let total: usize = batches.iter().map(|batch| batch.target_count()).sum();
        let mut sum = Tensor::<B, 1>::zeros([1], &self.device);
        for batch in &batches {
            let share = batch.target_count() as f64 / total.max(1) as f64;
            sum = sum + language::loss(&model, batch, 0.0, &self.device).mul_scalar(share);
        }
        Ok(read(vec![sum])?[0])
    }
}
