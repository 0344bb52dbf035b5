//! Parameters: initialization, and names.

use std::f64::consts::TAU;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{FloatDType, Tensor, TensorData};

use fireclay_kernels::{Backend, DeviceTensor, Norm, NormKind, RandomKey, reshape};
use rayon::prelude::*;

/// Samples initial values on the host, so that a seed gives the same model on every backend.
pub(crate) struct Initializer<'a, B: Backend> {
    /// None if the values do not matter.
    key: Option<RandomKey>,
    drawn: u64,
    /// Of matrices, if it is not f32.
    dtype: Option<FloatDType>,
    /// Maximum values that are sampled for a matrix; its rows repeat after these.
    most: usize,
    device: &'a B::Device,
}

impl<'a, B: Backend> Initializer<'a, B> {
    pub(crate) fn new(seed: u64, device: &'a B::Device) -> Self {
        Self { key: Some(RandomKey::new(seed).fold(0x696e_6974)), drawn: 0, dtype: None, most: usize::MAX, device }
    }

    /// For parameters that will be loaded: they have shapes and no values.
    pub(crate) fn blank(device: &'a B::Device) -> Self {
        Self { key: None, drawn: 0, dtype: None, most: usize::MAX, device }
    }

    /// With matrices of another dtype, for which at most so many values are sampled.
    pub(crate) fn with_matrices(self, dtype: FloatDType, most: usize) -> Self {
        Self { dtype: Some(dtype), most, ..self }
    }

    pub(crate) fn device(&self) -> &'a B::Device {
        self.device
    }

    /// A matrix of normal values (Box and Muller, 1958).
    pub(crate) fn matrix(&mut self, dims: [usize; 2], deviation: f64) -> Param<Tensor<B, 2>> {
        let Some(key) = self.key else { return self.unread(dims) };
        let key = key.fold(self.drawn);
        self.drawn += 1;
        let [rows, columns] = dims;
        let sampled = rows.min((self.most / columns.max(1)).max(1));
        let mut values = vec![0.0; sampled * columns];
        values.par_chunks_mut(2).with_min_len(512).enumerate().for_each(|(at, pair)| {
            let (row, column) = ((at / dims[1]) as u32, (at % dims[1]) as u32);
            let radius = (-2.0 * key.uniform(row, column).ln()).sqrt();
            let angle = TAU * key.fold(1).uniform(row, column);
            for (value, part) in pair.iter_mut().zip([angle.cos(), angle.sin()]) {
                *value = (deviation * (radius * part)) as f32;
            }
        });
        let values = Tensor::<B, 2>::from_data(TensorData::new(values, [sampled, columns]), self.device);
        let values = match self.dtype {
            Some(dtype) => values.cast(dtype),
            None => values,
        };
        Param::from_tensor(match rows.div_ceil(sampled.max(1)) {
            0 | 1 => values,
            times => values.repeat_dim(0, times).narrow(0, 0, rows),
        })
    }

    pub(crate) fn zeros(&self, width: usize) -> Param<Tensor<B, 1>> {
        match self.key {
            Some(_) => Param::from_tensor(Tensor::zeros([width], self.device)),
            None => self.unread([width]),
        }
    }

    pub(crate) fn ones(&self, width: usize) -> Param<Tensor<B, 1>> {
        match self.key {
            Some(_) => Param::from_tensor(Tensor::ones([width], self.device)),
            None => self.unread([width]),
        }
    }

    fn unread<const D: usize>(&self, dims: [usize; D]) -> Param<Tensor<B, D>> {
        // If it is read before it is loaded, devices with strides need only one zero.
        let zeros = move |device: &B::Device, _| Tensor::<B, D>::zeros([1; D], device).expand(dims);
        Param::uninitialized(ParamId::new(), zeros, self.device.clone(), true, dims.into())
    }

    /// A norm, with a shift if it is a layer norm and `bias` is set.
    pub(crate) fn norm(&self, width: usize, kind: NormKind, bias: bool, epsilon: f64) -> LayerNorm<B> {
        let beta = (kind == NormKind::LayerNorm && bias).then(|| self.zeros(width));
        LayerNorm { gamma: self.ones(width), beta, epsilon, kind }
    }
}

/// The weights of a layer or RMS norm.
#[derive(Module, Debug)]
pub struct LayerNorm<B: Backend> {
    /// Scale, `[d_model]`.
    pub gamma: Param<Tensor<B, 1>>,
    /// Shift, `[d_model]`.
    pub beta: Option<Param<Tensor<B, 1>>>,
    epsilon: f64,
    #[module(skip)]
    kind: NormKind,
}

