//! Optimizers of a transformer's trained parameters, one file each.
//!
//! An optimizer is a file here that implements `Update`, and a line in [`OptimizerKind`] and in
//! `with_update`. Its state is saved under `<optimizer>.<state>.<parameter>`.

mod adamw;

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use fireclay_kernels::{Backend, Rank, all_reduce, reshape};
use fireclay_model::{Transformer, trained_parameters};

use crate::recipe::schema::OptimizerKind;

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

/// A parameter in a step. Tensors are flattened, `[elements]`, and f32, except for the copy.
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

    /// The parameters after a step, in order, and the global gradient norm before clipping, `[1]`,
    /// on the device.
    fn update(parameters: Vec<Parameter<B>>, settings: &Settings) -> (Vec<Parameter<B>>, Tensor<B, 1>);
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

    /// The sums over all ranks, equal on each of them.
    pub(crate) fn sum_over_ranks(self, rank: Rank) -> Self {
        let Self(mut all) = self;
        let parts: Vec<_> = all.iter_mut().flatten().collect();
        let sums = all_reduce(parts.iter().map(|part| (**part).clone()).collect(), rank);
        for (part, sum) in parts.into_iter().zip(sums) {
            *part = sum;
        }
        Self(all)
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
    state: Vec<Tensor<B, 1>>,
}

/// An optimizer, with its state for every trained parameter.
#[derive(Clone, Debug)]
pub struct Optimizer<B: Backend> {
    kind: OptimizerKind,
    kept: Vec<Kept<B>>,
    steps: u64,
}

impl<B: Backend> Optimizer<B> {
    /// For the currently trained parameters of a model.
    pub fn new(kind: OptimizerKind, model: &Transformer<Autodiff<B>>) -> Self {
        let count = with_update!(kind, U => <U as Update<B>>::STATE.len());
        let kept = trained_parameters(model).into_iter().map(|(name, id, shape, value)| {
            let zeros = value.inner().zeros_like();
            Kept { id, name, shape, state: (0..count).map(|_| zeros.zeros_like()).collect() }
        });
        Self { kind, kept: kept.collect(), steps: 0 }
    }

    /// All state, by its name in checkpoints.
    pub fn state(&self) -> impl Iterator<Item = (String, &Tensor<B, 1>)> {
        let (optimizer, names) = with_update!(self.kind, U => (<U as Update<B>>::NAME, <U as Update<B>>::STATE));
        self.kept.iter().flat_map(move |Kept { name, state, .. }| {
            names.iter().zip(state).map(move |(what, tensor)| (format!("{optimizer}.{what}.{name}"), tensor))
        })
    }

    /// Restores state and step count of an earlier run; `read` returns the tensor of a name and a
    /// size.
    ///
    /// # Errors
    /// Any error of `read`.
    pub fn with_state<E>(
        mut self,
        steps: u64,
        mut read: impl FnMut(&str, usize) -> Result<Tensor<B, 1>, E>,
    ) -> Result<Self, E> {
        let names: Vec<(String, usize)> = self.state().map(|(name, tensor)| (name, tensor.dims()[0])).collect();
        let tensors = self.kept.iter_mut().flat_map(|kept| &mut kept.state);
        for (tensor, (name, size)) in tensors.zip(names) {
            *tensor = read(&name, size)?;
        }
        self.steps = steps;
        Ok(self)
    }

    /// Updates the model. Returns it with the global gradient norm before clipping, `[1]`, on the
    /// device.
    ///
    /// `settings.step` is set here.
    ///
    /// # Panics
    /// If the trained parameters changed since the optimizer was created, or the number of
    /// gradients differs.
    pub fn step(
        &mut self,
        mut model: Transformer<Autodiff<B>>,
        gradients: ParameterGradients<B>,
        settings: Settings,
    ) -> (Transformer<Autodiff<B>>, Tensor<B, 1>) {
        let norm = self.update(&mut model, gradients, settings);
        (model, norm)
    }

    /// [`step`](Self::step), in place.
    pub(crate) fn update(
        &mut self,
        model: &mut Transformer<Autodiff<B>>,
        gradients: ParameterGradients<B>,
        settings: Settings,
    ) -> Tensor<B, 1> {
        let (trained, gradients) = (trained_ids(model), gradients.into_inner());
        let own = self.kept.iter().map(|kept| kept.id);
        assert!(
            own.eq(trained.iter().copied()),
            "an optimizer is for the parameters that were trained when it was made"
        );
        assert_eq!(gradients.len(), trained.len(), "a gradient, or none, for each parameter");
        self.steps += 1;
        let mut copies = model.take_copies();
        let (values, ids) = take_values(model);
        let parameters = values.into_iter().zip(&ids).zip(gradients).zip(&mut self.kept);
        let parameters = parameters.map(|(((value, id), gradient), kept)| Parameter {
            shape: kept.shape.clone(),
            decays: kept.shape.len() > 1,
            gradient: gradient.unwrap_or_else(|| value.zeros_like()),
            state: std::mem::take(&mut kept.state),
            copy: copies.remove(id).map(|copy| flat(copy.inner())),
            value,
        });
        let (parameters, settings) = (parameters.collect(), Settings { step: self.steps, ..settings });
        let (updated, norm) = with_update!(self.kind, U => U::update(parameters, &settings));
        let mut values = Vec::with_capacity(updated.len());
        for ((parameter, id), kept) in updated.into_iter().zip(ids).zip(&mut self.kept) {
            kept.state = parameter.state;
            copies.extend(parameter.copy.map(|copy| {
                let [rows, columns] = parameter.shape[..] else { panic!("only matrices have copies") };
                (id, Tensor::from_inner(reshape(copy, [rows, columns])))
            }));
            values.push((parameter.value, parameter.shape));
        }
        put_values(model, values);
        model.put_copies(copies);
        norm
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
/// can overwrite them without a copy. The model is left with one shared element.
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
    // Drops the other model, the last other owner of the values.
    *model = model.clone().map(&mut taker);
    (taker.values, taker.ids)
}

/// Sets the trained parameters of a model, in order, in their shapes.
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
