//! A model, its optimizer and its data: training steps and validation.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use fireclay_kernels::recorder::part;
use fireclay_kernels::{Backend, Collective, Format, RandomKey, backward, compile_ahead};
use fireclay_model::{
    AdapterSaver, Family, LoraConfig, ModelFolder, RouterLosses, Routing, Transformer, trained_parameters,
};

use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::precision::Precision;
use crate::recipe::{AdapterKind, Recipe, Reduce};
use crate::tasks::counts::TargetCounts;
use crate::tasks::resolve::InitialModel;
use crate::tasks::{Batch, Rewards, Task, TestReport, Validation, ValidationOutput};
use crate::training::batches::Batches;
use crate::training::expert_balance::{ExpertBalance, ExpertLayers};
use crate::training::memory::{MemoryEstimate, above_limit};
use crate::training::optim::{Optimizer, ParameterGradients, Settings, Sharding};
use crate::training::parallel::{Command, Ranks};

/// The state and data of training.
pub struct Trainer<B: Backend> {
    recipe: Recipe,
    task: Arc<Task>,
    /// Prefetched batches, from the first one requested.
    batches: Option<Batches>,
    model: Transformer<Autodiff<B>>,
    /// What preferences are measured against: the model as the run began.
    reference: Option<Transformer<Autodiff<B>>>,
    /// The adapter that is trained, with the family of its base.
    lora: Option<(Family, LoraConfig)>,
    optimizer: Optimizer<B>,
    step: u64,
    device: B::Device,
    /// Who else trains this model, and what they exchange tensors through.
    ranks: Ranks,
    collective: Collective,
    /// Peak memory in bytes, if watched.
    peak_memory: Option<u64>,
    /// Whether the kernels of a step were compiled ahead of the first one.
    compiled: bool,
    /// Steps that this process has trained, up to those that are watched.
    trained_steps: u64,
}

/// Steps whose memory is compared with a limit: reading it takes the host a moment.
const WATCHED_STEPS: u64 = 20;

type Gradients<B> = <Autodiff<B> as AutodiffBackend>::Gradients;

/// The results of a step, still on the device.
pub struct StepOutput<B: Backend> {
    /// The step, counted from zero.
    pub step: u64,
    /// Its learning rate.
    pub learning_rate: f64,
    /// Number of targets, of all ranks.
    pub tokens: usize,
    /// The loss, then rewards and what routers record, if any.
    figures: Tensor<B, 1>,
    /// The layers with experts, of whose routers there are figures.
    experts: Option<ExpertLayers>,
    gradient_norm: Tensor<B, 1>,
}

/// The figures of a step, read from the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepFigures {
    /// The loss before the update.
    pub loss: f64,
    /// The global norm of the gradients before clipping.
    pub gradient_norm: f64,
    /// Rewards of preference pairs.
    pub rewards: Option<Rewards>,
    /// How evenly tokens were distributed over experts.
    pub experts: Option<ExpertBalance>,
}

impl<B: Backend> StepOutput<B> {
    /// The loss before the update, in nats per target; waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn loss(&self) -> Result<f64, Failure> {
        Ok(read_scalars(vec![self.figures.clone()])?[0])
    }
}

/// Losses and gradient norms of several steps, in one read from the device.
///
/// # Errors
/// If the device fails.
pub fn read_steps<B: Backend>(steps: &[StepOutput<B>]) -> Result<Vec<(f64, f64)>, Failure> {
    Ok(read_figures(steps)?.into_iter().map(|figures| (figures.loss, figures.gradient_norm)).collect())
}

/// The figures of several steps of a run, in one read from the device.
///
/// # Errors
/// If the device fails.
pub fn read_figures<B: Backend>(steps: &[StepOutput<B>]) -> Result<Vec<StepFigures>, Failure> {
    let Some(first) = steps.first() else { return Ok(Vec::new()) };
    let (count, layers) = (first.figures.dims()[0], first.experts);
    let routed = count - layers.map_or(0, ExpertLayers::count);
    let all = steps.iter().flat_map(|step| [step.figures.clone(), step.gradient_norm.clone()]);
    let of_step = |figures: &[f64]| StepFigures {
        loss: figures[0],
        gradient_norm: figures[count],
        rewards: Rewards::of(&figures[1..routed]),
        experts: layers.and_then(|layers| layers.balance(&figures[routed..count])),
    };
    Ok(read_scalars(all.collect())?.chunks_exact(count + 1).map(of_step).collect())
}

impl<B: Backend> Trainer<B> {
    /// Creates a model for `task` on `device`: initialized from the recipe's model, or from its
    /// seed.
    ///
    /// # Errors
    /// If the recipe contradicts itself, the device lacks its precision, or its initial model
    /// cannot be read or does not suit the task.
    pub fn new(recipe: &Recipe, task: Task, device: B::Device) -> Result<Self, Failure> {
        Self::of_rank(recipe, task, device, Ranks::only(), Collective::only())
    }

