//! Frozen parameters, and adapters trained instead of them.

use burn::backend::Autodiff;
use std::collections::HashMap;

use burn::module::{AutodiffModule, Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, FloatDType, Int, Tensor};
use fireclay::recipe::schema::OptimizerKind;
use fireclay::training::optim::{Optimizer, ParameterGradients, Settings};
use fireclay_kernels::recorder::Recording;
use fireclay_kernels::{Backend, Format, HeadLossOptions, RandomKey};
use fireclay_model::{Adapter, Block, Dense, Linear, Matrix, Transformer, TransformerConfig, named_parameters};

use crate::backend_test;
use crate::compare::{assert_close, random, tolerance, values};

const RANK: usize = 4;

const SETTINGS: Settings = Settings {
    learning_rate: 1e-2,
    beta_1: 0.9,
    beta_2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    max_grad_norm: Some(1.0),
    step: 0, // the optimizer counts
};

/// A small Llama.
fn model<B: Backend>(device: &B::Device) -> Transformer<Autodiff<B>> {
    TransformerConfig::llama(40, 16, 32, 2, 4).init(3, device).expect("a config that holds together")
}

/// An adapter of a matrix `[d_output, d_input]`, with values of order one, or with the initial
/// values of training if `zero`.
fn adapter<B: Backend>([d_output, d_input]: [usize; 2], zero: bool, device: &B::Device) -> Adapter<Autodiff<B>> {
    let a = Tensor::from_inner(random::<B, 2>(1, [RANK, d_input], device) * 0.2);
    let b = random::<B, 2>(2, [d_output, RANK], device) * if zero { 0.0 } else { 0.2 };
    Adapter::new(Param::from_tensor(a).into(), Param::from_tensor(Tensor::from_inner(b)).into(), 2.0)
}

/// The linear layers of all blocks.
pub(crate) fn linears<B: Backend>(
    model: &mut Transformer<Autodiff<B>>,
) -> impl Iterator<Item = &mut Linear<Autodiff<B>>> {
    model.blocks.iter_mut().flat_map(|Block { attention, feed_forward, .. }| {
        let Dense { up, down, .. } = feed_forward.dense_mut().expect("dense layers");
        [&mut attention.qkv, &mut attention.output, up, down]
    })
}

/// The model with an adapter on every linear layer.
fn adapted<B: Backend>(
    mut model: Transformer<Autodiff<B>>,
    zero: bool,
    device: &B::Device,
) -> Transformer<Autodiff<B>> {
    for linear in linears(&mut model) {
        linear.adapter = Some(adapter(linear.base.val().dims(), zero, device));
    }
    model
}

/// The model with its adapters merged into the weights.
fn merged<B: Backend>(mut model: Transformer<Autodiff<B>>) -> Transformer<Autodiff<B>> {
    for linear in linears(&mut model) {
        let Adapter { a, b, scale, .. } = linear.adapter.take().expect("an adapter");
        let sum = linear.base.val() + b.val().matmul(a.val()).mul_scalar(scale);
        linear.base = Param::from_tensor(sum.detach()).into();
    }
    model
}

fn batch<B: Backend>(device: &B::Device) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..32).map(|at| at * at * 7 % 40).collect();
    Tensor::<B, 1, Int>::from_data(ids.as_slice(), device).reshape([2, 16])
}

fn loss<B: Backend>(model: &Transformer<B>, device: &B::Device) -> Tensor<B, 1> {
    let ids = batch::<B>(device);
    let hidden = model.forward(ids.clone().narrow(1, 0, 15));
    model.loss(hidden, ids.narrow(1, 1, 15), HeadLossOptions::new())
}

backend_test!(a_model_with_adapters_is_the_one_with_merged_weights::<B>(device) {
    let config = TransformerConfig::llama(40, 16, 32, 2, 4).with_dropout(0.2);
    let model = config.init::<Autodiff<B>>(3, &device).expect("a config that holds together");
    let model = adapted(model, false, &device);
    let plain = values(&loss(&self::model::<B>(&device).valid(), &device))[0];
    for dropout in [None, Some(RandomKey::new(1))] {
        let [mut ours, mut wanted] = [model.clone(), merged(model.clone())];
        // The bias follows the adapters, as it follows the weights.
        ours.set_dropout(dropout);
        wanted.set_dropout(dropout);
        let [ours, wanted] = [ours, wanted].map(|model| values(&loss(&model, &device).inner())[0]);
        assert!((ours - plain).abs() > 1e-2, "the adapters do something: {ours}, and {plain} without");
        assert!((ours - wanted).abs() < 1e-4, "{ours}, and {wanted} with merged weights");
    }
});

