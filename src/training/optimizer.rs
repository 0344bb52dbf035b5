//! AdamW over the parameters of a transformer.

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Shape, Tensor};
use fireclay_kernels::{AdamW, AdamWParameter, Backend, optimizer_step, reshape};
use fireclay_model::{Transformer, named_parameters};

/// Gradients of all parameters in the order of [`named_parameters`], each flattened; `None` where a parameter took no
/// part.
#[derive(Clone, Debug)]
pub struct ParameterGradients<B: Backend>(Vec<Option<Tensor<B, 1>>>);

impl<B: Backend> ParameterGradients<B> {
    /// Takes the gradients of `model`'s parameters out of a backward pass.
    pub fn take(model: &Transformer<Autodiff<B>>, gradients: <Autodiff<B> as AutodiffBackend>::Gradients) -> Self {
        struct Taker<B: Backend> {
            gradients: <Autodiff<B> as AutodiffBackend>::Gradients,
            taken: Vec<Option<Tensor<B, 1>>>,
        }
        impl<B: Backend> ModuleVisitor<Autodiff<B>> for Taker<B> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
                let gradient = param.val().grad_remove(&mut self.gradients);
                self.taken.push(gradient.map(flat));
            }
        }
        let mut taker = Taker { gradients, taken: Vec::new() };
        model.visit(&mut taker);
        Self(taker.taken)
    }

    /// One for each parameter.
    pub fn into_inner(self) -> Vec<Option<Tensor<B, 1>>> {
        self.0
    }
}

/// The moments of every parameter, and which parameters decay.
#[derive(Clone, Debug)]
pub struct Optimizer<B: Backend> {
    names: Vec<String>,
    decays: Vec<bool>,
    moments: Vec<(Tensor<B, 1>, Tensor<B, 1>)>,
    steps: u64,
}

impl<B: Backend> Optimizer<B> {
    /// Zero moments for a model's parameters. Matrices decay, vectors do not.
    pub fn new(model: &Transformer<Autodiff<B>>) -> Self {
        let mut optimizer = Self { names: Vec::new(), decays: Vec::new(), moments: Vec::new(), steps: 0 };
        for (name, _, shape, value) in named_parameters(model) {
            let value = value.inner();
            optimizer.names.push(name);
            optimizer.decays.push(shape.len() > 1);
            optimizer.moments.push((value.zeros_like(), value.zeros_like()));
        }
        optimizer
    }

    /// Moments by the name of their parameter: `(name, first, second)`.
    pub fn moments(&self) -> impl Iterator<Item = (&str, &Tensor<B, 1>, &Tensor<B, 1>)> {
        self.names.iter().zip(&self.moments).map(|(name, (first, second))| (name.as_str(), first, second))
    }

    /// With the moments and the number of steps of an earlier run; `read` gives the moments of a name.
    ///
    /// # Errors
    /// Whatever `read` gives.
    pub fn with_moments<E>(
        mut self,
        steps: u64,
        mut read: impl FnMut(&str, usize) -> Result<(Tensor<B, 1>, Tensor<B, 1>), E>,
    ) -> Result<Self, E> {
        for (name, moments) in self.names.iter().zip(&mut self.moments) {
            *moments = read(name, moments.0.dims()[0])?;
        }
        self.steps = steps;
        Ok(self)
    }

    /// Updates the model; returns it with the global norm of the gradients before clipping, `[1]`, on the device.
    ///
    /// `adamw.step` is counted here.
    pub fn step(
        &mut self,
        mut model: Transformer<Autodiff<B>>,
        gradients: ParameterGradients<B>,
        adamw: AdamW,
    ) -> (Transformer<Autodiff<B>>, Tensor<B, 1>) {
        let norm = self.update(&mut model, gradients, adamw);
        (model, norm)
    }

    /// [`step`](Self::step) of a model in its place.
    pub(crate) fn update(
        &mut self,
        model: &mut Transformer<Autodiff<B>>,
        gradients: ParameterGradients<B>,
        adamw: AdamW,
    ) -> Tensor<B, 1> {
        self.steps += 1;
        let mut copies = model.take_copies();
        let (values, places) = take_values(model);
        let parameters = values.into_iter().zip(&places).zip(gradients.into_inner());
        let parameters = parameters.zip(std::mem::take(&mut self.moments)).zip(&self.decays);
        let parameters = parameters.map(|((((value, place), gradient), (first_moment, second_moment)), decays)| {
            let gradient = gradient.unwrap_or_else(|| value.zeros_like());
            let copy = copies.remove(&place.0).map(|copy| flat(copy.inner()));
            AdamWParameter { value, gradient, first_moment, second_moment, decays: *decays, copy }
        });
        let (updated, norm) = optimizer_step(parameters.collect(), &AdamW { step: self.steps, ..adamw });
        let mut values = Vec::with_capacity(updated.len());
        for (parameter, place) in updated.into_iter().zip(&places) {
            values.push(parameter.value);
            self.moments.push((parameter.first_moment, parameter.second_moment));
            copies.extend(parameter.copy.map(|copy| {
                let copy = reshape(copy, place.1.dims::<2>());
                (place.0, Tensor::from_inner(copy))
            }));
        }
        put_values(model, values, places);
        model.put_copies(copies);
        norm
    }
}

/// All elements in one dimension.
fn flat<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 1> {
    let elements = tensor.dims().iter().product();
    reshape(tensor, [elements])
}

/// Which parameter a value belongs to, and its shape there.
type Place = (ParamId, Shape);

/// Moves the values out of a model's parameters, in their order, each with its place, so that a kernel may overwrite them: what
/// nothing else holds need not be copied. The model keeps one element, which all parameters share.
fn take_values<B: Backend>(model: &mut Transformer<Autodiff<B>>) -> (Vec<Tensor<B, 1>>, Vec<Place>) {
    struct Taker<B: Backend> {
        values: Vec<Tensor<B, 1>>,
        places: Vec<Place>,
        left: Option<Tensor<B, 1>>,
    }
    impl<B: Backend> ModuleMapper<Autodiff<B>> for Taker<B> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Autodiff<B>, D>>) -> Param<Tensor<Autodiff<B>, D>> {
            let id = param.id;
            param.map(|value| {
                let value = value.inner();
                let left = self.left.get_or_insert_with(|| Tensor::empty([1], &value.device())).clone();
                self.places.push((id, value.shape()));
                self.values.push(flat(value));
                Tensor::from_inner(left.reshape([1; D]))
            })
        }
    }
    let mut taker = Taker { values: Vec::new(), places: Vec::new(), left: None };
    // The other model goes here, and with it the last other holder of the values.
    *model = model.clone().map(&mut taker);
    (taker.values, taker.places)
}

/// Gives a model new values of its parameters, in their order, in the shapes that they had.
fn put_values<B: Backend>(model: &mut Transformer<Autodiff<B>>, values: Vec<Tensor<B, 1>>, places: Vec<Place>) {
    struct Putter<T>(T);
    impl<B: Backend, T: Iterator<Item = (Tensor<B, 1>, Place)>> ModuleMapper<Autodiff<B>> for Putter<T> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Autodiff<B>, D>>) -> Param<Tensor<Autodiff<B>, D>> {
            let value = self.0.next();
            param.map(|old| match value {
                Some((value, (_, shape))) => Tensor::from_inner(reshape(value, shape.dims::<D>())).require_grad(),
                None => old,
            })
        }
    }
    *model = model.clone().map(&mut Putter(values.into_iter().zip(places)));
}
