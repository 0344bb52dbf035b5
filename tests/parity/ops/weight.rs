//! Stored weights: copies in another dtype, and quantized ones.

use burn::backend::Autodiff;
use burn::tensor::{DType, FloatDType, Int, Tensor};
use fireclay_kernels::{
    Activation, ActivationKind, Backend, BlockFormat, Dropout, FeedForwardLayer, Format, HeadLossOptions, Norm,
    QuantizedWeight, RandomKey, Weight, embed, feed_forward, head_loss, linear, linear_add, norm_gate_up, norm_linear,
};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random, tolerance, values};
use crate::harness::{dtypes, half_or_single, halves, integers, vector};
use crate::{formats, plain};

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

/// What is computed with two weights in every operation that has a gradient: `[up, down]`, of
/// `[width, d]` and `[d, width]`, and the gradients of the input and of the biases of a projection
/// and of a feed-forward layer; and those of the weights, as far as they have any.
fn with_weights<B: Backend>(
    [up, down]: [Weight<Autodiff<B>>; 2],
    dtype: DType,
    device: &B::Device,
) -> (Vec<Tensor<B, 2>>, [Option<Tensor<B, 2>>; 2]) {
    let weights = [up.clone(), down.clone()];
    let [width, d] = up.dims();
    let last = width as i32 - 1;
    let tracked = |seed, shape| {
        Tensor::<Autodiff<B>, 2>::from_inner(random::<B, 2>(seed, shape, device).cast(dtype)).require_grad()
    };
    let (input, up_bias, down_bias) = (tracked(1, [7, d]), tracked(2, [1, width]), tracked(3, [1, d]));
    let gelu = Activation::plain(ActivationKind::GeluTanh);
    let kept = Dropout { probability: 0.25, key: RandomKey::new(3) };
    let layer = FeedForwardLayer {
        up: up.clone(),
        up_bias: Some(vector(&up_bias)),
        activation: gelu,
        down: down.clone(),
        down_bias: Some(vector(&down_bias)),
    };
    let tokens = integers::<Autodiff<B>, 2>(vec![0, last, 5], [1, 3], device);
    let looked_up = embed(up.clone(), tokens, dtype.into());
    let x = Tensor::cat(vec![input.clone(), looked_up.reshape([3, d])], 0);
    let y = feed_forward(x.clone(), None, layer, Some(kept));
    let y = y + linear(linear(x.clone(), up.clone(), Some(vector(&up_bias))), down, Some(vector(&down_bias)));
    let targets = integers::<Autodiff<B>, 1>((0..10).map(|at| at * 7 % (last + 1)).collect(), [10], device);
    let options = HeadLossOptions::new().with_weight(10.0);
    let loss =
        head_loss(y.clone(), up.clone(), targets, options) + y.cast(DType::F32).sum_dim(0).sum_dim(1).reshape([1]);
    let gradients = loss.clone().backward();
    let of = |x: &Tensor<Autodiff<B>, 2>| x.grad(&gradients).expect("a gradient").cast(DType::F32);
    let mut all = vec![loss.inner().reshape([1, 1])];
    all.extend([&input, &up_bias, &down_bias].map(of));
    let of_weights = weights.map(|weight| match weight {
        Weight::Float(weight) => weight.grad(&gradients).map(|gradient| gradient.cast(DType::F32)),
        Weight::Quantized(_) | Weight::Stacked(_) => None,
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
            // Sums of 512 products, in another order.
            let tolerance = tolerance.at_least(3e-4);
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
            let has_groups = matches!(format, Format::Blocks(_) | Format::Grouped(_));
            let (widths, size) = if has_groups { ([512, 256], 0.1) } else { ([24, 16], 0.5) };
            let quantized = [widths, [widths[1], widths[0]]].map(|shape| {
                formats::matrix::<B>(format, shape[0] as u64, shape, size, &device)
                    .expect("rows that the format stores")
            });
            let wide = quantized.each_ref().map(formats::wide);
            let wanted = with_weights::<B>(floats(true, &wide), dtype.into(), &device);
            let tracked = quantized.map(|weight| Weight::Quantized(weight.tracked()));
            compare(format.name(), tracked, [false; 2], &wanted);
        }
    }
});

