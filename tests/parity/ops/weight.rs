//! Stored weights: rounded copies and quantized ones.

use burn::backend::Autodiff;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::{
    Activation, ActivationKind, Format, HeadLossOptions, Norm, QuantizedWeight, Weight, embed, head_loss, linear,
    linear_add, norm_gate_up, norm_linear,
};

use crate::backend_test;
use crate::compare::{assert_close, random, values};
use crate::harness::{dtypes, half_or_single, integers};
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
