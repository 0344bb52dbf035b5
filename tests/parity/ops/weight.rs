//! Stored weights: copies in another dtype, and quantized ones.

use burn::backend::Autodiff;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::{
    Activation, ActivationKind, Backend, Dropout, FeedForwardLayer, Format, HeadLossOptions, Norm, QuantizedWeight,
    RandomKey, Weight, embed, feed_forward, head_loss, linear, linear_add, norm_gate_up, norm_linear,
};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random, tolerance, values};
use crate::harness::{dtypes, half_or_single, halves, integers, vector};
use crate::plain;

backend_test!(rounded_weights_give_what_their_parameters_give_and_its_gradient::<B>(device) {
    let dtype = half_or_single::<B>(&device);
    let table = random::<B, 2>(1, [33, 16], &device);
    let run = |rounded: bool| {
        let value = Tensor::<Autodiff<B>, 2>::from_inner(table.clone()).require_grad();
        let weight = || match rounded {
            true => Weight::rounded(value.clone(), Tensor::from_inner(table.clone().cast(dtype))),
            false => Weight::from(value.clone()),
        };
        let tokens = Tensor::from_data([[0, 5, 32, 5, 7]], &device);
        let x = embed(weight(), tokens, dtype.into());
        let targets = Tensor::<_, 2, Int>::from_data([[5, 32, 5, 7, 1]], &device);
        let projected = linear(x.clone(), weight(), None).cast(DType::F32);
        let loss = head_loss(x, weight().into_float(dtype.into()), targets, HeadLossOptions::default())
            + projected.reshape([1, 165]).sum_dim(1).squeeze_dim::<1>(1);
        let gradient = value.grad(&loss.clone().backward()).expect("a gradient");
        assert_eq!(gradient.dtype(), DType::F32);
        (values(&loss), values(&gradient))
    };
    assert_eq!(run(true), run(false));
});

/// Results with two weights in every operation with a gradient: `[up, down]`, of `[24, 16]` and
/// `[16, 24]`, with the gradients of the input and of the biases of a projection and of a
/// feed-forward layer; and those of the weights, if they have any.
fn with_weights<B: Backend>(
    [up, down]: [Weight<Autodiff<B>>; 2],
    dtype: DType,
    device: &B::Device,
) -> (Vec<Tensor<B, 2>>, [Option<Tensor<B, 2>>; 2]) {
    let weights = [up.clone(), down.clone()];
    let tracked = |seed, shape| {
        Tensor::<Autodiff<B>, 2>::from_inner(random::<B, 2>(seed, shape, device).cast(dtype)).require_grad()
    };
    let (input, up_bias, down_bias) = (tracked(1, [7, 16]), tracked(2, [1, 24]), tracked(3, [1, 16]));
    let gelu = Activation::plain(ActivationKind::GeluTanh);
    let kept = Dropout { probability: 0.25, key: RandomKey::new(3) };
    let layer = FeedForwardLayer {
        up: up.clone(),
        up_bias: Some(vector(&up_bias)),
        activation: gelu,
        down: down.clone(),
        down_bias: Some(vector(&down_bias)),
    };
    let tokens = integers::<Autodiff<B>, 2>(vec![0, 23, 5], [1, 3], device);
    let looked_up = embed(up.clone(), tokens, dtype.into());
    let x = Tensor::cat(vec![input.clone(), looked_up.reshape([3, 16])], 0);
    let y = feed_forward(x.clone(), None, layer, Some(kept));
    let y = y + linear(linear(x.clone(), up.clone(), Some(vector(&up_bias))), down, Some(vector(&down_bias)));
    let targets = integers::<Autodiff<B>, 1>((0..10).map(|at| at * 7 % 24).collect(), [10], device);
    let options = HeadLossOptions::new().with_weight(10.0);
    let loss =
        head_loss(y.clone(), up.clone(), targets, options) + y.cast(DType::F32).sum_dim(0).sum_dim(1).reshape([1]);
    let gradients = loss.clone().backward();
    let of = |x: &Tensor<Autodiff<B>, 2>| x.grad(&gradients).expect("a gradient").cast(DType::F32);
    let mut all = vec![loss.inner().reshape([1, 1])];
    all.extend([&input, &up_bias, &down_bias].map(of));
    let of_weights = weights.map(|weight| match weight {
        Weight::Float(weight) => weight.grad(&gradients).map(|gradient| gradient.cast(DType::F32)),
        Weight::Quantized(_) => None,
    });
    (all, of_weights)
}