    /// The same as one of several ranks, each of which has its own rows of every batch. What the
    /// first one is asked for it tells the others, which follow.
    pub(crate) fn of_rank(
        recipe: &Recipe,
        task: Task,
        device: B::Device,
        ranks: Ranks,
        collective: Collective,
    ) -> Result<Self, Failure> {
        let recipe = recipe.clone().sized_for(&task);
        let initial = match &recipe.init {
            Some(folder) => recipe.model_from::<Autodiff<B>>(folder, &task, None, &device)?,
            None if recipe.training.adapter == AdapterKind::Lora => {
                return Err(Failure::usage(
                    "training.adapter is lora: an adapter needs a model to be on, --init MODEL",
                ));
            }
            None => {
                InitialModel { model: recipe.model_config()?.init(recipe.training.seed, &device)?, reference: None }
            }
        };
        Self::with_model_of_rank(&recipe, task, initial, device, (ranks, collective))
    }

    /// Trains a given model. Preferences are measured against that model as it is given.
    ///
    /// # Errors
    /// If the device lacks the recipe's precision.
    pub fn with_model(
        recipe: &Recipe,
        task: Task,
        model: Transformer<Autodiff<B>>,
        device: B::Device,
    ) -> Result<Self, Failure> {
        let reference = task.has_reference().then(|| model.clone().no_grad());
        let initial = InitialModel { model, reference };
        Self::with_model_of_rank(recipe, task, initial, device, (Ranks::only(), Collective::only()))
    }

    pub(crate) fn with_model_of_rank(
        recipe: &Recipe,
        task: Task,
        InitialModel { model, reference }: InitialModel<Autodiff<B>>,
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
        let prepared = |model: Transformer<Autodiff<B>>| {
            model.with_activations(activations).with_f32_products(products).with_copies()
        };
        let lora = match (&recipe.init, training.adapter) {
            (Some(base), AdapterKind::Lora) => {
                let (family, config) = ModelFolder::new(base).config()?;
                let new_tokens = model.config().vocab_size != config.vocab_size || task.initial_rows().is_some();
                Some((family, recipe.lora_config(base, family, model.config(), new_tokens)?))
            }
            _ => None,
        };
        Ok(Self {
            recipe: recipe.clone(),
            task: Arc::new(task),
            batches: None,
            model: prepared(model),
            reference: reference.map(prepared),
            lora,
            optimizer,
            step: 0,
            device,
            ranks,
            collective,
            peak_memory: None,
            compiled: false,
            trained_steps: 0,
        })
    }

    /// Restores step and optimizer of a checkpoint.
    pub(crate) fn restore(&mut self, step: u64, optimizer: Optimizer<B>) {
        (self.step, self.optimizer, self.batches) = (step, optimizer, None);
    }

    /// The current model. In bf16 it has copies of its matrices, which operations read: to change
    /// the parameters of a clone, take the copies out first ([`Transformer::take_copies`]). With
    /// several ranks each has its own part of such parameters up to date, and the others as of the
    /// last [`validate`](Self::validate) or [`save`](Self::save).
    pub fn model(&self) -> &Transformer<Autodiff<B>> {
        &self.model
    }

    /// The current optimizer.
    pub fn optimizer(&self) -> &Optimizer<B> {
        &self.optimizer
    }

    /// The task, with its data.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// The recipe, sized for the task's data.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Which part of the model is trained, if it is an adapter, and what the frozen weights are
    /// stored as.
    pub(crate) fn described_training(&self) -> String {
        if self.lora.is_none() {
            return String::new();
        }
        let trained = trained_parameters(&self.model).into_iter();
        let trained: usize = trained.map(|(_, _, shape, _)| shape.iter().product::<usize>()).sum();
        let mut formats: Vec<&str> = Vec::new();
        for (path, format) in self.model.clone().formats() {
            let name = format.map_or("floats", Format::name);
            if path.starts_with("blocks.") && !formats.contains(&name) {
                formats.push(name);
            }
        }
        format!(", of which an adapter of {:.2}M on {} is trained", trained as f64 / 1e6, formats.join(", "))
    }

    /// How much memory a step needs.
    pub(crate) fn memory_estimate(&self) -> MemoryEstimate {
        MemoryEstimate::of(&self.model, &self.recipe, self.reference.is_some(), self.ranks())
    }

    /// How many train it together.
    pub(crate) fn ranks(&self) -> usize {
        self.collective.rank().ranks
    }

