//! A model, its optimizer and its data: one step, one validation.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use fireclay_kernels::recorder::part;
use fireclay_kernels::{Backend, RandomKey, Rank, backward, compile_ahead};
use fireclay_model::{ModelFolder, Transformer};

use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::recipe::schema::Recipe;
use crate::tasks::counts::TargetCounts;
use crate::tasks::{Batch, ClassificationReport, Task, Validation, ValidationOutput};
use crate::training::batches::Batches;
use crate::training::optim::{Optimizer, ParameterGradients, Settings};

/// Everything that a training step changes, and what it reads.
pub struct Trainer<B: Backend> {
    recipe: Recipe,
    task: Arc<Task>,
    /// Those of the coming steps, from the first that is asked for.
    batches: Option<Batches>,
    model: Transformer<Autodiff<B>>,
    optimizer: Optimizer<B>,
    step: u64,
    device: B::Device,
    rank: Rank,
    /// Bytes in use at the most, where somebody asked.
    peak_memory: Option<u64>,
    /// Whether the kernels of a step were compiled ahead of the first one.
    compiled: bool,
}

type Gradients<B> = <Autodiff<B> as AutodiffBackend>::Gradients;

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
    /// The loss before the step, nats a target; waits for the device.
    ///
    /// # Errors
    /// If the device failed.
    pub fn loss(&self) -> Result<f64, Failure> {
        Ok(read_scalars(vec![self.loss.clone()])?[0])
    }
}