backend_test!(gradients_flow_through_weights_that_have_none::<B>(device) {
    let single = std::iter::once((FloatDType::F32, tolerance::<B>(&device)));
    let halves = halves::<B>(&device).into_iter().map(|half| (half.into(), Tolerance::new(2e-2, half)));
    for (dtype, tolerance) in single.chain(halves) {
        let weights = [[24, 16], [16, 24]].map(|shape| random::<B, 2>(shape[0] as u64, shape, &device) * 0.5);
        let floats = |tracked: bool, weights: &[Tensor<B, 2>; 2]| {
            weights.clone().map(|weight| {
                let weight = Tensor::<Autodiff<B>, 2>::from_inner(weight.cast(dtype));
                Weight::Float(if tracked { weight.require_grad() } else { weight })
            })
        };
        type Results<B> = (Vec<Tensor<B, 2>>, [Option<Tensor<B, 2>>; 2]);
        let compare = |what: &str, weights: [Weight<Autodiff<B>>; 2], trained: [bool; 2], wanted: &Results<B>| {
            let (given, of_weights) = with_weights::<B>(weights, dtype.into(), &device);
            for (at, (given, wanted)) in given.iter().zip(&wanted.0).enumerate() {
                assert_close(&format!("{what} {dtype:?}, result {at}"), given, wanted, tolerance);
            }
            for (at, ((given, wanted), trained)) in of_weights.iter().zip(&wanted.1).zip(trained).enumerate() {
                let what = format!("{what} {dtype:?}, gradient of weight {at}");
                assert_eq!(given.is_some(), trained, "{what}");
                if let (Some(given), Some(wanted)) = (given, wanted) {
                    assert_close(&what, given, wanted, tolerance);
                }
            }
        };
        let wanted = with_weights::<B>(floats(true, &weights), dtype.into(), &device);
        compare("frozen", floats(false, &weights), [false; 2], &wanted);
        let [tracked, frozen] = [true, false].map(|tracked| floats(tracked, &weights));
        compare("up is frozen", [frozen[0].clone(), tracked[1].clone()], [false, true], &wanted);
        compare("down is frozen", [tracked[0].clone(), frozen[1].clone()], [true, false], &wanted);
        for format in Format::ALL {
            let quantized = weights.clone().map(|weight| {
                let values: Vec<f32> = weight.clone().into_data().iter::<f32>().collect();
                let quantized = QuantizedWeight::<B>::quantize(format, &values, weight.dims(), &device);
                quantized.expect("the device works").expect("rows that the format stores")
            });
            let wide = quantized.each_ref().map(|weight| plain::dequantize(weight, FloatDType::F32));
            let wanted = with_weights::<B>(floats(true, &wide), dtype.into(), &device);
            let tracked = quantized.map(|QuantizedWeight { packed, scales, format }| {
                Weight::Quantized(QuantizedWeight {
                    packed: Tensor::from_inner(packed),
                    scales: Tensor::from_inner(scales),
                    format,
                })
            });
            compare(format.name(), tracked, [false; 2], &wanted);
        }
    }
});

backend_test!(quantized_weights_are_the_numbers_that_they_stand_for::<B>(device) {
    for (format, (dtype, tolerance)) in Format::ALL.into_iter().flat_map(|format| dtypes::<B>(&device).into_iter().map(move |dtype| (format, dtype))) {
        for [rows, d_input, d_output] in [[1, 4, 2], [1, 64, 130], [3, 36, 66], [8, 1000, 62], [32, 96, 128], [40, 64, 64]] {
            let values: Vec<f32> = random::<B, 2>(2, [d_output, d_input], &device).into_data().iter::<f32>().collect();
            let quantized = QuantizedWeight::<B>::quantize(format, &values, [d_output, d_input], &device);
            let Some(quantized) = quantized.expect("the device works") else {
                assert!(format.layout(d_input).is_none(), "{format:?} stores rows of {d_input}");
                continue;
            };
            let wide = plain::dequantize(&quantized, FloatDType::F32);
            let what = format!("{format:?} {rows}x{d_input}x{d_output} {dtype:?}");
            let given = Tensor::<B, 2>::from_data(TensorData::new(values, [d_output, d_input]), &device);
            match format {
                // No byte is off by more than half a step.
                Format::Int8 => {
                    let steps = (wide.clone() - given) / quantized.scales.clone().reshape([d_output, 1]);
                    let furthest = steps.abs().max().into_data().iter::<f32>().next().expect("a value");
                    assert!((0.1..0.51).contains(&furthest), "{what}: {furthest} of a step");
                }
            }
            assert_close(&what, &Weight::Quantized(quantized.clone()).into_float(FloatDType::F32), &wide, 1e-6);

            let x = random::<B, 2>(1, [rows, d_input], &device).cast(dtype);
            let x_wide = x.clone().cast(DType::F32);
            let weight = || Weight::Quantized(quantized.clone());
            let product = plain::linear(x_wide.clone(), wide.clone(), None);
            assert_close(&what, &linear(x.clone(), weight(), None).cast(DType::F32), &product, tolerance);
            let residual = random::<B, 2>(4, [rows, d_output], &device).cast(dtype);
            let ours = linear_add(x.clone(), weight(), None, None, residual.clone()).cast(DType::F32);
            assert_close(&what, &ours, &(product + residual.cast(DType::F32)), tolerance);
            let norm = Norm::rms(random::<B, 1>(5, [d_input], &device) + 1.5, 1e-6);
            let normed = plain::norm(x_wide, &norm);
            let product = plain::linear(normed, wide.clone(), None);
            let ours = norm_linear(x.clone(), Some(&norm), weight(), None).cast(DType::F32);
            assert_close(&what, &ours, &product, tolerance);
            let swiglu = Activation::gated(ActivationKind::Silu);
            let ours = norm_gate_up(x, Some(&norm), weight(), None, swiglu).cast(DType::F32);
            assert_close(&what, &ours, &plain::activate(product, swiglu), tolerance);

            let tokens = integers::<B, 2>(vec![1, 0, d_output as i32 - 1], [1, 3], &device);
            let ours = embed(weight(), tokens.clone(), dtype).cast(DType::F32);
            assert_close(&what, &ours, &embed(wide, tokens, FloatDType::F32), tolerance);
        }
    }
    let quantized = QuantizedWeight::<B>::quantize(Format::Int8, &[1.0; 6], [2, 3], &device).expect("the device works");
    assert!(quantized.is_none(), "rows are multiples of four");
});