    /// Completed steps.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// One optimizer step over the next `batch_size * accumulation` rows, which are prefetched.
    ///
    /// # Errors
    /// If the data's files cannot be read any more.
    pub fn train_step(&mut self) -> Result<StepOutput<B>, Failure> {
        self.ranks.tell(&Command::Step);
        let mut batches = match self.batches.take() {
            Some(batches) if batches.next_step() == self.step => batches,
            _ => Batches::new(&self.task, &self.recipe.training, self.step)?,
        };
        let batch = batches.take()?;
        self.batches = Some(batches);
        // Steps are alike: the first ones show what all take.
        let limit = self.recipe.training.memory_limit()?.filter(|_| self.trained_steps < WATCHED_STEPS);
        if limit.is_some() && self.peak_memory.is_none() {
            self.watch_memory();
        }
        self.trained_steps += 1;
        let output = self.train_on(batch);
        above_limit(self.peak_memory(), limit, output.step)?;
        if limit.is_some() && self.trained_steps == WATCHED_STEPS {
            self.peak_memory = None;
        }
        Ok(output)
    }

    /// Time that steps spent waiting for batches.
    pub fn waited_for_data(&self) -> Duration {
        self.batches.as_ref().map_or(Duration::ZERO, Batches::waited)
    }

    /// Checks before the first step that samples can be generated.
    ///
    /// # Errors
    /// If the sample prompt has tokens outside the vocabulary, or fills the context.
    pub(crate) fn check_sample(&self) -> Result<(), Failure> {
        let training = &self.recipe.training;
        match &*self.task {
            Task::Language(language) if training.sample_tokens > 0 => {
                language.check_sample(&training.sample_prompt, self.model.config().context_length)
            }
            _ => Ok(()),
        }
    }

    /// Generates text after a prompt or, if it is empty, from the start of a document; `None` for
    /// tasks without text.
    ///
    /// # Errors
    /// If the prompt has tokens outside the vocabulary, or the device fails.
    pub fn sample(&self, prompt: &str, tokens: usize) -> Result<Option<String>, Failure> {
        let Task::Language(language) = &*self.task else { return Ok(None) };
        language.sample(self.model.valid(), prompt, tokens, self.recipe.training.seed, &self.device).map(Some)
    }

    /// One optimizer step over `batch`, in `accumulation` parts; reads nothing from the device.
    /// Each of several ranks is given the whole batch.
    pub fn train_on(&mut self, batch: impl Into<Batch>) -> StepOutput<B> {
        let batch: Batch = batch.into();
        let training = self.recipe.training.clone();
        let (whole, tokens) = (batch.counts(), batch.tokens());
        let key = RandomKey::new(training.seed).fold(self.step);

        let mut gradients = None;
        let mut figures: Option<Tensor<B, 1>> = None;
        let rank = self.collective.rank();
        for (part, share) in batch.share(training.accumulation, rank).into_iter().enumerate() {
            let Some(batch) = share.batch else { continue };
            self.model.set_dropout_from(Some(key.fold(part as u64)), share.first_row * batch.seq_length());
            if !std::mem::replace(&mut self.compiled, true) {
                let device = self.device.clone();
                compile_ahead::<B>(&device, || drop(self.forward_backward(&batch, whole, None)));
            }
            let (of_part, of_parts) = self.forward_backward(&batch, whole, gradients);
            gradients = Some(of_parts);
            figures = Some(match figures {
                Some(sum) => sum + of_part,
                None => of_part,
            });
        }
        self.model.set_dropout(None);
        self.model.set_router_losses(None);

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
        let zeros = |count: usize| Tensor::zeros([count], &self.device);
        let experts = self.expert_layers();
        let count =
            1 + if self.reference.is_some() { Rewards::COUNT } else { 0 } + experts.map_or(0, ExpertLayers::count);
        let figures = figures.unwrap_or_else(|| zeros(count));
        // Where no rank has a row there is nothing to learn; where others have, they need this
        // one's zeros.
        let (gradient_norm, figures) = match gradients {
            None if rank.ranks == 1 || tokens == 0 => (zeros(1), figures),
            gradients => {
                let gradients = match gradients {
                    Some(mut gradients) => {
                        self.model.mask_adapter_gradients(&mut gradients);
                        ParameterGradients::take(&self.model, gradients)
                    }
                    None => ParameterGradients::none(&self.model),
                };
                self.optimizer.update(&mut self.model, gradients, settings, figures)
            }
        };
        self.step += 1;
        StepOutput { step: self.step - 1, learning_rate, tokens, figures, experts, gradient_norm }
    }

    /// The layers of the model with experts, if any.
    fn expert_layers(&self) -> Option<ExpertLayers> {
        let config = self.model.config();
        let layers = config.layers().filter(|layer| layer.experts.is_some()).count();
        (layers > 0).then_some(ExpertLayers { layers, experts: config.experts })
    }