impl<B: Backend> LayerNorm<B> {
    /// For the kernels.
    pub fn weights(&self) -> Norm<B> {
        match self.kind {
            NormKind::LayerNorm => Norm::layer(self.gamma.val(), self.beta.as_ref().map(Param::val), self.epsilon),
            NormKind::RmsNorm => Norm::rms(self.gamma.val(), self.epsilon),
        }
    }
}

/// Every parameter of a module by its path, in the order of fields, flattened: `(path, id, shape,
/// values)`.
///
/// Paths read `blocks.0.attention.qkv`.
pub fn named_parameters<B: Backend, M: Module<B>>(module: &M) -> Vec<(String, ParamId, Vec<usize>, Tensor<B, 1>)> {
    let found = collect(module, true).into_iter();
    found.filter_map(|Found { path, id, shape, values, .. }| Some((path, id, shape, values?))).collect()
}

/// Those of [`named_parameters`] that are not frozen.
pub fn trained_parameters<B: Backend, M: Module<B>>(module: &M) -> Vec<(String, ParamId, Vec<usize>, Tensor<B, 1>)> {
    let found = collect(module, true).into_iter().filter(|found| found.trained);
    found.filter_map(|Found { path, id, shape, values, .. }| Some((path, id, shape, values?))).collect()
}

/// Every parameter of a module by its path, in the order of the fields.
pub(crate) fn shaped_parameters<B: Backend, M: Module<B>>(module: &M) -> Vec<(String, DeviceTensor)> {
    struct Collector {
        path: Vec<String>,
        found: Vec<(String, DeviceTensor)>,
    }
    impl<B: Backend> ModuleVisitor<B> for Collector {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.found.push((path_of(&self.path), DeviceTensor::new(param.val())));
        }
        fn enter_module(&mut self, name: &str, container: &str) {
            self.path.push(segment(name, container));
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
    }
    let mut collector = Collector { path: Vec::new(), found: Vec::new() };
    module.visit(&mut collector);
    collector.found
}

/// The module with the parameters frozen that `trained` rejects by path.
pub(crate) fn set_trained<B: Backend, M: Module<B>>(module: M, trained: impl Fn(&str) -> bool) -> M {
    struct Setter<F> {
        path: Vec<String>,
        trained: F,
    }
    impl<B: Backend, F: Fn(&str) -> bool> ModuleMapper<B> for Setter<F> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let trained = (self.trained)(&path_of(&self.path));
            param.set_require_grad(trained)
        }
        fn enter_module(&mut self, name: &str, container: &str) {
            self.path.push(segment(name, container));
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
    }
    module.map(&mut Setter { path: Vec::new(), trained })
}

/// Path and shape of every parameter of a module, in the order of [`named_parameters`], without
/// touching values.
pub(crate) fn parameter_shapes<B: Backend, M: Module<B>>(module: &M) -> Vec<(String, Vec<usize>)> {
    collect(module, false).into_iter().map(|found| (found.path, found.shape)).collect()
}

/// The segment of a parameter's path for field `name` of a `container`. Empty within a
/// [`Matrix`](crate::matrix::Matrix), for the base of a [`Linear`](crate::linear::Linear), and for a
/// dense [`FeedForward`](crate::FeedForward), which have their own names.
pub(crate) fn segment(name: &str, container: &str) -> String {
    let is_feed_forward = container.ends_with(":FeedForward");
    let unnamed = container.ends_with(":Matrix")
        || (container.ends_with(":Linear") && name == "base")
        || (is_feed_forward && name == "Dense");
    match (unnamed, is_feed_forward) {
        (true, _) => String::new(),
        (_, true) => name.to_lowercase(),
        _ => name.to_string(),
    }
}

/// A parameter's path, from its [`segment`]s.
pub(crate) fn path_of(segments: &[String]) -> String {
    let named: Vec<&str> = segments.iter().map(String::as_str).filter(|segment| !segment.is_empty()).collect();
    named.join(".")
}

struct Found<B: Backend> {
    path: String,
    id: ParamId,
    shape: Vec<usize>,
    values: Option<Tensor<B, 1>>,
    /// If values are requested.
    trained: bool,
}

fn collect<B: Backend, M: Module<B>>(module: &M, values: bool) -> Vec<Found<B>> {
    struct Collector<B: Backend> {
        path: Vec<String>,
        values: bool,
        found: Vec<Found<B>>,
    }
    impl<B: Backend> ModuleVisitor<B> for Collector<B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let shape = param.lazy_shape().to_vec();
            let values = self.values.then(|| reshape(param.val(), [shape.iter().product::<usize>()]));
            let trained = self.values && param.val().is_require_grad();
            self.found.push(Found { path: path_of(&self.path), id: param.id, shape, values, trained });
        }
        fn enter_module(&mut self, name: &str, container: &str) {
            self.path.push(segment(name, container));
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
    }
    let mut collector = Collector { path: Vec::new(), values, found: Vec::new() };
    module.visit(&mut collector);
    collector.found
}
