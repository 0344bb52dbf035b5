//! Optimizers of a transformer's trained parameters, one file each.
//!
//! An optimizer is a file here that implements `Update`, and a line in [`OptimizerKind`] and in
//! `with_update`. Its state is saved under `<optimizer>.<state>.<parameter>`.

mod adamw;
mod share;

use std::ops::Range;

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use fireclay_kernels::{Backend, reshape};
use fireclay_model::{Transformer, trained_parameters};

pub use self::share::Sharding;
use self::share::{Share, gather, reduce};
use crate::recipe::schema::{OptimizerKind, Shard};

/// Evaluates an expression with `$name` as the [`Update`] of an optimizer kind.
macro_rules! with_update {
    ($kind:expr, $name:ident => $body:expr) => {
        match $kind {
            OptimizerKind::AdamW => {
                type $name = adamw::AdamW;
                $body
            }
        }
    };
}

/// Hyperparameters of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay of the running mean of the gradient (beta 1).
    pub beta_1: f64,
    /// Decay of the running mean of its square (beta 2).
    pub beta_2: f64,
    /// Added to the denominator.
    pub epsilon: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Maximum global gradient norm.
    pub max_grad_norm: Option<f64>,
    /// The step, counted from one.
    pub step: u64,
}

/// A parameter during a step, or this rank's shard of it. All tensors are flattened, `[elements]`,
/// and f32, except for the copy.
struct Parameter<B: Backend> {
    /// The parameter's shape.
    shape: Vec<usize>,
    /// Whether weight decay applies: to matrices.
    decays: bool,
    value: Tensor<B, 1>,
    gradient: Tensor<B, 1>,
    /// Optimizer state, in the order of [`Update::STATE`].
    state: Vec<Tensor<B, 1>>,
    /// The copy in the dtype of the activations, if operations read one: refreshed with the value.
    copy: Option<Tensor<B, 1>>,
}

/// An optimizer.
trait Update<B: Backend> {
    /// Its name in recipes and checkpoints.
    const NAME: &'static str;
    /// Its state per parameter: f32, of the parameter's size, initially zero.
    const STATE: &'static [&'static str];

    /// Updates `parameters` and returns them in the same order, with the global norm of the
    /// gradients before clipping, `[1]`, on the device. If `norm` is given, it is used: the
    /// parameters are then only a shard of all.
    fn update(
        parameters: Vec<Parameter<B>>,
        settings: &Settings,
        norm: Option<Tensor<B, 1>>,
    ) -> (Vec<Parameter<B>>, Tensor<B, 1>);
}

/// Gradients of the trained parameters in the order of [`trained_parameters`], each flattened;
/// `None` for parameters without one.
#[derive(Clone, Debug)]
pub struct ParameterGradients<B: Backend>(Vec<Option<Tensor<B, 1>>>);

impl<B: Backend> ParameterGradients<B> {
    /// Takes the gradients of `model`'s parameters from a backward pass.
    pub fn take(model: &Transformer<Autodiff<B>>, gradients: <Autodiff<B> as AutodiffBackend>::Gradients) -> Self {
        struct Taker<B: Backend> {
            gradients: <Autodiff<B> as AutodiffBackend>::Gradients,
            taken: Vec<Option<Tensor<B, 1>>>,
        }
        impl<B: Backend> ModuleVisitor<Autodiff<B>> for Taker<B> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
                let value = param.val();
                if value.is_require_grad() {
                    self.taken.push(value.grad_remove(&mut self.gradients).map(flat));
                }
            }
        }
        let mut taker = Taker { gradients, taken: Vec::new() };
        model.visit(&mut taker);
        Self(taker.taken)
    }

    /// Gradients of a model that contributed nothing to this step.
    pub(crate) fn none(model: &Transformer<Autodiff<B>>) -> Self {
        Self(trained_ids(model).iter().map(|_| None).collect())
    }

    /// One per parameter.
    pub fn into_inner(self) -> Vec<Option<Tensor<B, 1>>> {
        self.0
    }
}

/// Optimizer state of a parameter.
#[derive(Clone, Debug)]
struct Kept<B: Backend> {
    id: ParamId,
    name: String,
    shape: Vec<usize>,
    /// The elements that this rank updates and stores the state of.
    share: Share,
    state: Vec<Tensor<B, 1>>,
    /// If this rank has only a shard of the parameter: its values, and those of the copy once one
    /// exists. The model always has the whole copy. If a parameter has a copy, the model gets the
    /// values of other ranks only in [`Optimizer::complete`].
    own: Option<(Tensor<B, 1>, Option<Tensor<B, 1>>)>,
}