    /// The loss of a part of a batch with targets `whole`, and rewards and routers' figures where
    /// there are any, scaled so that those of all parts sum to the batch's mean, and its gradients,
    /// added to those of `earlier` parts.
    fn forward_backward(
        &mut self,
        part: &Batch,
        whole: TargetCounts,
        earlier: Option<Gradients<B>>,
    ) -> (Tensor<B, 1>, Gradients<B>) {
        let (training, (share, _)) = (&self.recipe.training, part.counts().shares(whole));
        let losses = RouterLosses { balance: share * training.balance_loss, z: share * training.router_z_loss };
        self.model.set_router_losses(Some(losses));
        let (mut checkpoints, mut routing) = (None, None);
        let models = (&self.model, self.reference.as_ref());
        let forward = |tokens| match self.recipe.training.checkpoint_activations {
            0 => {
                let (hidden, routed) = self.model.forward_routed(tokens);
                routing = routed;
                hidden
            }
            every => {
                let (hidden, mut kept) = self.model.forward_with_checkpoints(tokens, every);
                (routing, checkpoints) = (kept.take_routing(), Some(kept));
                hidden
            }
        };
        let (loss, rewards) = part.loss(models, &self.recipe, whole, &self.device, forward);
        note_memory::<B>(&mut self.peak_memory, &self.device);
        let gradients = match checkpoints {
            Some(checkpoints) => {
                let note = || note_memory::<B>(&mut self.peak_memory, &self.device);
                self.model.backward(loss.clone(), checkpoints, earlier, note)
            }
            None => backward(loss.clone(), earlier),
        };
        let mut figures = vec![loss.inner()];
        figures.extend(rewards.map(Tensor::inner));
        if let Some(Routing { balance, z, loads }) = routing {
            let loads = loads.inner();
            let count = loads.dims().iter().product::<usize>();
            figures.extend([balance, z].map(|loss| loss.inner().mul_scalar(share)));
            figures.push(loads.reshape([count]));
        }
        let figures = if figures.len() == 1 { figures.remove(0) } else { Tensor::cat(figures, 0) };
        (figures, gradients)
    }

    /// Tracks peak device memory from here on, after each forward pass and before each update. The
    /// host waits for each reading: not for training at full speed.
    pub fn watch_memory(&mut self) {
        self.peak_memory = Some(0);
    }

    /// Peak bytes since [`watch_memory`](Self::watch_memory), if the device reports them.
    pub fn peak_memory(&self) -> Option<u64> {
        self.peak_memory.filter(|bytes| *bytes > 0)
    }

    /// Validates: on about `tokens` held-out tokens of a language task, on all utterances
    /// otherwise.
    ///
    /// # Errors
    /// If the device failed.
    pub fn validate(&mut self, tokens: usize) -> Result<Validation, Failure> {
        Ok(self.evaluate(tokens)?.validation)
    }

    /// As [`validate`](Self::validate), with what it was about.
    pub(crate) fn evaluate(&mut self, tokens: usize) -> Result<ValidationOutput, Failure> {
        self.ranks.tell(&Command::Judge { tokens });
        self.optimizer.complete(&mut self.model);
        let reference = self.reference.as_ref().map(for_inference);
        let model = for_inference(&self.model);
        self.task.validate(&model, reference.as_ref(), &self.recipe, tokens, &self.device, &self.collective)
    }

    /// Gives the model what other ranks have updated of its parameters.
    pub(crate) fn complete(&mut self) {
        self.ranks.tell(&Command::Complete);
        self.optimizer.complete(&mut self.model);
    }

    /// Takes part in what the first rank saves: its optimizer's state, tensor by tensor, in the
    /// order of their names.
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

    /// Writes the current model to a folder in the hub's layout, with tokenizer and, for
    /// utterances, labels.
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
        let model = self.model.valid();
        match &self.lora {
            Some((family, config)) => AdapterSaver { family: *family, config }.save(&model, folder)?,
            None => ModelFolder::new(folder).save(&model)?,
        }
        self.task.save(folder)
    }

    /// The test report of `model`, or of the current model, if the task has test data.
    ///
    /// # Errors
    /// If the device fails.
    pub fn test(&self, model: Option<Transformer<B>>) -> Result<Option<TestReport>, Failure> {
        if !self.task.has_test() {
            return Ok(None);
        }
        self.task.test(&model.unwrap_or_else(|| for_inference(&self.model)), &self.device)
    }
}

/// A model without autodiff.
fn for_inference<B: Backend>(model: &Transformer<Autodiff<B>>) -> Transformer<B> {
    model.valid().with_activations(model.activations()).with_f32_products(model.f32_products())
}

/// Records current device memory, if watched.
fn note_memory<B: Backend>(peak: &mut Option<u64>, device: &B::Device) {
    if let Some(peak) = peak {
        *peak = B::memory(device).map_or(*peak, |memory| memory.in_use.max(*peak));
    }
}