backend_test!(adapters_over_a_quantized_base_train_and_nothing_else_changes::<B>(device) {
    let dtypes = [FloatDType::F32, FloatDType::BF16];
    for dtype in dtypes.into_iter().filter(|dtype| B::supports_dtype(&device, DType::from(*dtype))) {
        let model = model::<B>(&device)
            .with_quantized_matrices(Format::Int8)
            .expect("the device works")
            .with_activations(dtype);
        let model = adapted(model, true, &device).with_trained(|path| path.contains(".adapter."));
        let mut model = model.with_copies();
        let before = loss(&model.valid(), &device);
        let all = |model: &Transformer<Autodiff<B>>| -> Vec<(String, Vec<f32>)> {
            let parameters = named_parameters(model).into_iter();
            parameters.map(|(path, _, _, value)| (path, values(&value.inner()))).collect()
        };
        let first = all(&model);
        let mut optimizer = Optimizer::new(OptimizerKind::AdamW, &model);
        // Two moments for each of an adapter's two matrices, on four linear layers in two blocks.
        assert_eq!(optimizer.state().count(), 2 * 2 * 4 * 2);
        assert!(optimizer.state().all(|tensor| tensor.name.contains(".adapter.")));
        for _ in 0..40 {
            let gradients = ParameterGradients::take(&model, loss(&model, &device).backward());
            (model, _) = optimizer.step(model, gradients, SETTINGS);
        }
        let [before, after] = [before, loss(&model.valid(), &device)].map(|loss| values(&loss)[0]);
        assert!(after < before - 0.3, "{dtype:?}: from {before} to {after}");
        for ((path, first), (_, last)) in first.into_iter().zip(all(&model)) {
            assert_eq!(first != last, path.contains(".adapter."), "{dtype:?}: {path}");
        }
    }
});

/// The model whose matrices are floats of the same values.
fn dequantized<B: Backend>(mut model: Transformer<Autodiff<B>>) -> Transformer<Autodiff<B>> {
    let float = |matrix: &Matrix<Autodiff<B>>| -> Matrix<Autodiff<B>> {
        Param::from_tensor(matrix.weight().into_float(FloatDType::F32).detach()).into()
    };
    for linear in linears(&mut model) {
        linear.base = float(&linear.base);
    }
    model.embedding = float(&model.embedding);
    model.head = model.head.as_ref().map(float);
    model
}

backend_test!(gradients_over_a_quantized_base_are_those_over_its_weights_as_floats::<B>(device) {
    let mut config = TransformerConfig::llama(40, 16, 256, 2, 4);
    config.d_ff = 256;
    let model = config.init::<Autodiff<B>>(3, &device).expect("a config that holds together");
    let formats: Vec<Format> = Format::ALL.into_iter().filter(|format| format.quantizes()).collect();
    assert!(formats.len() > 8, "{formats:?}");
    for format in formats {
        let quantized = model.clone().with_quantized_matrices(format).expect("the device works");
        let frozen = |model| adapted(model, false, &device).with_trained(|path| path.contains(".adapter."));
        let floats = frozen(dequantized(quantized.clone()));
        let quantized = frozen(quantized);
        let all = |model: &Transformer<Autodiff<B>>| {
            let loss = loss(model, &device);
            let value = values(&loss.clone().inner())[0];
            (value, ParameterGradients::take(model, loss.backward()).into_inner())
        };
        let ((loss, gradients), (wanted_loss, wanted)) = (all(&quantized), all(&floats));
        let tolerance = if crate::backend().as_str() == "cpu" { 1e-5 } else { 1e-3 };
        assert!((loss - wanted_loss).abs() < tolerance * wanted_loss, "{format:?}: {loss} instead of {wanted_loss}");
        assert_eq!(gradients.len(), 2 * 4 * 2);
        for (at, (gradient, wanted)) in gradients.into_iter().zip(wanted).enumerate() {
            let [gradient, wanted] = [gradient, wanted].map(|gradient| values(&gradient.expect("a gradient")));
            let scale = wanted.iter().fold(0f32, |most, value| most.max(value.abs()));
            let off = gradient.iter().zip(&wanted).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(scale > 0.0 && off < tolerance * scale, "{format:?}: gradient {at} is {off} off, of {scale}");
        }
    }
});