/// An optimizer and its state for every trained parameter.
#[derive(Clone, Debug)]
pub struct Optimizer<B: Backend> {
    kind: OptimizerKind,
    kept: Vec<Kept<B>>,
    steps: u64,
    sharding: Sharding,
    /// Whether the model still lacks values that other ranks have updated.
    incomplete: bool,
}

/// A state tensor of a parameter, of which each rank may have only a shard.
pub struct StateTensor<'a, B: Backend> {
    /// Its name in checkpoints.
    pub name: String,
    share: Share,
    own: &'a Tensor<B, 1>,
    sharding: &'a Sharding,
}

impl<B: Backend> StateTensor<'_, B> {
    /// Number of elements of the whole tensor.
    pub fn elements(&self) -> usize {
        self.share.elements
    }

    /// The whole tensor, all-gathered. All ranks must call this in the same order.
    pub fn whole(&self) -> Tensor<B, 1> {
        match self.share.is_part() {
            true => gather(vec![self.own.clone()], &[self.share], &self.sharding.collective).remove(0),
            false => self.own.clone(),
        }
    }
}

impl<B: Backend> Optimizer<B> {
    /// An optimizer for the currently trained parameters of `model`, on one rank.
    pub fn new(kind: OptimizerKind, model: &Transformer<Autodiff<B>>) -> Self {
        Self::of_rank(kind, model, Sharding::only())
    }

    /// [`new`](Self::new) for one rank of several.
    pub fn of_rank(kind: OptimizerKind, model: &Transformer<Autodiff<B>>, sharding: Sharding) -> Self {
        let count = with_update!(kind, U => <U as Update<B>>::STATE.len());
        let kept = trained_parameters(model).into_iter().map(|(name, id, shape, value)| {
            let share = Share::of(&shape, sharding.collective.rank());
            let share = if sharding.shard == Shard::Optimizer { share } else { share.whole() };
            let value = value.inner();
            let own = share.is_part().then(|| (share.cut(value.clone()), None));
            let zeros = || Tensor::zeros([share.len()], &value.device());
            Kept { id, name, shape, share, state: (0..count).map(|_| zeros()).collect(), own }
        });
        Self { kind, kept: kept.collect(), steps: 0, sharding, incomplete: false }
    }