/// Losses and gradient norms of several steps in one read from the device.
///
/// # Errors
/// If the device failed.
pub fn read_steps<B: Backend>(steps: &[StepOutput<B>]) -> Result<Vec<(f64, f64)>, Failure> {
    let pairs = steps.iter().flat_map(|step| [step.loss.clone(), step.gradient_norm.clone()]);
    Ok(read_scalars(pairs.collect())?.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
}

impl<B: Backend> Trainer<B> {
    /// A model for `task` on `device`: the one that the recipe begins from, or a fresh one drawn from its seed.
    ///
    /// # Errors
    /// If the recipe contradicts itself, or asks for a precision that the device lacks, or for a model to begin from
    /// that cannot be read or does not suit the task.
    pub fn new(recipe: &Recipe, task: Task, device: B::Device) -> Result<Self, Failure> {
        let recipe = recipe.clone().sized_for(&task);
        let model = match &recipe.init {
            Some(folder) => recipe.model_from::<Autodiff<B>>(folder, &task, &device)?,
            None => recipe.model_config()?.init(recipe.training.seed, &device)?,
        };
        Self::with_model(&recipe, task, model, device)
    }

    /// A given model.
    ///
    /// # Errors
    /// If the recipe asks for a precision that the device lacks.
    pub fn with_model(
        recipe: &Recipe,
        task: Task,
        model: Transformer<Autodiff<B>>,
        device: B::Device,
    ) -> Result<Self, Failure> {
        let activations = recipe.training.precision.activations::<B>(&device)?;
        recipe.suits(model.config(), &task)?;
        let products = recipe.training.precision.f32_products();
        let optimizer = Optimizer::new(recipe.training.optimizer, &model);
        Ok(Self {
            recipe: recipe.clone(),
            task: Arc::new(task),
            batches: None,
            model: model.with_activations(activations).with_f32_products(products).with_copies(),
            optimizer,
            step: 0,
            device,
            rank: Rank::ONLY,
            peak_memory: None,
            compiled: false,
        })
    }

    /// As one of several ranks, each of which has its own rows of every batch; the only one unless this is called. The gradients
    /// of all are added up.
    pub fn with_rank(mut self, rank: Rank) -> Self {
        (self.rank, self.batches) = (rank, None);
        self
    }

    /// Goes on from a checkpoint's step and optimizer.
    pub(crate) fn restore(&mut self, step: u64, optimizer: Optimizer<B>) {
        (self.step, self.optimizer, self.batches) = (step, optimizer, None);
    }

    /// The model as it is. In bf16 it has copies of its matrices, which operations read: whoever changes the parameters of a
    /// clone takes the copies out first ([`Transformer::take_copies`]).
    pub fn model(&self) -> &Transformer<Autodiff<B>> {
        &self.model
    }

    /// The optimizer as it is.
    pub fn optimizer(&self) -> &Optimizer<B> {
        &self.optimizer
    }

    /// What the model is trained for, and on what.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// The recipe, which knows the sizes that the task's data asks for.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Steps taken.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// One optimizer step over the `batch_size * accumulation` rows that the task has for it, which are made ahead.
    ///
    /// # Errors
    /// If the data is in files that cannot be read any more.
    pub fn train_step(&mut self) -> Result<StepOutput<B>, Failure> {
        let mut batches = match self.batches.take() {
            Some(batches) if batches.next_step() == self.step => batches,
            _ => Batches::new(&self.task, &self.recipe.training, self.rank, self.step)?,
        };
        let batch = batches.take()?;
        self.batches = Some(batches);
        Ok(self.train_on(batch))
    }

    /// Time that steps spent on waiting for their batches.
    pub fn waited_for_data(&self) -> Duration {
        self.batches.as_ref().map_or(Duration::ZERO, Batches::waited)
    }

    /// Checks before the first step what samples would fail on at each validation.
    ///
    /// # Errors
    /// If the prompt for samples holds what the vocabulary lacks, or fills the context.
    pub(crate) fn check_sample(&self) -> Result<(), Failure> {
        let training = &self.recipe.training;
        match &*self.task {
            Task::Language(language) if training.sample_tokens > 0 => {
                language.check_sample(&training.sample_prompt, self.model.config().context_length)
            }
            _ => Ok(()),
        }
    }

    /// Text that the model writes now, after a prompt or where that is empty from the beginning of a text; none from a task without
    /// text.
    ///
    /// # Errors
    /// If the prompt holds what the vocabulary lacks, or the device fails.
    pub fn sample(&self, prompt: &str, tokens: usize) -> Result<Option<String>, Failure> {
        let Task::Language(language) = &*self.task else { return Ok(None) };
        language.sample(self.model.valid(), prompt, tokens, self.recipe.training.seed, &self.device).map(Some)
    }

    /// One optimizer step over `batch`, in `accumulation` parts; nothing is read from the device.
    pub fn train_on(&mut self, batch: impl Into<Batch>) -> StepOutput<B> {
        let batch: Batch = batch.into();
        let training = self.recipe.training.clone();
        let (whole, tokens) = (batch.counts(), batch.tokens());
        let key = RandomKey::new(training.seed).fold(self.step);

        let mut gradients = None;
        let mut loss: Option<Tensor<B, 1>> = None;
        for (part, batch) in batch.split(training.accumulation).into_iter().enumerate() {
            self.model.set_dropout(Some(key.fold(part as u64)));
            if !std::mem::replace(&mut self.compiled, true) {
                let device = self.device.clone();
                compile_ahead::<B>(&device, || drop(self.forward_backward(&batch, whole, None)));
            }
            let (part_loss, of_parts) = self.forward_backward(&batch, whole, gradients);
            gradients = Some(of_parts);
            loss = Some(match loss {
                Some(sum) => sum + part_loss,
                None => part_loss,
            });
        }
        self.model.set_dropout(None);

        note_memory::<B>(&mut self.peak_memory, &self.device);
        let learning_rate = self.recipe.schedule().learning_rate(self.step);
        let settings = Settings {
            learning_rate,
            beta_1: training.beta_1,
            beta_2: training.beta_2,
            epsilon: training.epsilon,
            weight_decay: training.weight_decay,
            max_grad_norm: (training.max_grad_norm > 0.0).then_some(training.max_grad_norm),
            step: 0,
        };
        let _in_optimizer = part("optimizer");
        let zero = || Tensor::zeros([1], &self.device);
        let gradient_norm = match gradients {
            Some(gradients) => {
                let gradients = ParameterGradients::take(&self.model, gradients).sum_over_ranks(self.rank);
                self.optimizer.update(&mut self.model, gradients, settings)
            }
            None => zero(),
        };
        self.step += 1;
        let loss = loss.unwrap_or_else(zero);
        StepOutput { step: self.step - 1, learning_rate, tokens, loss, gradient_norm }
    }

    /// The loss of a part of a batch whose targets are `whole`, by which it counts, so that those of all parts add up to the mean over the batch; and
    /// its gradients, added to those of `earlier` parts.
    fn forward_backward(
        &mut self,
        part: &Batch,
        whole: TargetCounts,
        earlier: Option<Gradients<B>>,
    ) -> (Tensor<B, 1>, Gradients<B>) {
        let training = &self.recipe.training;
        let mut checkpoints = None;
        let loss =
            part.loss(&self.model, training, whole, &self.device, |tokens| match training.checkpoint_activations {
                0 => self.model.forward(tokens),
                every => {
                    let (hidden, kept) = self.model.forward_with_checkpoints(tokens, every);
                    checkpoints = Some(kept);
                    hidden
                }
            });
        note_memory::<B>(&mut self.peak_memory, &self.device);
        let gradients = match checkpoints {
            Some(checkpoints) => {
                let note = || note_memory::<B>(&mut self.peak_memory, &self.device);
                self.model.backward(loss.clone(), checkpoints, earlier, note)
            }
            None => backward(loss.clone(), earlier),
        };
        (loss.inner(), gradients)
    }

    /// From here on notes how much of the device's memory is in use, behind each forward pass and before each update: the host waits for
    /// that, so it is not for training at speed.
    pub fn watch_memory(&mut self) {
        self.peak_memory = Some(0);
    }

    /// Bytes in use at the most since [`watch_memory`](Self::watch_memory), where the device tells.
    pub fn peak_memory(&self) -> Option<u64> {
        self.peak_memory.filter(|bytes| *bytes > 0)
    }

    /// How the model does on held-out data: about `tokens` of a language's, all of the utterances.
    ///
    /// # Errors
    /// If the device failed.
    pub fn validate(&self, tokens: usize) -> Result<Validation, Failure> {
        Ok(self.evaluate(tokens)?.validation)
    }

    /// As [`validate`](Self::validate), with what it was about.
    pub(crate) fn evaluate(&self, tokens: usize) -> Result<ValidationOutput, Failure> {
        self.task.validate(&self.inference_model(), &self.recipe.training, tokens, &self.device)
    }

    /// Writes the model as it is into a folder laid out as on the hub, with its tokenizer and, for utterances, its labels.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn save(&self, folder: &Path) -> Result<(), Failure> {
        std::fs::create_dir_all(folder).map_err(Failure::io(folder))?;
        ModelFolder::new(folder).save(&self.model.valid())?;
        self.task.save(folder)
    }

    /// The model without gradients.
    fn inference_model(&self) -> Transformer<B> {
        let model = self.model.valid().with_activations(self.model.activations());
        model.with_f32_products(self.model.f32_products())
    }

    /// How `model`, or the one in training where there is none, does on the test data, where the task has such.
    ///
    /// # Errors
    /// If the device failed.
    pub fn test(&self, model: Option<Transformer<B>>) -> Result<Option<ClassificationReport>, Failure> {
        if !self.task.has_test() {
            return Ok(None);
        }
        self.task.test(&model.unwrap_or_else(|| self.inference_model()), &self.device)
    }
}

/// Notes how much of the device's memory is in use, where somebody asked.
fn note_memory<B: Backend>(peak: &mut Option<u64>, device: &B::Device) {
    if let Some(peak) = peak {
        *peak = B::memory(device).map_or(*peak, |memory| memory.in_use.max(*peak));
    }
}