backend_test!(backward_computes_no_gradient_of_a_frozen_weight::<B>(device) {
    let frozen = |model| adapted(model, false, &device).with_trained(|path| path.contains(".adapter."));
    let mut model = frozen(model::<B>(&device));
    let loss = loss(&model, &device);
    let recording = Recording::start_calls::<Autodiff<B>>(&device).expect("a recording");
    drop(loss.backward());
    let report = recording.stop().expect("a report");
    let is_projection =
        |name: &str| (["linear", "lora"].iter().any(|op| name.starts_with(op))) && name.ends_with("backward");
    let flops: u64 = report.ops.iter().filter(|op| is_projection(op.name)).map(|op| op.flops).sum();
    let rows = 2 * 15;
    // One product for each frozen weight, and two for each matrix of an adapter.
    let product = |size: usize| 2 * rows * size as u64;
    let of_linear =
        |[d_output, d_input]: [usize; 2]| product(d_output * d_input) + 2 * product(RANK * (d_output + d_input));
    let dims: Vec<[usize; 2]> = linears(&mut model).map(|linear| linear.base.dims()).collect();
    let all: u64 = dims.iter().map(|dims| of_linear(*dims)).sum();
    // Nothing before the first adapter is trained, so that its input has no gradient.
    let [d_output, d_input] = dims[0];
    assert_eq!(flops, all - product((d_output + RANK) * d_input));
});

backend_test!(frozen_parameters_stay_as_they_are::<B>(device) {
    let trained = |path: &str| path.starts_with("blocks.1.") || path == "final_norm.gamma";
    let mut model = model::<B>(&device).with_trained(trained);
    let first: Vec<_> =
        named_parameters(&model).into_iter().map(|(path, _, _, value)| (path, values(&value.inner()))).collect();
    // Trained parameters have the same gradients as if all were trained.
    let whole = self::model::<B>(&device);
    let of_whole = ParameterGradients::take(&whole, loss(&whole, &device).backward()).into_inner();
    let names: Vec<String> = named_parameters(&whole).into_iter().map(|(path, ..)| path).collect();
    let wanted: Vec<_> =
        names.iter().zip(of_whole).filter(|(path, _)| trained(path)).map(|(_, gradient)| gradient).collect();
    let gradients = ParameterGradients::take(&model, loss(&model, &device).backward());
    let given = gradients.clone().into_inner();
    assert_eq!(given.len(), wanted.len());
    for (given, wanted) in given.into_iter().zip(wanted) {
        let [given, wanted] = [given, wanted].map(|gradient| gradient.expect("a gradient"));
        assert_close("a gradient", &given, &wanted, tolerance::<B>(&device));
    }
    let mut optimizer = Optimizer::new(OptimizerKind::AdamW, &model);
    (model, _) = optimizer.step(model, gradients, SETTINGS);
    for ((path, first), (_, _, _, last)) in first.into_iter().zip(named_parameters(&model)) {
        assert_eq!(first != values(&last.inner()), trained(&path), "{path}");
    }
});

/// The model with other values for some parameters, by their ids.
pub(crate) fn with_values<B: Backend>(
    model: Transformer<B>,
    values: &HashMap<ParamId, Tensor<B, 1>>,
) -> Transformer<B> {
    struct Setter<'a, B: Backend>(&'a HashMap<ParamId, Tensor<B, 1>>);
    impl<B: Backend> ModuleMapper<B> for Setter<'_, B> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            match self.0.get(&param.id) {
                Some(values) => param.map(|old| values.clone().reshape(old.dims())),
                None => param,
            }
        }
    }
    model.map(&mut Setter(values))
}