    /// All state tensors.
    pub fn state(&self) -> impl Iterator<Item = StateTensor<'_, B>> {
        let (optimizer, names) = with_update!(self.kind, U => (<U as Update<B>>::NAME, <U as Update<B>>::STATE));
        let sharding = &self.sharding;
        self.kept.iter().flat_map(move |Kept { name, share, state, .. }| {
            names.iter().zip(state).map(move |(what, own)| {
                let name = format!("{optimizer}.{what}.{name}");
                StateTensor { name, share: *share, own, sharding }
            })
        })
    }

    /// Restores the state and the step count of an earlier run. `read` gets a tensor's name, its
    /// size and two ranges, and returns the elements of both ranges, concatenated.
    ///
    /// # Errors
    /// Any error of `read`.
    pub fn with_state<E>(
        mut self,
        steps: u64,
        mut read: impl FnMut(&str, usize, [Range<usize>; 2]) -> Result<Tensor<B, 1>, E>,
    ) -> Result<Self, E> {
        let wanted: Vec<_> =
            self.state().map(|tensor| (tensor.name, tensor.share.elements, tensor.share.ranges())).collect();
        let tensors = self.kept.iter_mut().flat_map(|kept| &mut kept.state);
        for (tensor, (name, size, ranges)) in tensors.zip(wanted) {
            *tensor = read(&name, size, ranges)?;
        }
        self.steps = steps;
        Ok(self)
    }

    /// Updates the model. Returns it with the global gradient norm before clipping, `[1]`, on the
    /// device.
    ///
    /// `settings.step` is ignored: the optimizer counts steps itself.
    ///
    /// # Panics
    /// If the trained parameters have changed since the optimizer was created, or the number of
    /// gradients differs.
    pub fn step(
        &mut self,
        mut model: Transformer<Autodiff<B>>,
        gradients: ParameterGradients<B>,
        settings: Settings,
    ) -> (Transformer<Autodiff<B>>, Tensor<B, 1>) {
        let number = Tensor::zeros([1], &self.device(&model));
        let (norm, _) = self.update(&mut model, gradients, settings, number);
        (model, norm)
    }

    fn device(&self, model: &Transformer<Autodiff<B>>) -> B::Device {
        model.embedding.val().device()
    }

    /// [`step`](Self::step) in place. Also returns the sums of `numbers` over all ranks.
    pub(crate) fn update(
        &mut self,
        model: &mut Transformer<Autodiff<B>>,
        gradients: ParameterGradients<B>,
        settings: Settings,
        numbers: Tensor<B, 1>,
    ) -> (Tensor<B, 1>, Tensor<B, 1>) {
        let (trained, gradients) = (trained_ids(model), gradients.into_inner());
        let own = self.kept.iter().map(|kept| kept.id);
        assert!(own.eq(trained.iter().copied()), "the trained parameters have changed since the optimizer was created");
        assert_eq!(gradients.len(), trained.len(), "one gradient or None per parameter");
        self.steps += 1;
        let mut copies = model.take_copies();
        let (values, ids) = take_values(model);
        let gradients = gradients.into_iter().zip(&values);
        let gradients = gradients.map(|(gradient, value)| gradient.unwrap_or_else(|| value.zeros_like())).collect();
        let (gradients, norm, numbers) = match self.sharding.has_others() {
            true => {
                let rank = self.sharding.collective.rank();
                let shares: Vec<Share> = self.kept.iter().map(|kept| Share::of(&kept.shape, rank)).collect();
                let (sums, norm, numbers) = reduce(gradients, &shares, numbers, &self.sharding);
                (sums, Some(norm), numbers)
            }
            false => (gradients, None, numbers),
        };
        // For a sharded parameter, the model's old value is kept only if operations read a copy
        // instead.
        let mut wholes = Vec::with_capacity(values.len());
        let mut parameters = Vec::with_capacity(values.len());
        for (((value, id), gradient), kept) in values.into_iter().zip(&ids).zip(gradients).zip(&mut self.kept) {
            let copy = copies.remove(id).map(|copy| flat(copy.inner()));
            let (value, copy, whole) = match kept.own.take() {
                None => (value, copy, None),
                Some((own, own_copy)) => {
                    let own_copy = own_copy.or_else(|| copy.as_ref().map(|copy| own.clone().cast(copy.dtype())));
                    let whole = own_copy.is_some().then_some(value);
                    (own, own_copy, Some(whole))
                }
            };
            wholes.push(whole);
            let state = std::mem::take(&mut kept.state);
            parameters.push(Parameter {
                shape: kept.shape.clone(),
                decays: kept.shape.len() > 1,
                value,
                gradient,
                state,
                copy,
            });
        }
        let settings = Settings { step: self.steps, ..settings };
        let (updated, norm) = with_update!(self.kind, U => U::update(parameters, &settings, norm));
        let mut values = Vec::with_capacity(updated.len());
        let (mut parts, mut shares, mut places) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()], Vec::new());
        for ((parameter, kept), whole) in updated.into_iter().zip(&mut self.kept).zip(wholes) {
            let Parameter { shape, value, state, copy, .. } = parameter;
            kept.state = state;
            let (value, copy) = match whole {
                None => (Some(value), copy),
                Some(whole) => {
                    // Gather now what operations read: the copy if one exists, otherwise the value.
                    let kind = usize::from(copy.is_some());
                    places.push((values.len(), kind, parts[kind].len()));
                    parts[kind].push(copy.clone().unwrap_or_else(|| value.clone()));
                    shares[kind].push(kept.share);
                    kept.own = Some((value, copy));
                    (whole, None)
                }
            };
            values.push((value, copy, shape));
        }
        let collective = &self.sharding.collective;
        let [of_values, of_copies] = parts;
        self.incomplete |= !of_copies.is_empty();
        let mut gathered =
            [of_values, of_copies].into_iter().zip(&shares).map(|(parts, shares)| match parts.is_empty() {
                true => Vec::new(),
                false => gather(parts, shares, collective),
            });
        let gathered: [Vec<_>; 2] = std::array::from_fn(|_| gathered.next().unwrap_or_default());
        for (at, kind, number) in places {
            let whole = Some(gathered[kind][number].clone());
            if kind == 0 { values[at].0 = whole } else { values[at].1 = whole }
        }
        drop(gathered);
        let mut whole_values = Vec::with_capacity(values.len());
        for ((value, copy, shape), id) in values.into_iter().zip(ids) {
            copies.extend(copy.map(|copy| {
                let [rows, columns] = shape[..] else { panic!("only matrices have copies") };
                (id, Tensor::from_inner(reshape(copy, [rows, columns])))
            }));
            whole_values.push((value.expect("gathered, or never parted"), shape));
        }
        put_values(model, whole_values);
        model.put_copies(copies);
        (norm, numbers)
    }

    /// Gathers the parameter values that other ranks have updated, if the model still lacks them.
    /// All ranks must call it.
    pub(crate) fn complete(&mut self, model: &mut Transformer<Autodiff<B>>) {
        if !std::mem::replace(&mut self.incomplete, false) {
            return;
        }
        let copies = model.take_copies();
        let (values, _) = take_values(model);
        let mut completed = Vec::with_capacity(values.len());
        for (value, kept) in values.into_iter().zip(&self.kept) {
            let value = match &kept.own {
                Some((own, Some(_))) => {
                    drop(value);
                    gather(vec![own.clone()], &[kept.share], &self.sharding.collective).remove(0)
                }
                _ => value,
            };
            completed.push((value, kept.shape.clone()));
        }
        put_values(model, completed);
        model.put_copies(copies);
    }
}