backend_test!(quantized_weights_are_the_numbers_that_they_stand_for::<B>(device) {
    for (format, (dtype, tolerance)) in
        Format::ALL.into_iter().flat_map(|format| dtypes::<B>(&device).into_iter().map(move |dtype| (format, dtype)))
    {
        let mut stored = 0;
        for [rows, d_input, d_output] in [
            [1, 4, 2], [1, 64, 130], [3, 36, 66], [8, 1000, 62], [32, 96, 128], [40, 64, 64], [1, 256, 33],
            [5, 768, 47], [19, 512, 80],
        ] {
            let Some(quantized) = formats::matrix::<B>(format, 2, [d_output, d_input], 1.0, &device) else {
                continue;
            };
            stored += 1;
            let wide = formats::wide(&quantized);
            let what = format!("{format:?} {rows}x{d_input}x{d_output} {dtype:?}");
            let given = random::<B, 2>(2, [d_output, d_input], &device);
            match format {
                // No byte is off by more than half a step.
                Format::Int8 => {
                    let scales = quantized.scales.clone().expect("scales of rows");
                    let steps = (wide.clone() - given) / scales.reshape([d_output, 1]);
                    let furthest = steps.abs().max().into_data().iter::<f32>().next().expect("a value");
                    assert!((0.1..0.51).contains(&furthest), "{what}: {furthest} of a step");
                }
                Format::F16 => assert_close(&what, &wide, &given, 3e-4),
                Format::Bf16 => assert_close(&what, &wide, &given, 3e-3),
                // Held against the formats' own package by the suite.
                Format::Blocks(_) | Format::Grouped(_) => {}
            }
            assert_close(&what, &Weight::Quantized(quantized.clone()).into_float(FloatDType::F32), &wide, 1e-6);

            let of_product = formats::of_products::<B>(format, tolerance, &device);
            let x = random::<B, 2>(1, [rows, d_input], &device).cast(dtype);
            let x_wide = x.clone().cast(DType::F32);
            let weight = || Weight::Quantized(quantized.clone());
            let product = plain::linear(x_wide.clone(), wide.clone(), None);
            assert_close(&what, &linear(x.clone(), weight(), None).cast(DType::F32), &product, of_product);
            let bias = random::<B, 1>(6, [d_output], &device);
            let with_bias = plain::linear(x_wide.clone(), wide.clone(), Some(bias.clone()));
            assert_close(&what, &linear(x.clone(), weight(), Some(bias)).cast(DType::F32), &with_bias, of_product);
            let residual = random::<B, 2>(4, [rows, d_output], &device).cast(dtype);
            let ours = linear_add(x.clone(), weight(), None, None, residual.clone()).cast(DType::F32);
            assert_close(&what, &ours, &(product + residual.cast(DType::F32)), of_product);
            let norm = Norm::rms(random::<B, 1>(5, [d_input], &device) + 1.5, 1e-6);
            let normed = plain::norm(x_wide, &norm);
            let product = plain::linear(normed, wide.clone(), None);
            let ours = norm_linear(x.clone(), Some(&norm), weight(), None).cast(DType::F32);
            assert_close(&what, &ours, &product, of_product);
            if d_output % 2 == 0 {
                let swiglu = Activation::gated(ActivationKind::Silu);
                let ours = norm_gate_up(x.clone(), Some(&norm), weight(), None, swiglu).cast(DType::F32);
                assert_close(&what, &ours, &plain::activate(product, swiglu), of_product.times(2.0));
            }
            let targets =
                integers::<B, 1>((0..rows as i32).map(|at| at * 7 % d_output as i32).collect(), [rows], &device);
            let loss = head_loss(x.clone(), weight(), targets.clone(), HeadLossOptions::default());
            let wanted = plain::head_loss(x.cast(DType::F32), wide.clone(), targets, HeadLossOptions::default());
            // Near zero where one class wins: the error counts as of a loss of one nat.
            let one = |loss: Tensor<B, 1>| loss.reshape([1, 1]) + 1.0;
            assert_close(&format!("{what} head_loss"), &one(loss), &one(wanted), of_product);

            let tokens = integers::<B, 2>(vec![1, 0, d_output as i32 - 1], [1, 3], &device);
            let ours = embed(weight(), tokens.clone(), dtype).cast(DType::F32);
            assert_close(&what, &ours, &embed(wide, tokens, FloatDType::F32), tolerance);
        }
        assert!(stored >= 3, "{format:?}: {stored}");
    }
    let quantized = QuantizedWeight::<B>::quantize(Format::Int8, &[1.0; 6], [2, 3], &device).expect("the device works");
    assert!(quantized.is_none(), "rows are multiples of four");
});

backend_test!(a_stack_of_formats_is_one_matrix::<B>(device) {
    let formats = [
        (Format::Blocks(BlockFormat::Q4K), 48),
        (Format::Blocks(BlockFormat::Q6K), 37),
        (Format::F16, 16),
        (Format::Int8, 27),
    ];
    let parts =
        formats.map(|(format, rows)| formats::matrix::<B>(format, 3, [rows, 256], 1.0, &device).expect("whole blocks"));
    let wide = Tensor::cat(parts.iter().map(formats::wide).collect(), 0);
    let stack = || Weight::from(parts.to_vec());
    assert_eq!(stack().dims(), [128, 256]);
    let tolerance = formats::of_products::<B>(formats[0].0, tolerance::<B>(&device), &device);
    for rows in [1, 5, 70] {
        let x = random::<B, 2>(1, [rows, 256], &device);
        let wanted = plain::linear(x.clone(), wide.clone(), None);
        assert_close(&format!("{rows} rows"), &linear(x, stack(), None), &wanted, tolerance);
    }
    let tokens = integers::<B, 2>(vec![0, 47, 48, 127], [2, 2], &device);
    let wanted = embed(wide.clone(), tokens.clone(), FloatDType::F32);
    assert_close("rows", &embed(stack(), tokens, FloatDType::F32), &wanted, 1e-6);
    // Gradients flow through all parts.
    let tracked = || Weight::from(parts.clone().map(|part| part.tracked()).to_vec());
    let run = |weight: Weight<Autodiff<B>>| {
        let x = Tensor::<Autodiff<B>, 2>::from_inner(random::<B, 2>(1, [9, 256], &device)).require_grad();
        let up = Tensor::<Autodiff<B>, 2>::from_inner(random::<B, 2>(8, [9, 128], &device));
        let loss = (linear(x.clone(), weight, None) * up).sum();
        x.grad(&loss.backward()).expect("a gradient")
    };
    assert_close(
        "gradient",
        &run(tracked()),
        &run(Weight::Float(Tensor::from_inner(wide))),
        crate::compare::tolerance::<B>(&device),
    );
});
