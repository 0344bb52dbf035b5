//! A model, its optimizer and its data: one step, one validation.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use fireclay_kernels::recorder::part;
use fireclay_kernels::{Backend, Collective, RandomKey, backward, compile_ahead};
use fireclay_model::{ModelFolder, Transformer};

use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::precision::Precision;
use crate::recipe::schema::{Recipe, Reduce};
use crate::tasks::counts::TargetCounts;
use crate::tasks::{Batch, ClassificationReport, Judged, Task, Validation};
use crate::training::batches::Batches;
use crate::training::optim::{Optimizer, ParameterGradients, Settings, Sharding};
use crate::training::parallel::{Command, Ranks};

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
    /// Who else trains this model, and what they exchange tensors through.
    ranks: Ranks,
    collective: Collective,
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
    /// Targets that all ranks learnt from.
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
        Self::of_rank(recipe, task, device, Ranks::only(), Collective::only())
    }

    /// The same as one of several ranks, each of which has its own rows of every batch. What the first one is asked for it tells the
    /// others, which follow.
    pub(crate) fn of_rank(
        recipe: &Recipe,
        task: Task,
        device: B::Device,
        ranks: Ranks,
        collective: Collective,
    ) -> Result<Self, Failure> {
        let recipe = recipe.clone().sized_for(&task);
        let model = match &recipe.init {
            Some(folder) => recipe.model_from::<Autodiff<B>>(folder, &task, &device)?,
            None => recipe.model_config()?.init(recipe.training.seed, &device)?,
        };
        Self::with_model_of_rank(&recipe, task, model, device, (ranks, collective))
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
        Self::with_model_of_rank(recipe, task, model, device, (Ranks::only(), Collective::only()))
    }

    pub(crate) fn with_model_of_rank(
        recipe: &Recipe,
        task: Task,
        model: Transformer<Autodiff<B>>,
        device: B::Device,
        (ranks, collective): (Ranks, Collective),
    ) -> Result<Self, Failure> {
        let (training, count) = (&recipe.training, collective.rank().ranks);
        if training.batch_size < count {
            let rows = training.batch_size;
            return Err(Failure::usage(format!(
                "training.batch_size is {rows}: {count} ranks need a row each at least"
            )));
        }
        if count > 1 && training.reduce == Reduce::Bf16 {
            let lacks = |failure: Failure| Failure::usage(format!("training.reduce is bf16: {failure}"));
            Precision::Bf16.activations::<B>(&device).map_err(lacks)?;
        }
        let activations = recipe.training.precision.activations::<B>(&device)?;
        recipe.suits(model.config(), &task)?;
        let products = recipe.training.precision.f32_products();
        let sharding = Sharding { collective: collective.clone(), shard: training.shard, reduce: training.reduce };
        let optimizer = Optimizer::of_rank(training.optimizer, &model, sharding);
        Ok(Self {
            recipe: recipe.clone(),
            task: Arc::new(task),
            batches: None,
            model: model.with_activations(activations).with_f32_products(products).with_copies(),
            optimizer,
            step: 0,
            device,
            ranks,
            collective,
            peak_memory: None,
            compiled: false,
        })
    }

    /// Goes on from a checkpoint's step and optimizer.
    pub(crate) fn restore(&mut self, step: u64, optimizer: Optimizer<B>) {
        (self.step, self.optimizer, self.batches) = (step, optimizer, None);
    }

    /// The model as it is. In bf16 it has copies of its matrices, which operations read: whoever changes the parameters of a
    /// clone takes the copies out first ([`Transformer::take_copies`]). Of several ranks each has the parameters of which there are
    /// copies as [`validate`](Self::validate) and [`save`](Self::save) left them, and those that it updates.
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

    /// How many train it together.
    pub(crate) fn ranks(&self) -> usize {
        self.collective.rank().ranks
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
        self.ranks.tell(&Command::Step);
        let mut batches = match self.batches.take() {
            Some(batches) if batches.next_step() == self.step => batches,
            _ => Batches::new(&self.task, &self.recipe.training, self.step)?,
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

    /// One optimizer step over `batch`, in `accumulation` parts; nothing is read from the device. Of several ranks each is given the
    /// whole batch.
    pub fn train_on(&mut self, batch: impl Into<Batch>) -> StepOutput<B> {
        let batch: Batch = batch.into();
        let training = self.recipe.training.clone();
        let (whole, tokens) = (batch.counts(), batch.tokens());
        let key = RandomKey::new(training.seed).fold(self.step);

        let mut gradients = None;
        let mut loss: Option<Tensor<B, 1>> = None;
        let rank = self.collective.rank();
        for (part, share) in batch.share(training.accumulation, rank).into_iter().enumerate() {
            let Some(batch) = share.batch else { continue };
            self.model.set_dropout_from(Some(key.fold(part as u64)), share.first_row);
            if !std::mem::replace(&mut self.compiled, true) {
                let device = self.device.clone();
                compile_ahead::<B>(&device, || drop(self.learn_from(&batch, whole, None)));
            }
            let (part_loss, of_parts) = self.learn_from(&batch, whole, gradients);
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
        let loss = loss.unwrap_or_else(zero);
        // Where no rank has a row there is nothing to learn; where others have, they need this one's zeros.
        let (gradient_norm, loss) = match gradients {
            None if rank.ranks == 1 || tokens == 0 => (zero(), loss),
            gradients => {
                let gradients = match gradients {
                    Some(gradients) => ParameterGradients::take(&self.model, gradients),
                    None => ParameterGradients::none(&self.model),
                };
                self.optimizer.update(&mut self.model, gradients, settings, loss)
            }
        };
        self.step += 1;
        StepOutput { step: self.step - 1, learning_rate, tokens, loss, gradient_norm }
    }

    /// The loss of a part of a batch whose targets are `whole`, by which it counts, so that those of all parts add up to the mean over the batch; and
    /// its gradients, added to those of `earlier` parts.
    fn learn_from(
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
    pub fn validate(&mut self, tokens: usize) -> Result<Validation, Failure> {
        Ok(self.judge(tokens)?.validation)
    }

    /// As [`validate`](Self::validate), with what it was about.
    pub(crate) fn judge(&mut self, tokens: usize) -> Result<Judged, Failure> {
        self.ranks.tell(&Command::Judge { tokens });
        self.optimizer.complete(&mut self.model);
        self.task.validate(&self.inference_model(), &self.recipe.training, tokens, &self.device, &self.collective)
    }

    /// Gives the model what other ranks have updated of its parameters.
    pub(crate) fn complete(&mut self) {
        self.ranks.tell(&Command::Complete);
        self.optimizer.complete(&mut self.model);
    }

    /// Takes part in what the first rank saves: its optimizer's state, tensor by tensor, in the order of their names.
    pub(crate) fn follow_save(&mut self) {
        self.optimizer.complete(&mut self.model);
        let mut tensors: Vec<_> = self.optimizer.state().collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        tensors.iter().for_each(|tensor| drop(tensor.whole()));
    }

    /// Tells the other ranks to take part in a checkpoint.
    pub(crate) fn begin_save(&mut self) {
        self.ranks.tell(&Command::Save);
        self.optimizer.complete(&mut self.model);
    }

    /// Writes the model as it is into a folder laid out as on the hub, with its tokenizer and, for utterances, its labels.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn save(&mut self, folder: &Path) -> Result<(), Failure> {
        self.complete();
        self.write(folder)
    }

    /// [`save`](Self::save) of a model that is complete.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), Failure> {
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