/// The ids of the trained parameters, in the order of [`trained_parameters`].
fn trained_ids<B: Backend>(model: &Transformer<Autodiff<B>>) -> Vec<ParamId> {
    struct Finder(Vec<ParamId>);
    impl<B: Backend> ModuleVisitor<Autodiff<B>> for Finder {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
            if param.val().is_require_grad() {
                self.0.push(param.id);
            }
        }
    }
    let mut finder = Finder(Vec::new());
    model.visit(&mut finder);
    finder.0
}

/// Flattens a tensor.
fn flat<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 1> {
    let elements = tensor.dims().iter().product();
    reshape(tensor, [elements])
}

/// Moves the values of a model's trained parameters out, in order, with their ids, so that kernels
/// can overwrite them in place. The model is left with one shared element.
fn take_values<B: Backend>(model: &mut Transformer<Autodiff<B>>) -> (Vec<Tensor<B, 1>>, Vec<ParamId>) {
    struct Taker<B: Backend> {
        values: Vec<Tensor<B, 1>>,
        ids: Vec<ParamId>,
        left: Option<Tensor<B, 1>>,
    }
    impl<B: Backend> ModuleMapper<Autodiff<B>> for Taker<B> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Autodiff<B>, D>>) -> Param<Tensor<Autodiff<B>, D>> {
            let id = param.id;
            param.map(|value| {
                if !value.is_require_grad() {
                    return value;
                }
                let value = value.inner();
                let left = self.left.get_or_insert_with(|| Tensor::empty([1], &value.device())).clone();
                self.ids.push(id);
                self.values.push(flat(value));
                Tensor::from_inner(left.reshape([1; D])).require_grad()
            })
        }
    }
    let mut taker = Taker { values: Vec::new(), ids: Vec::new(), left: None };
    // Drops the old model, the last other owner of the values.
    *model = model.clone().map(&mut taker);
    (taker.values, taker.ids)
}

/// Sets the trained parameters of a model, in order, and restores their shapes.
fn put_values<B: Backend>(model: &mut Transformer<Autodiff<B>>, values: Vec<(Tensor<B, 1>, Vec<usize>)>) {
    struct Putter<T>(T);
    impl<B: Backend, T: Iterator<Item = (Tensor<B, 1>, Vec<usize>)>> ModuleMapper<Autodiff<B>> for Putter<T> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Autodiff<B>, D>>) -> Param<Tensor<Autodiff<B>, D>> {
            param.map(|old| match old.is_require_grad().then(|| self.0.next()).flatten() {
                Some((value, shape)) => {
                    let shape: [usize; D] = shape.try_into().expect("the shape that the parameter had");
                    Tensor::from_inner(reshape(value, shape)).require_grad()
                }
                None => old,
            })
        }
    }
    *model = model.clone().map(&mut Putter(values.into_iter()));
}
