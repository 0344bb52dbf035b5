//! Each operation against the reference: the forward pass, and every gradient against what Burn's own autodiff makes
//! of the reference's small operations.

use std::slice::from_ref;

use burn::backend::Autodiff;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::{
    Activation, ActivationKind, AdamW, AdamWParameter, AttentionMask, AttentionOptions, Backend, Dropout, F32Products,
    FeedForwardLayer, HeadLossOptions, Norm, PackedHeads, Penalties, RandomKey, RotaryTable, SampledRow, SampledRows,
    Sampling, TokenCounts, Weight, activate, attention, attention_weights, backward, compile_ahead, dropout, embed,
    embed_add, feed_forward, head_loss, head_sample, linear, linear_add, norm, norm_gate_up, optimizer_step,
    qkv_attention, qkv_rotary, reshape, rotary, use_f32_products,
};

use crate::backend_test;
use crate::compare::{assert_close, random, relative_error, tolerance, values};
use crate::plain;

/// The same values under strides of a transposed tensor.
fn strided<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let mut order: Vec<isize> = (0..D as isize).collect();
    order.swap(D - 2, D - 1);
    let order: [isize; D] = order.try_into().expect("D axes");
    let dims = x.dims();
    // Through the host, or a lazy backend might see that nothing has changed.
    let swapped = x.permute(order).into_data();
    let swapped = Tensor::<B, D>::from_data(swapped, &Default::default()).permute(order);
    assert_eq!(swapped.dims(), dims);
    swapped
}

/// Output, then the gradient of each input for a random gradient of the output, all in f32; computed in `dtype`.
fn with_gradients<B: Backend, const D: usize, const O: usize>(
    inputs: &[Tensor<B, D>],
    dtype: DType,
    f: impl Fn(&[Tensor<Autodiff<B>, D>]) -> Tensor<Autodiff<B>, O>,
) -> (Tensor<B, O>, Vec<Tensor<B, D>>) {
    let inputs: Vec<_> =
        inputs.iter().map(|x| Tensor::<Autodiff<B>, D>::from_inner(x.clone().cast(dtype)).require_grad()).collect();
    let output = f(&inputs);
    let upstream = random::<B, O>(99, output.dims(), &output.device()).cast(output.dtype());
    let gradients = (output.clone() * Tensor::from_inner(upstream)).sum().backward();
    let gradient = |x: &Tensor<Autodiff<B>, D>| x.grad(&gradients).expect("a gradient").cast(DType::F32);
    (output.inner().cast(DType::F32), inputs.iter().map(gradient).collect())
}

/// Our operation in the dtype under test against the reference in f32, for the same inputs.
#[track_caller]
fn assert_parity<B: Backend, const D: usize, const O: usize>(
    what: &str,
    inputs: &[Tensor<B, D>],
    ours: impl Fn(&[Tensor<Autodiff<B>, D>]) -> Tensor<Autodiff<B>, O>,
    theirs: impl Fn(&[Tensor<Autodiff<B>, D>]) -> Tensor<Autodiff<B>, O>,
) {
    let dtype = dtype_under_test::<B>(&inputs[0].device());
    let tolerance = if dtype == DType::F32 { tolerance::<B>(&inputs[0].device()) } else { 2e-2 };
    let (output, gradients) = with_gradients(inputs, dtype, ours);
    let rounded: Vec<_> = inputs.iter().map(|x| x.clone().cast(dtype)).collect();
    let (wanted, wanted_gradients) = with_gradients(&rounded, DType::F32, theirs);
    assert_close(what, &output, &wanted, tolerance);
    for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
        assert_close(&format!("{what}, gradient of input {at}"), gradient, wanted, tolerance);
    }
}

/// Whether a product of these sizes shows what smaller ones do not: large ones have kernels of their own on tensor cores, and elsewhere only take
/// long.
fn is_worth_it<B: Backend>(device: &B::Device, sizes: &[usize]) -> bool {
    B::name(device).contains("cuda") || sizes.iter().product::<usize>() < 1 << 28
}

/// bf16 where the device has it, f32 elsewhere.
fn half_or_single<B: Backend>(device: &B::Device) -> DType {
    if B::supports_dtype(device, DType::BF16) { DType::BF16 } else { DType::F32 }
}

/// The dtype that `FIRECLAY_TEST_DTYPE` names, f32 if unset; one that the device lacks fails the tests.
fn dtype_under_test<B: Backend>(device: &B::Device) -> DType {
    let dtype = match std::env::var("FIRECLAY_TEST_DTYPE").as_deref() {
        Err(_) | Ok("f32") => return DType::F32,
        Ok("bf16") => DType::BF16,
        Ok("f16") => DType::F16,
        Ok(other) => panic!("FIRECLAY_TEST_DTYPE is f32, bf16 or f16, not {other}"),
    };
    assert!(B::supports_dtype(device, dtype), "{} has no {dtype:?}", B::name(device));
    dtype
}

/// `[1, width]` as `[width]`, so that weights can stand in one list with their input.
fn vector<B: Backend>(x: &Tensor<B, 2>) -> Tensor<B, 1> {
    x.clone().flatten(0, 1)
}

backend_test!(dropout_drops_and_scales_as_its_key_says::<B>(device) {
    for (rows, columns) in [(1, 1), (63, 65), (3, 1000)] {
        let what = Dropout { probability: 0.3, key: RandomKey::new(4) };
        let x = strided(random::<B, 2>(1, [rows, columns], &device));
        assert_parity(
            &format!("dropout {rows}x{columns}"),
            &[x],
            |x| dropout(x[0].clone(), what),
            |x| plain::dropout(x[0].clone(), what),
        );
    }
});

backend_test!(embed_matches_the_reference::<B>(device) {
    for [vocabulary, batch_size, seq_length, d_model] in [
        [1, 1, 1, 1],
        [2, 3, 5, 2],
        [63, 1, 700, 33],
        [65, 4, 500, 64],
        [1000, 2, 63, 130],
        [3000, 3, 300, 20],
        [513, 1, 2000, 3],
        [2000, 5, 1000, 37],
        [1500, 1, 200, 1030],
    ] {
        let name = format!("embed {vocabulary}x{d_model}, {batch_size}x{seq_length}");
        let table = random::<B, 2>(1, [vocabulary, d_model], &device);
        // Some tokens often, the first and the last two most often, some never, in no order.
        let token = |at: usize| match at % 7 {
            2 => vocabulary.saturating_sub(1 + at % 2),
            _ => at * at * 31 % 1009 * (at % 3) % vocabulary,
        };
        let tokens: Vec<i32> = (0..batch_size * seq_length).map(|at| token(at) as i32).collect();
        let tokens = TensorData::new(tokens, [batch_size, seq_length]);
        let tokens = Tensor::<Autodiff<B>, 2, Int>::from_data(tokens, &device);
        for table in [table.clone(), strided(table.clone())] {
            let dtype = FloatDType::F32;
            assert_parity(
                &name,
                from_ref(&table),
                |i| embed(i[0].clone(), tokens.clone(), dtype),
                |i| plain::embed(i[0].clone(), tokens.clone(), dtype),
            );
            let again = || with_gradients(from_ref(&table), DType::F32, |i| embed(i[0].clone(), tokens.clone(), dtype));
            let [(_, first), (_, second)] = [again(), again()];
            assert_eq!(values(&first[0]), values(&second[0]), "{name}: the same bits every time");
        }
        assert_parity(
            &format!("{name} added"),
            &[random(3, [vocabulary, d_model], &device), random(4, [batch_size * seq_length, d_model], &device)],
            |i| embed_add(i[0].clone(), tokens.clone(), i[1].clone().reshape([batch_size, seq_length, d_model])),
            |i| {
                let x = i[1].clone().reshape([batch_size, seq_length, d_model]);
                x + plain::embed(i[0].clone(), tokens.clone(), FloatDType::F32)
            },
        );
        let across = tokens.clone().transpose();
        assert_parity(
            &format!("{name} transposed"),
            &[random(2, [vocabulary, d_model], &device)],
            |i| embed(i[0].clone(), across.clone(), FloatDType::F32),
            |i| plain::embed(i[0].clone(), across.clone(), FloatDType::F32),
        );
        // A table that is used twice: the second gradient is added to the first one. Sorted rows, long chains, and several columns a unit.
        if [63, 513, 1500].contains(&vocabulary) {
            let other = tokens.clone().flip([1]);
            let twice = |i: &[Tensor<Autodiff<B>, 2>]| {
                embed(i[0].clone(), tokens.clone(), FloatDType::F32) * embed(i[0].clone(), other.clone(), FloatDType::F32)
            };
            assert_parity(&format!("{name} twice"), from_ref(&table), twice, |i| {
                plain::embed(i[0].clone(), tokens.clone(), FloatDType::F32)
                    * plain::embed(i[0].clone(), other.clone(), FloatDType::F32)
            });
        }
    }
});

backend_test!(norms_match_the_reference::<B>(device) {
    for (rows, columns) in [(1, 2), (3, 3), (63, 65), (64, 64), (129, 7), (2, 1000), (5, 4100), (4097, 24), (2, 20_000)] {
        let x = random::<B, 2>(1, [rows, columns], &device) + 0.5;
        let gamma = random::<B, 2>(2, [1, columns], &device);
        let beta = random::<B, 2>(3, [1, columns], &device);
        for x in [x.clone(), strided(x)] {
            let name = format!("{rows}x{columns}");
            assert_parity(
                &format!("layer norm {name}"),
                &[x.clone(), gamma.clone(), beta.clone()],
                |i| norm(i[0].clone(), &Norm::layer(vector(&i[1]), Some(vector(&i[2])), 1e-5)),
                |i| {
                    let norm = Norm::layer(vector(&i[1]), Some(vector(&i[2])), 1e-5);
                    plain::norm(i[0].clone(), &norm)
                },
            );
            assert_parity(
                &format!("layer norm without shift {name}"),
                &[x.clone(), gamma.clone()],
                |i| norm(i[0].clone(), &Norm::layer(vector(&i[1]), None, 1e-5)),
                |i| plain::norm(i[0].clone(), &Norm::layer(vector(&i[1]), None, 1e-5)),
            );
            assert_parity(
                &format!("rms norm {name}"),
                &[x, gamma.clone()],
                |i| norm(i[0].clone(), &Norm::rms(vector(&i[1]), 1e-6)),
                |i| plain::norm(i[0].clone(), &Norm::rms(vector(&i[1]), 1e-6)),
            );
        }
    }
});

backend_test!(norms_add_the_gradient_that_goes_around_them::<B>(device) {
    for (rows, columns) in [(1, 2), (63, 65), (64, 64), (65, 130), (128, 128), (300, 64)] {
        let x = random::<B, 2>(1, [rows, columns], &device) + 0.5;
        let gamma = random::<B, 2>(2, [1, columns], &device);
        assert_parity(
            &format!("layer norm and what goes around it {rows}x{columns}"),
            &[strided(x.clone()), gamma.clone()],
            |i| norm(i[0].clone(), &Norm::layer(vector(&i[1]), None, 1e-5)) + i[0].clone() * 3.0,
            |i| {
                let normed = plain::norm(i[0].clone(), &Norm::layer(vector(&i[1]), None, 1e-5));
                normed + i[0].clone() * 3.0
            },
        );
        assert_parity(
            &format!("rms norm and what goes around it {rows}x{columns}"),
            &[strided(x), gamma],
            |i| norm(i[0].clone(), &Norm::rms(vector(&i[1]), 1e-6)) + i[0].clone() * 3.0,
            |i| {
                let normed = plain::norm(i[0].clone(), &Norm::rms(vector(&i[1]), 1e-6));
                normed + i[0].clone() * 3.0
            },
        );
    }
});

backend_test!(norms_of_half_precision_rows_are_close_to_the_reference::<B>(device) {
    for dtype in [DType::BF16, DType::F16] {
        if !<B as burn::tensor::backend::Backend>::supports_dtype(&device, dtype) {
            continue;
        }
        // Many rows have a kernel of their own on some devices.
        let sizes =
            [(3, 40), (63, 65), (128, 128), (700, 384), (1057, 768), (2200, 1280), (1200, 65), (7000, 264), (4097, 512)];
        for (rows, columns) in sizes {
            // Some rows are parts of wider ones.
            let around_rows = if rows % 2 == 0 { 8 } else { 0 };
            let x = random::<B, 2>(1, [rows, columns + 2 * around_rows], &device).cast(dtype).cast(DType::F32);
            let [gamma, beta] = [2, 3].map(|seed| random::<B, 2>(seed, [1, columns], &device));
            // Weights are f32, as in training, but for one size.
            let weight_dtype = if columns == 1280 { dtype } else { DType::F32 };
            for (layer, shifted, around) in [
                (false, false, true),
                (false, false, false),
                (true, false, true),
                (true, true, true),
                (true, true, false),
            ] {
                let norm_of = |i: &[Tensor<Autodiff<B>, 2>], dtype: DType| match layer {
                    true => Norm::layer(vector(&i[1]).cast(dtype), shifted.then(|| vector(&i[2]).cast(dtype)), 1e-5),
                    false => Norm::rms(vector(&i[1]).cast(dtype), 1e-6),
                };
                let mut inputs = vec![x.clone(), gamma.clone()];
                inputs.extend(shifted.then(|| beta.clone()));
                let (output, gradients) = with_gradients(&inputs, DType::F32, |i| {
                    let x = i[0].clone().cast(dtype).narrow(1, around_rows, columns);
                    let normed = norm(x.clone(), &norm_of(i, weight_dtype));
                    if around { normed + x } else { normed }.cast(DType::F32)
                });
                let (wanted, wanted_gradients) = with_gradients(&inputs, DType::F32, |i| {
                    let x = i[0].clone().narrow(1, around_rows, columns);
                    let normed = plain::norm(x.clone(), &norm_of(i, DType::F32));
                    if around { normed + x } else { normed }
                });
                let what = format!(
                    "{dtype:?} norm {rows}x{columns}, layer {layer}, shifted {shifted}, with what goes around it {around}"
                );
                assert_close(&what, &output, &wanted, 1e-2);
                // Sums over many rows average out what is rounded off: one row too few shows.
                let of_weights = if rows >= 1000 && weight_dtype == DType::F32 { 5e-3 } else { 2e-2 };
                for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                    let tolerance = if at == 0 { 2e-2 } else { of_weights };
                    assert_close(&format!("{what}, gradient of input {at}"), gradient, wanted, tolerance);
                }
                let last = |x: &Tensor<B, 2>| x.clone().narrow(0, rows - rows.min(8), rows.min(8));
                assert_close(&format!("{what}, the last rows"), &last(&gradients[0]), &last(&wanted_gradients[0]), 2e-2);
            }
        }
    }
});

backend_test!(reshape_keeps_elements_in_their_order::<B>(device) {
    let x = random::<B, 2>(1, [6, 35], &device);
    for x in [x.clone(), strided(x)] {
        assert_parity(
            "reshape",
            &[x],
            |x| reshape(x[0].clone() * 2.0, [2, 21, 5]) + reshape(x[0].clone(), [2, 21, 5]),
            |x| x[0].clone().reshape([2, 21, 5]) * 3.0,
        );
    }
});

backend_test!(projections_match_the_reference::<B>(device) {
    for [rows, d_input, d_output] in
        [[1, 1, 1], [2, 3, 5], [65, 63, 64], [130, 17, 33], [1, 1000, 3], [4097, 3, 40], [129, 2, 1000]]
    {
        let x = random::<B, 2>(1, [rows, d_input], &device);
        let weight = random::<B, 2>(2, [d_output, d_input], &device);
        let bias = random::<B, 2>(3, [1, d_output], &device);
        for (x, weight) in [(x.clone(), weight.clone()), (strided(x), strided(weight))] {
            let name = format!("linear {rows}x{d_input}x{d_output}");
            assert_parity(
                &name,
                &[x.clone(), weight.clone(), bias.clone()],
                |i| linear(i[0].clone(), i[1].clone(), Some(vector(&i[2]))),
                |i| plain::linear(i[0].clone(), i[1].clone(), Some(vector(&i[2]))),
            );
            assert_parity(
                &format!("{name} without bias"),
                &[x, weight],
                |i| linear(i[0].clone(), i[1].clone(), None),
                |i| plain::linear(i[0].clone(), i[1].clone(), None),
            );
        }
    }
});

backend_test!(large_projections_match_the_reference::<B>(device) {
    let check = |x: Tensor<B, 2>, weight: Tensor<B, 2>| {
        assert_parity(
            &format!("linear of {:?} by {:?}", x.dims(), weight.dims()),
            &[x, weight],
            |i| linear(i[0].clone(), i[1].clone(), None),
            |i| plain::linear(i[0].clone(), i[1].clone(), None),
        );
    };
    let inputs = |[rows, d_input, d_output]: [usize; 3]| {
        (random::<B, 2>(1, [rows, d_input], &device), random::<B, 2>(2, [d_output, d_input], &device))
    };
    // Edges of tiles, and rows that do not begin at whole vectors, in one of the products or in all.
    for sizes in [[700, 600, 650], [641, 603, 645]] {
        let (x, weight) = inputs(sizes);
        check(x, weight);
    }
    // A gradient in pieces, its sides lying either way.
    let (x, weight) = inputs([4096, 128, 260]);
    check(x.clone(), weight.clone());
    check(strided(x), strided(weight));
    // Parts of matrices.
    let (x, weight) = inputs([540, 560, 620]);
    check(x.narrow(0, 7, 530).narrow(1, 8, 520), weight.narrow(0, 3, 600).narrow(1, 16, 520));
});

backend_test!(products_of_f32_are_as_accurate_as_sums_of_f32::<B>(device) {
    // Whole tiles, no whole stages of the inner dimension, odd sizes, and small ones; as large as tensor cores are for.
    for [rows, d_input, d_output] in [[1024, 768, 512], [1024, 771, 514], [640, 1537, 301], [70, 300, 130]] {
        let (x, weight) = (random::<B, 2>(1, [rows, d_input], &device), random::<B, 2>(2, [d_output, d_input], &device));
        let upstream = values(&random::<B, 2>(99, [rows, d_output], &device));
        let [host_x, host_weight] = [&x, &weight].map(values);
        let error = || {
            let inputs = [x.clone(), strided(weight.clone())];
            let (output, gradients) = with_gradients(&inputs, DType::F32, |i| linear(i[0].clone(), i[1].clone(), None));
            // Some elements of each product, beside sums in f64: of `[m, n]`, whose factors have these steps along their inner dimension.
            let off = |got: &Tensor<B, 2>, a: (&[f32], usize, usize), b: (&[f32], usize, usize), depth: usize| {
                let [m, n] = got.dims();
                let got = values(got);
                let at = (0..m * n).step_by(m * n / 499 + 1).map(|at| (at / n, at % n));
                let exact = |(row, column): (usize, usize)| -> f32 {
                    let product = |k: usize| {
                        f64::from(a.0[row * a.1 + k * a.2]) * f64::from(b.0[column * b.1 + k * b.2])
                    };
                    (0..depth).map(product).sum::<f64>() as f32
                };
                let wanted: Vec<f32> = at.clone().map(exact).collect();
                relative_error(&at.map(|(row, column)| got[row * n + column]).collect::<Vec<_>>(), &wanted)
            };
            [
                off(&output, (&host_x, d_input, 1), (&host_weight, d_input, 1), d_input),
                off(&gradients[0], (&upstream, d_output, 1), (&host_weight, 1, d_input), d_output),
                off(&gradients[1], (&upstream, 1, d_output), (&host_x, 1, d_input), rows),
            ]
        };
        let what = format!("{rows}x{d_input}x{d_output}");
        assert!(error().iter().all(|error| *error < 5e-6), "{what}: {:?}", error());
        if B::name(&device).contains("cuda") {
            use_f32_products(F32Products::Tf32);
            let errors = error();
            use_f32_products(F32Products::Exact);
            assert!(errors.iter().all(|error| *error < 2e-3), "{what} in TF32: {errors:?}");
            println!("{what}: {:?}, in TF32 {errors:?}", error());
        }
    }
});

// What is rehearsed is launched only in part: its results mean nothing, and those behind it are right.
backend_test!(products_are_right_behind_a_rehearsal_of_them::<B>(device) {
    let dtype = half_or_single::<B>(&device);
    let (x, weight) = (random::<B, 2>(1, [640, 512], &device).cast(dtype), random::<B, 2>(2, [1024, 512], &device).cast(dtype));
    let mut calls = 0;
    compile_ahead::<B>(&device, || {
        calls += 1;
        drop(linear(x.clone(), weight.clone(), None));
    });
    assert!(calls <= usize::from(B::name(&device).contains("cuda")), "{calls} calls");
    let wanted = plain::linear(x.clone().cast(DType::F32), weight.clone().cast(DType::F32), None);
    let tolerance = if dtype == DType::F32 { tolerance::<B>(&device) } else { 2e-2 };
    assert_close("linear", &linear(x, weight, None).cast(DType::F32), &wanted, tolerance);
});

backend_test!(projections_in_half_precision_are_close_to_the_reference::<B>(device) {
    for dtype in [DType::BF16, DType::F16] {
        if !<B as burn::tensor::backend::Backend>::supports_dtype(&device, dtype) {
            continue;
        }
        // Whole tiles, their edges, many rows, rows that do not begin at whole vectors in one product or all, a gradient in
        // pieces, and sizes that are small.
        let sizes = [
            [1024, 512, 768],
            [1000, 520, 648],
            [4096, 136, 2056],
            [8192, 512, 512],
            [1003, 640, 640],
            [3000, 328, 776],
            [530, 601, 603],
            [2048, 64, 72],
            [104, 24, 40],
            [67, 136, 200],
            [1, 8, 16],
        ];
        for [rows, d_input, d_output] in sizes.into_iter().filter(|size| is_worth_it::<B>(&device, size)) {
            let rounded = |x: Tensor<B, 2>| x.cast(dtype).cast(DType::F32);
            let x = rounded(random::<B, 2>(1, [rows, d_input], &device));
            let weight = rounded(random::<B, 2>(2, [d_output, d_input], &device));
            for (x, weight) in [(x.clone(), weight.clone()), (strided(x), strided(weight))] {
                let what = format!("{dtype:?} linear {rows}x{d_input}x{d_output}");
                let (output, gradients) = with_gradients(&[x.clone(), weight.clone()], DType::F32, |i| {
                    linear(i[0].clone().cast(dtype), i[1].clone(), None).cast(DType::F32)
                });
                let (wanted, wanted_gradients) = with_gradients(&[x, weight], DType::F32, |i| {
                    plain::linear(i[0].clone(), i[1].clone(), None)
                });
                assert_close(&what, &output, &wanted, 1e-2);
                for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                    assert_close(&format!("{what}, gradient of input {at}"), gradient, wanted, 2e-2);
                }
            }
        }
    }
});

backend_test!(projections_end_with_dropout_and_the_residual_stream::<B>(device) {
    for [rows, d_input, d_output] in [[1, 1, 1], [65, 63, 64], [3, 5, 1001]] {
        let x = random::<B, 2>(1, [rows, d_input], &device);
        let weight = random::<B, 2>(2, [d_output, d_input], &device);
        let bias = random::<B, 1>(3, [d_output], &device);
        let residual = strided(random::<B, 2>(4, [rows, d_output], &device));
        for bias in [Some(bias), None] {
            for probability in [0.0, 0.4] {
                let drop = Dropout { probability, key: RandomKey::new(6) };
                let ours = linear_add(x.clone(), weight.clone(), bias.clone(), Some(drop), residual.clone());
                let product = plain::linear(x.clone(), weight.clone(), bias.clone());
                let wanted = residual.clone() + plain::dropout(product, drop);
                let what = format!("linear_add {rows}x{d_input}x{d_output}, dropout {probability}");
                assert_close(&what, &ours, &wanted, tolerance::<B>(&device));
            }
        }
    }
});

backend_test!(projections_in_half_precision_end_with_the_residual_stream::<B>(device) {
    for dtype in [DType::BF16, DType::F16] {
        if !<B as burn::tensor::backend::Backend>::supports_dtype(&device, dtype) {
            continue;
        }
        // Whole tiles and their edges, an odd width, a long inner dimension, and a large product.
        let sizes = [[128, 128, 128], [67, 136, 202], [65, 64, 63], [64, 4096, 64], [1024, 512, 768]];
        for [rows, d_input, d_output] in sizes.into_iter().filter(|size| is_worth_it::<B>(&device, size)) {
            let half = |seed, dims| random::<B, 2>(seed, dims, &device).cast(dtype);
            let (x, weight) = (half(1, [rows, d_input]), half(2, [d_output, d_input]));
            let bias = random::<B, 1>(3, [d_output], &device);
            let wide = |x: &Tensor<B, 2>| x.clone().cast(DType::F32);
            for bias in [Some(bias), None] {
                let product = plain::linear(wide(&x), wide(&weight), bias.clone());
                let what = format!("{dtype:?} linear {rows}x{d_input}x{d_output}, biased {}", bias.is_some());
                assert_close(&what, &wide(&linear(x.clone(), weight.clone(), bias.clone())), &product, 1e-2);
                // As it is, parts of wider rows that do and do not begin at whole pairs, columns in one run each, and f32.
                for (lies, residual) in [
                    half(4, [rows, d_output]),
                    half(5, [rows, d_output + 4]).narrow(1, 2, d_output),
                    half(6, [rows, d_output + 3]).narrow(1, 3, d_output),
                    half(7, [d_output, rows]).transpose(),
                    random(8, [rows, d_output], &device),
                ]
                .into_iter()
                .enumerate()
                {
                    let drop = Dropout { probability: 0.3, key: RandomKey::new(9) };
                    for drop in if lies < 2 { vec![None, Some(drop)] } else { vec![None] } {
                        let ours = linear_add(x.clone(), weight.clone(), bias.clone(), drop, residual.clone());
                        let kept = drop.map_or(product.clone(), |drop| plain::dropout(product.clone(), drop));
                        let what = format!("{what}, residual {lies}, dropped {}", drop.is_some());
                        assert_close(&what, &wide(&ours), &(wide(&residual) + kept), 1e-2);
                    }
                }
            }
        }
    }
});

backend_test!(activations_match_the_reference::<B>(device) {
    let kinds = [ActivationKind::GeluErf, ActivationKind::GeluTanh, ActivationKind::Relu, ActivationKind::Silu];
    for kind in kinds {
        for gated in [false, true] {
            let activation = Activation { kind, gated };
            for (rows, columns) in [(1, 2), (3, 64), (65, 130), (2, 1000)] {
                let x = random::<B, 2>(1, [rows, columns], &device) * 6.0;
                assert_parity(
                    &format!("{activation:?} {rows}x{columns}"),
                    &[strided(x)],
                    |x| activate(x[0].clone(), activation),
                    |x| plain::activate(x[0].clone(), activation),
                );
            }
        }
    }
});

backend_test!(rotary_matches_the_reference::<B>(device) {
    for [batch_size, heads, seq_length, head_dim] in [[1, 1, 1, 2], [2, 3, 5, 6], [1, 2, 65, 64]] {
        let x = random::<B, 4>(1, [batch_size, heads, seq_length, head_dim], &device);
        let frequencies: Vec<f64> = (0..head_dim / 2).map(|i| 0.7f64.powi(i as i32)).collect();
        let positions: Vec<i32> = (0..batch_size * seq_length).map(|at| (at * 7 % 90) as i32).collect();
        let positions =
            Tensor::<Autodiff<B>, 2, Int>::from_data(TensorData::new(positions, [batch_size, seq_length]), &device);
        let table = RotaryTable::<Autodiff<B>>::new(90, &frequencies, 1.1, &device);
        assert_parity(
            &format!("rotary {batch_size}x{heads}x{seq_length}x{head_dim}"),
            &[strided(x)],
            |x| rotary(x[0].clone(), &table, positions.clone()),
            |x| plain::rotary(x[0].clone(), &table, positions.clone()),
        );
    }
});

backend_test!(qkv_rotary_matches_the_reference::<B>(device) {
    for [batch_size, seq_length, n_heads, n_kv_heads, head_dim] in
        [[1, 1, 1, 1, 2], [2, 5, 3, 1, 6], [1, 65, 4, 2, 64], [3, 33, 6, 6, 8]]
    {
        let heads = PackedHeads { n_heads, n_kv_heads, head_dim };
        let name = format!("qkv_rotary {batch_size}x{seq_length}, {heads:?}");
        let qkv = random::<B, 3>(1, [batch_size, seq_length, heads.width()], &device);
        let frequencies: Vec<f64> = (0..head_dim / 2).map(|i| 0.7f64.powi(i as i32)).collect();
        let table = RotaryTable::<Autodiff<B>>::new(90, &frequencies, 1.1, &device);
        let positions: Vec<i32> = (0..seq_length).map(|at| (at * 7 % 90) as i32).collect();
        let positions = Tensor::<Autodiff<B>, 2, Int>::from_data(TensorData::new(positions, [1, seq_length]), &device);
        let positions = positions.expand([batch_size, seq_length]);
        for qkv in [qkv.clone(), strided(qkv)] {
            // Once over a tensor that nothing else holds, once over one that the caller keeps.
            for kept in [false, true] {
                let ours = |i: &[Tensor<Autodiff<B>, 3>]| {
                    let qkv = if kept { i[0].clone() } else { i[0].clone() * 1.0 };
                    qkv_rotary(qkv, heads, &table, positions.clone())
                };
                assert_parity(&name, from_ref(&qkv), ours, |i| {
                    plain::qkv_rotary(i[0].clone(), heads, &table, positions.clone())
                });
            }
        }
    }
});

/// Attention of queries, keys and values in one list against the reference, for one mask.
fn attention_parity<B: Backend>(what: &str, inputs: &[Tensor<B, 4>], mask: &AttentionMask<Autodiff<B>>, drop: bool) {
    let head_dim = inputs[0].dims()[3];
    let dropped = drop.then_some(Dropout { probability: 0.25, key: RandomKey::new(8) });
    let options = AttentionOptions::new(head_dim).with_dropout(dropped);
    assert_parity(
        what,
        inputs,
        |i| attention(i[0].clone(), i[1].clone(), i[2].clone(), mask, options),
        |i| {
            let output = plain::attention(i[0].clone(), i[1].clone(), i[2].clone(), mask, options);
            let [batch_size, seq_length, heads, head_dim] = output.dims();
            output.reshape([batch_size, seq_length, heads * head_dim])
        },
    );
}

backend_test!(attention_matches_the_reference::<B>(device) {
    let ints = |values: &[i32]| Tensor::<Autodiff<B>, 1, Int>::from_data(values, &device);
    for [batch_size, n_heads, n_kv_heads, queries, keys, head_dim] in [
        [1, 1, 1, 1, 1, 2],
        [2, 4, 2, 3, 3, 8],
        [1, 3, 3, 63, 63, 16],
        [2, 6, 2, 65, 65, 5],
        [1, 2, 1, 7, 130, 32],
        [1, 1, 1, 200, 200, 64],
    ] {
        let inputs = [
            random::<B, 4>(1, [batch_size, n_heads, queries, head_dim], &device) * 2.0,
            random::<B, 4>(2, [batch_size, n_kv_heads, keys, head_dim], &device) * 2.0,
            random::<B, 4>(3, [batch_size, n_kv_heads, keys, head_dim], &device),
        ];
        let swapped = inputs.clone().map(strided);
        let positions: Vec<i32> = (0..batch_size * queries).map(|at| (at * 5 % keys) as i32).collect();
        let positions = ints(&positions).reshape([batch_size, queries]);
        let lengths: Vec<i32> = (0..batch_size).map(|row| (keys - row.min(keys - 1)) as i32).collect();
        // Documents of 1 to 40 tokens, and places that are none.
        let start = |at: usize| if at % 41 == 40 { -3 } else { (at % queries / 40 * 40 + at % 3 / 2 * 7) as i32 };
        let starts: Vec<i32> = (0..batch_size * queries).map(start).collect();
        let starts = ints(&starts).reshape([batch_size, queries]);
        // On two of the sizes: each kind of mask is compiled for each of them.
        let documents = match queries {
            65 => Some(("documents in a window", AttentionMask::Documents { starts, window: Some(5) })),
            200 => Some(("documents", AttentionMask::Documents { starts, window: None })),
            _ => None,
        };
        let mut masks = vec![
            ("full", AttentionMask::None),
            ("causal", AttentionMask::Causal { window: None }),
            ("window", AttentionMask::Causal { window: Some(3) }),
            ("positions", AttentionMask::Positions { positions: positions.clone(), window: None }),
            ("positions in a window", AttentionMask::Positions { positions, window: Some(4) }),
            ("lengths", AttentionMask::Lengths(ints(&lengths))),
        ];
        masks.extend(documents);
        for (name, mask) in &masks {
            let name = format!("attention {name} {batch_size}x{n_heads}/{n_kv_heads}x{queries}/{keys}x{head_dim}");
            attention_parity(&name, &inputs, mask, false);
            attention_parity(&format!("{name} strided"), &swapped, mask, false);
            attention_parity(&format!("{name} with dropout"), &inputs, mask, true);
        }
    }
});

backend_test!(documents_in_a_row_attend_as_if_each_were_alone::<B>(device) {
    let (lengths, total) = ([1, 70, 3, 66], 140);
    let random = |seed| random::<B, 4>(seed, [1, 2, total, 16], &device);
    let inputs = [random(1), random(2), random(3)];
    let begins: Vec<usize> = lengths.iter().scan(0, |end, length| Some(std::mem::replace(end, *end + length))).collect();
    let starts: Vec<i32> =
        begins.iter().zip(lengths).flat_map(|(begin, length)| vec![*begin as i32; length]).collect();
    let starts = Tensor::<B, 1, Int>::from_data(starts.as_slice(), &device).reshape([1, total]);
    let attend = |[q, k, v]: [Tensor<B, 4>; 3], mask| attention(q, k, v, &mask, AttentionOptions::new(16));
    let together = attend(inputs.clone(), AttentionMask::Documents { starts, window: None });
    let alone = begins.iter().zip(lengths).map(|(begin, length)| {
        let own = inputs.clone().map(|x| x.slice([0..1, 0..2, *begin..begin + length]));
        attend(own, AttentionMask::Causal { window: None })
    });
    assert_close("documents", &together, &Tensor::cat(alone.collect(), 1), 1e-5);
});

backend_test!(attention_weights_times_the_values_are_attention::<B>(device) {
    let query = random::<B, 4>(1, [2, 4, 7, 8], &device) * 2.0;
    let (key, value) = (random::<B, 4>(2, [2, 2, 7, 8], &device) * 2.0, random::<B, 4>(3, [2, 2, 7, 8], &device));
    let lengths = Tensor::<B, 1, Int>::from_data([7, 3], &device);
    for mask in [AttentionMask::None, AttentionMask::Causal { window: Some(4) }, AttentionMask::Lengths(lengths)] {
        let options = AttentionOptions::new(8);
        let weights = attention_weights(query.clone(), key.clone(), &mask, options);
        // Key head j serves two query heads.
        let values = value.clone().reshape([2, 2, 1, 7, 8]).expand([2, 2, 2, 7, 8]).reshape([2, 4, 7, 8]);
        let ours = weights.matmul(values).swap_dims(1, 2).reshape([2, 7, 32]);
        let fused = attention(query.clone(), key.clone(), value.clone(), &mask, options);
        // CUDA multiplies the weights by the values in TF32.
        assert_close("attention weights", &ours, &fused, tolerance::<B>(&device) / 10.0);
    }
});

backend_test!(attention_matches_the_reference_whatever_the_head_size::<B>(device) {
    for head_dim in [1, 32, 80, 128, 256] {
        let inputs = [
            strided(random::<B, 4>(1, [1, 2, 35, head_dim], &device) * 2.0),
            random::<B, 4>(2, [1, 1, 67, head_dim], &device) * 2.0,
            strided(random::<B, 4>(3, [1, 1, 67, head_dim], &device)),
        ];
        let mask = AttentionMask::Causal { window: Some(50) };
        attention_parity(&format!("attention of {head_dim} a head"), &inputs, &mask, true);
    }
});

backend_test!(attention_matches_the_reference_at_the_borders_of_tiles::<B>(device) {
    let causal = |window| AttentionMask::<Autodiff<B>>::Causal { window };
    let inputs = |batch_size: usize, queries: usize, keys: usize| {
        [
            random::<B, 4>(1, [batch_size, 1, queries, 16], &device) * 2.0,
            random::<B, 4>(2, [batch_size, 1, keys, 16], &device) * 2.0,
            random::<B, 4>(3, [batch_size, 1, keys, 16], &device),
        ]
    };
    // Many rows of each length: one row's gradient may be a difference of numbers that half precision rounds away.
    for length in [1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129] {
        attention_parity(&format!("full {length}"), &inputs(16, length, length), &AttentionMask::None, false);
        attention_parity(&format!("causal {length}"), &inputs(16, length, length), &causal(None), false);
        attention_parity(&format!("causal {length}/130"), &inputs(16, length, 130), &causal(None), false);
    }
    for window in [1, 2, 31, 32, 33, 63, 64, 65, 66, 127, 128, 129, 1000] {
        let what = format!("window of {window}");
        attention_parity(&what, &inputs(1, 200, 200), &causal(Some(window)), false);
        attention_parity(&format!("{what}, few queries"), &inputs(1, 66, 200), &causal(Some(window)), false);
    }
    for length in [1, 32, 63, 64, 65, 128, 130] {
        let lengths = Tensor::from_data([length, 130 - length / 2], &device);
        attention_parity(&format!("length {length}"), &inputs(2, 33, 130), &AttentionMask::Lengths(lengths), false);
    }
    attention_parity("long", &inputs(1, 1000, 1000), &causal(None), true);
    attention_parity("long in a window", &inputs(1, 1000, 1000), &causal(Some(300)), false);
});

backend_test!(attention_takes_keys_that_all_heads_and_rows_share::<B>(device) {
    let dtype = dtype_under_test::<B>(&device);
    let query = random::<B, 4>(1, [2, 4, 70, 64], &device) * 2.0;
    let [key, value] = [2, 3].map(|seed| random::<B, 4>(seed, [1, 1, 70, 64], &device).cast(dtype));
    let options = AttentionOptions::new(64);
    let shared = |x: &Tensor<B, 4>, like: &Tensor<Autodiff<B>, 4>| {
        Tensor::from_inner(x.clone().cast(like.dtype()).expand([2, 4, 70, 64]))
    };
    for mask in [AttentionMask::None, AttentionMask::Causal { window: None }] {
        assert_parity(
            "attention of expanded keys and values",
            from_ref(&query),
            |i| attention(i[0].clone(), shared(&key, &i[0]), shared(&value, &i[0]), &mask, options),
            |i| {
                let [key, value] = [&key, &value].map(|x| shared(x, &i[0]));
                plain::attention(i[0].clone(), key, value, &mask, options).reshape([2, 70, 256])
            },
        );
    }
});

backend_test!(attention_of_queries_without_keys_is_finite::<B>(device) {
    let inputs = [4, 5, 6].map(|seed| random::<B, 4>(seed, [2, 1, 70, 16], &device));
    let lengths = AttentionMask::Lengths(Tensor::from_data([0, 70], &device));
    let options = AttentionOptions::new(16);
    let attend = |i: &[Tensor<Autodiff<B>, 4>]| attention(i[0].clone(), i[1].clone(), i[2].clone(), &lengths, options);
    let (output, gradients) = with_gradients(&inputs, DType::F32, attend);
    assert!(values(&output).iter().all(|x| x.is_finite()), "output");
    let alone = inputs.clone().map(|x| x.narrow(0, 1, 1));
    let mask = AttentionMask::<Autodiff<B>>::None;
    let alone = with_gradients(&alone, DType::F32, |i| attention(i[0].clone(), i[1].clone(), i[2].clone(), &mask, options)).0;
    assert_close("the other row", &output.narrow(0, 1, 1), &alone, tolerance::<B>(&device));
    for gradient in gradients {
        assert!(values(&gradient).iter().all(|x| x.is_finite()), "gradient");
    }
});

/// An attention whose inputs are of 16 bits: sizes `[batch_size, n_heads, n_kv_heads, queries, keys, head_dim]`, the mask among those of
/// [`attention_in_half_precision`], and whether there is dropout.
type HalfPrecisionCase = ([usize; 6], usize, bool);

/// Forward and gradients of attention in bf16 and f16, as far as the device has them, against the reference in f32.
fn attention_in_half_precision<B: Backend>(device: &B::Device, cases: &[HalfPrecisionCase]) {
    for dtype in [DType::BF16, DType::F16] {
        if !<B as burn::tensor::backend::Backend>::supports_dtype(device, dtype) {
            continue;
        }
        for ([batch_size, n_heads, n_kv_heads, queries, keys, head_dim], mask, drop) in cases.iter().copied() {
            // Rounded first, so that both sides start from the same numbers.
            let rounded = |x: Tensor<B, 4>| x.cast(dtype).cast(DType::F32);
            let inputs = [
                rounded(random::<B, 4>(1, [batch_size, n_heads, queries, head_dim], device) * 2.0),
                rounded(random::<B, 4>(2, [batch_size, n_kv_heads, keys, head_dim], device) * 2.0),
                rounded(random::<B, 4>(3, [batch_size, n_kv_heads, keys, head_dim], device)),
            ];
            let ints = |values: &[i32]| Tensor::<Autodiff<B>, 1, Int>::from_data(values, device);
            let tokens = |of: fn(usize, usize) -> i32| {
                let values: Vec<_> = (0..batch_size * queries).map(|at| of(at / queries, at % queries)).collect();
                ints(&values).reshape([batch_size, queries])
            };
            let positions: Vec<i32> = (0..batch_size * queries).map(|at| (at * 5 % keys) as i32).collect();
            let lengths: Vec<i32> = (0..batch_size).map(|row| (keys - row * keys / 2) as i32).collect();
            // In the second row of the batch documents are of other lengths; tokens of the last kind begin anywhere, some at no place.
            let starts = tokens(|row, at| (at / (45 + 100 * row) * (45 + 100 * row)) as i32);
            let places = tokens(|_, at| if at % 41 == 40 { -3 } else { (at / 90 * 90 + at % 3 / 2 * 70) as i32 });
            let masks = [
                AttentionMask::None,
                AttentionMask::Causal { window: None },
                AttentionMask::Causal { window: Some(70) },
                AttentionMask::Positions {
                    positions: ints(&positions).reshape([batch_size, queries]),
                    window: Some(4),
                },
                AttentionMask::Lengths(ints(&lengths)),
                AttentionMask::Documents { starts, window: None },
                AttentionMask::Documents { starts: places, window: Some(130) },
            ];
            let what =
                format!("{dtype:?} {n_heads}/{n_kv_heads}x{queries}/{keys}x{head_dim}, mask {mask}, dropout {drop}");
            let mask = &masks[mask];
            let dropped = drop.then_some(Dropout { probability: 0.25, key: RandomKey::new(8) });
            let options = AttentionOptions::new(head_dim).with_dropout(dropped);
            let (output, gradients) = with_gradients(&inputs, DType::F32, |i| {
                let [q, k, v] = [0, 1, 2].map(|at| i[at].clone().cast(dtype));
                attention(q, k, v, mask, options).cast(DType::F32)
            });
            let (wanted, wanted_gradients) = with_gradients(&inputs, DType::F32, |i| {
                let output = plain::attention(i[0].clone(), i[1].clone(), i[2].clone(), mask, options);
                output.reshape([batch_size, queries, n_heads * head_dim])
            });
            assert_close(&what, &output, &wanted, 1e-2);
            for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                assert_close(&format!("{what}, gradient of input {at}"), gradient, wanted, 2e-2);
            }
        }
    }
}

backend_test!(attention_in_half_precision_is_close_to_the_reference::<B>(device) {
    let cases = [
        ([2, 4, 2, 300, 300, 64], 1, true),
        ([2, 4, 2, 300, 300, 64], 1, false),
        ([1, 1, 1, 129, 129, 64], 2, false),
        ([1, 2, 1, 7, 130, 64], 3, true),
        ([2, 2, 2, 70, 130, 64], 4, false),
        ([1, 1, 1, 65, 63, 16], 0, false),
        ([1, 2, 1, 1, 200, 48], 3, false),
        ([2, 2, 2, 129, 129, 80], 2, true),
        ([1, 2, 1, 200, 200, 128], 1, false),
        ([1, 4, 2, 200, 333, 64], 1, false),
        ([2, 2, 1, 100, 260, 128], 2, false),
        ([2, 3, 3, 150, 150, 64], 0, false),
        ([1, 2, 2, 140, 70, 128], 0, false),
        ([1, 1, 1, 130, 130, 144], 1, true),
        ([1, 2, 1, 100, 100, 256], 1, false),
        ([1, 2, 1, 65, 65, 33], 4, true),
        ([2, 2, 1, 150, 150, 64], 5, false),
        ([1, 2, 2, 130, 130, 32], 5, true),
    ];
    attention_in_half_precision::<B>(&device, &cases);
});

backend_test!(attention_of_heads_of_64_and_128_is_close_to_the_reference_under_every_mask::<B>(device) {
    // Only a device that has bf16 may have kernels for these; the portable ones are looked at above.
    if !<B as burn::tensor::backend::Backend>::supports_dtype(&device, DType::BF16) {
        return;
    }
    let cases = [
        ([2, 4, 2, 300, 300, 64], 5, true),
        ([2, 4, 2, 300, 300, 64], 5, false),
        ([2, 2, 1, 300, 300, 128], 5, true),
        ([2, 2, 1, 260, 260, 128], 5, false),
        ([2, 2, 2, 400, 400, 64], 6, true),
        ([1, 2, 2, 400, 400, 128], 6, false),
        ([3, 2, 2, 200, 300, 64], 4, true),
        ([3, 4, 2, 129, 260, 64], 4, false),
        ([2, 2, 1, 260, 390, 128], 4, true),
        ([2, 2, 1, 130, 260, 128], 4, false),
        ([2, 4, 2, 100, 260, 128], 2, true),
        ([2, 2, 2, 257, 257, 64], 2, true),
        ([1, 2, 1, 65, 300, 64], 0, true),
        ([1, 2, 2, 200, 70, 128], 0, true),
    ];
    attention_in_half_precision::<B>(&device, &cases);
});

backend_test!(head_loss_matches_the_reference_whatever_the_chunk::<B>(device) {
    for [rows, d_model, vocabulary] in [[1, 2, 3], [13, 24, 61], [65, 8, 1000], [130, 16, 63], [3, 4, 20_001]] {
        let hidden = random::<B, 2>(1, [rows, d_model], &device);
        let weight = random::<B, 2>(2, [vocabulary, d_model], &device) * 3.0;
        let target = |at: usize| if at % 5 == 3 { -100 } else { (at * 37 % vocabulary) as i32 };
        let targets: Vec<i32> = (0..rows).map(target).collect();
        let targets = Tensor::<Autodiff<B>, 1, Int>::from_data(targets.as_slice(), &device);
        for smoothing in [0.0, 0.1] {
            let options = HeadLossOptions::new().with_label_smoothing(smoothing).with_weight(1.0 - smoothing);
            for chunk in [1, 7, 64, 1000] {
                assert_parity(
                    &format!("head_loss {rows}x{d_model}x{vocabulary}, smoothing {smoothing}, chunk {chunk}"),
                    &[strided(hidden.clone()), weight.clone()],
                    |i| head_loss(i[0].clone(), i[1].clone(), targets.clone(), options.with_chunk(chunk)),
                    |i| {
                        let (hidden, weight) = (i[0].clone(), i[1].clone());
                        plain::head_loss(hidden, weight, targets.clone(), options)
                    },
                );
            }
        }
    }
});

backend_test!(head_loss_in_half_precision_has_the_gradients_of_the_reference_whatever_the_chunk::<B>(device) {
    // In f16 a gradient of so many rows vanishes.
    let dtype = DType::BF16;
    if !<B as burn::tensor::backend::Backend>::supports_dtype(&device, dtype) {
        return;
    }
    // A chunk's products are large, so that they are added up where they are made on devices that can.
    let (rows, d_model, vocabulary) = (1100, 264, 2056);
    let rounded = |x: Tensor<B, 2>| x.cast(dtype).cast(DType::F32);
    let hidden = rounded(random::<B, 2>(1, [rows, d_model], &device));
    let weight = rounded(random::<B, 2>(2, [vocabulary, d_model], &device));
    let targets: Vec<i32> = (0..rows).map(|at| (at * 37 % vocabulary) as i32).collect();
    let targets = Tensor::<Autodiff<B>, 1, Int>::from_data(targets.as_slice(), &device);
    let options = HeadLossOptions::new();
    let inputs = [hidden, weight];
    let (wanted, wanted_gradients) =
        with_gradients(&inputs, DType::F32, |i| plain::head_loss(i[0].clone(), i[1].clone(), targets.clone(), options));
    for chunk in [550, 1100] {
        let what = format!("{dtype:?} head_loss, chunk {chunk}");
        let (loss, gradients) = with_gradients(&inputs, DType::F32, |i| {
            head_loss(i[0].clone().cast(dtype), i[1].clone(), targets.clone(), options.with_chunk(chunk))
        });
        assert_close(&what, &loss, &wanted, 1e-2);
        for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
            assert_close(&format!("{what}, gradient of input {at}"), gradient, wanted, 3e-2);
        }
    }
});

backend_test!(head_loss_of_a_large_vocabulary_in_half_precision_is_close_to_the_reference::<B>(device) {
    for dtype in [DType::BF16, DType::F16] {
        if !<B as burn::tensor::backend::Backend>::supports_dtype(&device, dtype) {
            continue;
        }
        // No whole vectors, whole vectors, whole tiles, rows of which several are held; and one that is too large to be held.
        let sizes = [
            [700, 24, 24_577],
            [600, 24, 32_000],
            [300, 64, 50_257],
            [129, 40, 50_264],
            [700, 64, 50_304],
            [40, 24, 70_000],
        ];
        for [rows, d_model, vocabulary] in sizes {
            if !is_worth_it::<B>(&device, &[rows, d_model, vocabulary]) {
                continue;
            }
            let rounded = |x: Tensor<B, 2>| x.cast(dtype).cast(DType::F32);
            let hidden = rounded(random::<B, 2>(1, [rows, d_model], &device));
            let weight = rounded(random::<B, 2>(2, [vocabulary, d_model], &device));
            // Some do not count, one is the last token, and the others are among the first ones.
            const FIRST: usize = 151;
            let target = |at: usize| match at % 5 {
                3 => -100,
                _ if at == 1 => vocabulary as i32 - 1,
                _ => (at * 37 % FIRST) as i32,
            };
            let targets: Vec<i32> = (0..rows).map(target).collect();
            let targets = Tensor::<Autodiff<B>, 1, Int>::from_data(targets.as_slice(), &device);
            let inputs = [hidden, weight];
            for (smoothing, chunk) in [(0.0, 1000), (0.9, 1000), (0.0, 33)] {
                // Large, so that gradients do not vanish in f16.
                let options = HeadLossOptions::new().with_label_smoothing(smoothing).with_weight(1e3);
                let (wanted, wanted_gradients) = with_gradients(&inputs, DType::F32, |i| {
                    plain::head_loss(i[0].clone(), i[1].clone(), targets.clone(), options)
                });
                let (loss, gradients) = with_gradients(&inputs, DType::F32, |i| {
                    head_loss(i[0].clone().cast(dtype), i[1].clone(), targets.clone(), options.with_chunk(chunk))
                });
                let what =
                    format!("{dtype:?} head_loss {rows}x{d_model}x{vocabulary}, smoothing {smoothing}, chunk {chunk}");
                assert_close(&what, &loss, &wanted, 1e-2);
                let [hidden, weight] = inputs.clone();
                let alone =
                    head_loss(hidden.cast(dtype), weight, targets.clone().inner(), options.with_chunk(chunk));
                assert_close(&format!("{what}, without gradients"), &alone, &loss, 1e-5);
                assert_close(&format!("{what}, gradient of hidden"), &gradients[0], &wanted_gradients[0], 3e-2);
                assert_close(&format!("{what}, gradient of the weight"), &gradients[1], &wanted_gradients[1], 3e-2);
                // What is not a target has far smaller gradients.
                let others = |x: &Tensor<B, 2>| x.clone().narrow(0, FIRST, vocabulary - FIRST - 1);
                let [gradient, wanted] = [&gradients[1], &wanted_gradients[1]].map(others);
                assert_close(&format!("{what}, gradient of the other tokens' weight"), &gradient, &wanted, 3e-2);
            }
        }
    }
});

backend_test!(a_table_that_is_used_elsewhere_has_the_gradients_of_all_its_uses::<B>(device) {
    // Rows that Burn lays out with gaps on some devices, and tables of few and of many tokens.
    for [vocabulary, d_model] in [[700, 96], [600, 288], [140, 40]] {
        let table = random::<B, 2>(1, [vocabulary, d_model], &device);
        let ints = |at: &dyn Fn(usize) -> usize| {
            let values: Vec<i32> = (0..130).map(|i| (at(i) % vocabulary) as i32).collect();
            Tensor::<Autodiff<B>, 1, Int>::from_data(values.as_slice(), &device)
        };
        let (tokens, targets) = (ints(&|i| i * i * 31).reshape([2, 65]), ints(&|i| i * 37));
        let options = HeadLossOptions::new();
        let name = format!("{vocabulary}x{d_model}");
        let as_head = |i: &[Tensor<Autodiff<B>, 2>]| {
            let rows = embed(i[0].clone(), tokens.clone(), FloatDType::F32).reshape([130, d_model]);
            head_loss(rows, i[0].clone(), targets.clone(), options)
        };
        assert_parity(&format!("the head, {name}"), from_ref(&table), as_head, |i| {
            let rows = plain::embed(i[0].clone(), tokens.clone(), FloatDType::F32).reshape([130, d_model]);
            plain::head_loss(rows, i[0].clone(), targets.clone(), options)
        });
        if dtype_under_test::<B>(&device) != DType::F32 {
            // A gradient of ours is f32, and Burn adds it to one of 16 bits as both lie.
            continue;
        }
        let scaled = |i: &[Tensor<Autodiff<B>, 2>]| {
            let rows = embed(i[0].clone(), tokens.clone(), FloatDType::F32).reshape([130, d_model]);
            rows + (i[0].clone() * 0.5).narrow(0, 0, 130)
        };
        assert_parity(&format!("a factor, {name}"), from_ref(&table), scaled, |i| {
            let rows = plain::embed(i[0].clone(), tokens.clone(), FloatDType::F32).reshape([130, d_model]);
            rows + (i[0].clone() * 0.5).narrow(0, 0, 130)
        });
    }
});

backend_test!(head_loss_of_nothing_is_zero::<B>(device) {
    let hidden = random::<B, 2>(1, [3, 4], &device);
    let weight = random::<B, 2>(2, [5, 4], &device);
    let targets = Tensor::<B, 1, Int>::from_data([-100, -100, -100], &device);
    assert_eq!(values(&head_loss(hidden, weight, targets, HeadLossOptions::new())), [0.0]);
});

backend_test!(optimizer_step_matches_the_reference::<B>(device) {
    for max_grad_norm in [None, Some(0.1), Some(1e6)] {
        let adamw = AdamW {
            learning_rate: 0.01,
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            max_grad_norm,
            step: 1,
        };
        let parameters = |gradient_seed: u64| -> Vec<AdamWParameter<B>> {
            [1, 3, 65, 1000, 40_001]
                .into_iter()
                .map(|size| AdamWParameter {
                    value: random(size as u64, [size], &device),
                    gradient: random(gradient_seed + size as u64, [size], &device),
                    first_moment: Tensor::zeros([size], &device),
                    second_moment: Tensor::zeros([size], &device),
                    decays: size % 2 == 1,
                    copy: None,
                })
                .collect()
        };
        let (mut ours, mut theirs) = (parameters(50), parameters(50));
        for step in 1..=3 {
            let adamw = AdamW { step, ..adamw };
            let (our_norm, their_norm);
            (ours, our_norm) = optimizer_step(ours, &adamw);
            (theirs, their_norm) = plain::optimizer_step(theirs, &adamw);
            assert_close("gradient norm", &our_norm, &their_norm, 1e-5);
            for (at, (our, their)) in ours.iter_mut().zip(&mut theirs).enumerate() {
                let what = format!("parameter {at} after step {step}, clipped to {max_grad_norm:?}");
                assert_close(&what, &our.value, &their.value, 1e-5);
                let gradient = random(60 + step + at as u64, our.value.dims(), &device);
                (our.gradient, their.gradient) = (gradient.clone(), gradient);
            }
        }
    }
});

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

backend_test!(gradients_of_a_second_pass_are_added_to_those_of_the_first_and_leave_what_others_hold::<B>(device) {
    let half = half_or_single::<B>(&device);
    added_gradients_parity::<B>(&[(DType::F32, [33, 20, 5, 7]), (half, [65, 130, 24, 40])], &device);
});

backend_test!(gradients_of_large_products_are_added_to_those_of_a_pass_before::<B>(device) {
    // So large that the products of a Hopper GPU add to what there is; elsewhere such only take long.
    let sizes = if B::name(&device).contains("cuda") { [600, 1100, 512, 1024] } else { [140, 260, 64, 136] };
    let half = half_or_single::<B>(&device);
    added_gradients_parity::<B>(&[half, DType::F32].map(|dtype| (dtype, sizes)), &device);
});

fn added_gradients_parity<B: Backend>(cases: &[(DType, [usize; 4])], device: &B::Device) {
    let gelu = Activation::plain(ActivationKind::GeluTanh);
    for (dtype, [vocabulary, tokens, d_model, d_ff]) in cases.iter().copied() {
        let what = format!("{vocabulary} words, {tokens} tokens, {d_model} to {d_ff}, {dtype:?}");
        let leaf = |seed, shape| Tensor::<Autodiff<B>, 2>::from_inner(random(seed, shape, device)).require_grad();
        let weights = [
            leaf(1, [vocabulary, d_model]),
            leaf(2, [d_ff, d_model]),
            leaf(3, [d_model, d_ff]),
            leaf(4, [1, d_ff]),
            leaf(5, [1, d_model]),
            leaf(6, [d_model, d_model]),
            leaf(7, [d_ff, d_model]),
            leaf(8, [1, d_ff]),
            leaf(9, [d_model, d_ff]),
            leaf(10, [1, d_model]),
        ];
        let [table, up, down, bias, gamma, late, wide, wide_bias, narrow, narrow_bias] = &weights;
        // Each pass has other tokens, and one weight is only in the second.
        let loss = |pass: usize| {
            let ids: Vec<i32> = (0..tokens).map(|at| (at * at * (pass + 7) % (vocabulary - pass)) as i32).collect();
            let ids = Tensor::<Autodiff<B>, 2, Int>::from_data(TensorData::new(ids, [1, tokens]), device);
            let x = embed(table.clone(), ids.clone(), dtype.into());
            let norm = Norm::rms(vector(gamma), 1e-5);
            let weights = FeedForwardLayer {
                up: up.clone().into(),
                up_bias: Some(vector(bias)),
                activation: gelu,
                down: down.clone().into(),
                down_bias: Some(vector(narrow_bias)),
            };
            let mut x = feed_forward(x, Some(&norm), weights, None);
            if pass == 1 {
                x = linear_add(x.clone(), late.clone(), None, None, x);
            }
            let inner = linear(x.clone(), wide.clone(), Some(vector(wide_bias)));
            x = linear_add(inner, narrow.clone(), Some(vector(narrow_bias)), None, x);
            // The gradient of a loss is not always one.
            let loss = head_loss(x, table.clone(), ids, HeadLossOptions::default());
            if pass == 1 { loss * 0.5 } else { loss }
        };
        let gradient = |weight: &Tensor<Autodiff<B>, 2>, gradients: &_| weight.grad(gradients);
        let [first, second] = [0, 1].map(|pass| backward(loss(pass), None));
        // Something else holds the gradients of some, and not those of the others.
        let alone = backward(loss(0), None);
        let held = [up, wide, table].map(|weight| gradient(weight, &first).expect("a gradient"));
        let before = held.clone().map(|held| values(&held));
        let both = backward(loss(1), Some(first));
        for (at, weight) in weights.iter().enumerate() {
            let wanted = match (gradient(weight, &alone), gradient(weight, &second)) {
                (Some(a), Some(b)) => a + b,
                (None, Some(only)) => only,
                parts => panic!("parameter {at} has {parts:?}"),
            };
            let sum = gradient(weight, &both).expect("a gradient");
            assert_close(&format!("parameter {at} of {what}"), &sum, &wanted, 1e-5);
        }
        assert_eq!(held.map(|held| values(&held)), before, "the first pass's gradients as they are held, {what}");
    }
}

backend_test!(optimizer_step_takes_many_parameters_and_leaves_what_others_hold::<B>(device) {
    let adamw = AdamW {
        learning_rate: 0.01,
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        max_grad_norm: Some(1.0),
        step: 3,
    };
    let copied = half_or_single::<B>(&device);
    let parameters = || -> Vec<AdamWParameter<B>> {
        (0..70)
            .map(|at| {
                let size = [4, 64, 3, 1000, 2048, 5000, 1][at % 7];
                AdamWParameter {
                    value: random(at as u64, [size], &device),
                    gradient: random(100 + at as u64, [size], &device),
                    first_moment: random(200 + at as u64, [size], &device) * 0.1,
                    second_moment: random(300 + at as u64, [size], &device).powi_scalar(2),
                    decays: at % 3 == 0,
                    copy: (at % 4 == 1).then(|| Tensor::zeros([size], (&device, copied))),
                }
            })
            .collect()
    };
    let (theirs, their_norm) = plain::optimizer_step(parameters(), &adamw);
    let (ours, our_norm) = optimizer_step(parameters(), &adamw);
    let (before, held) = (parameters(), parameters());
    let (shared, shared_norm) = optimizer_step(held.clone(), &adamw);
    assert_close("gradient norm", &our_norm, &their_norm, 1e-5);
    assert_eq!(values(&our_norm), values(&shared_norm));
    for at in 0..ours.len() {
        let fields = |parameter: &AdamWParameter<B>| {
            [&parameter.value, &parameter.first_moment, &parameter.second_moment].map(Tensor::clone)
        };
        let copy = ours[at].copy.as_ref().map(values);
        assert_eq!(shared[at].copy.as_ref().map(values), copy, "copy of parameter {at}, shared");
        assert!(held[at].copy.as_ref().is_none_or(|copy| values(copy).iter().all(|value| *value == 0.0)), "as held");
        let [our, their, shared] = [&ours[at], &theirs[at], &shared[at]].map(fields);
        let [before, held] = [&before[at], &held[at]].map(fields);
        for field in 0..3 {
            assert_close(&format!("field {field} of parameter {at}"), &our[field], &their[field], 1e-5);
            assert_eq!(values(&our[field]), values(&shared[field]), "field {field} of parameter {at}, shared");
            assert_eq!(values(&before[field]), values(&held[field]), "field {field} of parameter {at}, as held");
        }
        let copy = ours[at].copy.as_ref();
        assert_eq!(copy.map(Tensor::dtype), (at % 4 == 1).then_some(copied), "copy of parameter {at}");
        let rounded = copy.map(|_| values(&ours[at].value.clone().cast(copied)));
        assert_eq!(copy.map(values), rounded, "copy of parameter {at}");
    }

    let mut broken = parameters();
    broken[40].gradient = broken[40].gradient.clone() * f32::NAN;
    let (broken, norm) = optimizer_step(broken, &adamw);
    assert!(values(&norm)[0].is_nan());
    for parameter in &broken {
        assert!(values(&parameter.value).iter().all(|value| value.is_nan()), "NaN must not vanish");
    }
});

/// Rows that draw alike, each with a line of counts where there are penalties.
fn each_by_its_own_numbers<B: Backend>(sampling: Sampling, rows: usize, device: &B::Device) -> SampledRows<B> {
    let row = |row: usize| {
        let line = (!sampling.penalties.are_none()).then_some(row);
        SampledRow { sampling: sampling.with_seed(11, row as u64), line }
    };
    SampledRows::new(&(0..rows).map(row).collect::<Vec<_>>(), device)
}

backend_test!(sampling_draws_what_the_distribution_says::<B>(device) {
    // One hidden number a row, so that the weights are the logits.
    let logits = [2.0f32, 1.0, 0.5, 0.0, -1.0, -3.0];
    let rows = 4000;
    let hidden = Tensor::<B, 2>::ones([rows, 1], &device);
    let weight = Tensor::<B, 1>::from_data(logits.as_slice(), &device).reshape([6, 1]);
    let positions = Tensor::<B, 1, Int>::zeros([rows], &device);
    let draw = |sampling: Sampling| -> Vec<usize> {
        let drawn_rows = each_by_its_own_numbers(sampling, rows, &device);
        let drawn = head_sample(hidden.clone(), weight.clone(), &drawn_rows, positions.clone(), None).into_data();
        let mut counts = vec![0; logits.len()];
        drawn.iter::<i64>().for_each(|token| counts[token as usize] += 1);
        counts
    };
    let plain = Sampling::greedy().with_temperature(0.7);
    let cases = [
        ("plain", plain, 6),
        ("top-k", plain.with_top_k(Some(3)), 3),
        ("top-p", plain.with_top_p(Some(0.85)), 2),
        ("top-k and top-p", plain.with_top_k(Some(4)).with_top_p(Some(0.999)), 4),
        ("tiny top-p", plain.with_top_p(Some(0.01)), 1),
        ("min-p", plain.with_min_p(Some(0.1)), 3),
        ("min-p of one", plain.with_min_p(Some(1.0)), 1),
    ];
    for (name, sampling, kept) in cases {
        let counts = draw(sampling);
        let exact: Vec<f64> = logits[..kept].iter().map(|logit| (f64::from(*logit) / 0.7).exp()).collect();
        let total: f64 = exact.iter().sum();
        let mut chi_square = 0.0;
        for (count, exact) in counts.iter().zip(&exact) {
            let expected = exact / total * rows as f64;
            chi_square += (*count as f64 - expected).powi(2) / expected;
        }
        assert_eq!(counts[kept..].iter().sum::<usize>(), 0, "{name}: {counts:?}");
        // Five degrees of freedom at most: 25 is passed once in ten thousand times, and the draws are fixed.
        assert!(chi_square < 25.0, "{name}: {counts:?}, chi-square {chi_square:.1}");
        assert_eq!(counts, draw(sampling), "{name}: the same seed draws the same");
    }
    assert_eq!(draw(Sampling::greedy())[0], rows, "greedy takes the likeliest");
});

backend_test!(penalties_lower_the_words_that_a_text_has::<B>(device) {
    let logits = [2.0f32, 1.0, 0.5, 0.0, -1.0, -3.0];
    let rows = 4000;
    let hidden = Tensor::<B, 2>::ones([rows, 1], &device);
    let weight = Tensor::<B, 1>::from_data(logits.as_slice(), &device).reshape([6, 1]);
    let mut counts = TokenCounts::<B>::of_prompts(&vec![&[0, 5, 0][..]; rows], 6, &device);
    let twice = Tensor::<B, 1>::from_data([0.0, 2.0, 0.0, 0.0, 0.0, 0.0], &device);
    counts.written = twice.unsqueeze::<2>().repeat_dim(0, rows);
    let positions = Tensor::<B, 1, Int>::zeros([rows], &device);
    let penalties = Penalties { repetition: 1.5, presence: 0.3, frequency: 0.2 };
    let sampling = Sampling::greedy().with_temperature(0.7).with_penalties(penalties);
    let mut drawn = [0; 6];
    let drawn_rows = each_by_its_own_numbers(sampling, rows, &device);
    let mut after = counts.clone();
    let tokens = head_sample(hidden.clone(), weight.clone(), &drawn_rows, positions.clone(), Some(&mut after));
    let tokens = tokens.into_data();
    let added = values(&(after.written - counts.written.clone()));
    for (row, token) in tokens.iter::<i64>().enumerate() {
        let own = &added[row * 6..][..6];
        assert!(own[token as usize] == 1.0 && own.iter().sum::<f32>() == 1.0, "row {row} counts what it drew: {own:?}");
    }
    tokens.iter::<i64>().for_each(|token| drawn[token as usize] += 1);
    // Tokens of the prompt are only repeated; the one behind it is there, and was twice.
    let exact: [f64; 6] = [2.0 / 1.5, 1.0 / 1.5 - 0.3 - 2.0 * 0.2, 0.5, 0.0, -1.0, -3.0 * 1.5];
    let exact = exact.map(|logit| (logit / 0.7).exp());
    let total: f64 = exact.iter().sum();
    let terms = drawn.iter().zip(exact).map(|(count, exact)| {
        let expected = exact / total * rows as f64;
        (f64::from(*count) - expected).powi(2) / expected
    });
    let chi_square: f64 = terms.sum();
    assert!(chi_square < 25.0, "{drawn:?}, chi-square {chi_square:.1}");

    let strong = Penalties { repetition: 1.0, presence: 0.0, frequency: -2.0 };
    let greedy = Sampling::greedy().with_penalties(strong);
    let rows = each_by_its_own_numbers(greedy, rows, &device);
    let tokens = head_sample(hidden, weight, &rows, positions, Some(&mut counts)).into_data();
    assert!(tokens.iter::<i64>().all(|token| token == 1), "they hold for the likeliest token, too");
});

backend_test!(fused_projections_match_the_reference::<B>(device) {
    let kept = Dropout { probability: 0.25, key: RandomKey::new(3) };
    let mut shapes = vec![[1, 1, 2], [2, 3, 4], [65, 63, 64], [130, 17, 34], [600, 64, 66]];
    if dtype_under_test::<B>(&device) != DType::F32 {
        // Large enough for the GEMM of large 16-bit products.
        shapes.extend([[1000, 520, 648], [1024, 512, 768], [1000, 520, 1280]]);
    }
    for [rows, d_input, d_output] in shapes {
        let x = random::<B, 2>(1, [rows, d_input], &device);
        let weight = random::<B, 2>(2, [d_output, d_input], &device);
        let bias = random::<B, 2>(3, [1, d_output], &device);
        let residual = random::<B, 2>(4, [rows, d_output], &device);
        let shape = format!("{rows}x{d_input}x{d_output}");
        for dropout in [None, Some(kept)] {
            for biased in [false, true] {
                let inputs = [strided(x.clone()), weight.clone(), residual.clone(), bias.clone()];
                assert_parity(
                    &format!("linear_add {shape}, dropout {dropout:?}, bias {biased}"),
                    &inputs[..if biased { 4 } else { 3 }],
                    |i| linear_add(i[0].clone(), i[1].clone(), i.get(3).map(vector), dropout, i[2].clone()),
                    |i| {
                        let product = plain::linear(i[0].clone(), i[1].clone(), i.get(3).map(vector));
                        i[2].clone() + dropout.map_or(product.clone(), |dropout| plain::dropout(product, dropout))
                    },
                );
            }
        }
        for activation in [Activation::plain(ActivationKind::GeluTanh), Activation::gated(ActivationKind::Silu)] {
            for biased in [false, true] {
                let inputs = [strided(x.clone()), weight.clone(), bias.clone()];
                assert_parity(
                    &format!("norm_gate_up {shape}, {activation:?}, bias {biased}"),
                    &inputs[..if biased { 3 } else { 2 }],
                    |i| norm_gate_up(i[0].clone(), None, i[1].clone(), i.get(2).map(vector), activation),
                    |i| {
                        let product = plain::linear(i[0].clone(), i[1].clone(), i.get(2).map(vector));
                        plain::activate(product, activation)
                    },
                );
            }
        }
    }
});

/// A feed-forward layer of `[x, gamma, up, down, up's bias, down's bias]`, with the norm and the biases if they are asked for.
fn feed_forward_of<B: Backend>(
    i: &[Tensor<B, 2>],
    [normed, biased]: [bool; 2],
    activation: Activation,
    dropout: Option<Dropout>,
) -> Tensor<B, 2> {
    let norm = normed.then(|| Norm::rms(vector(&i[1]), 1e-5));
    let bias = |bias: &Tensor<B, 2>| biased.then(|| vector(bias));
    let layer = FeedForwardLayer {
        up: i[2].clone().into(),
        up_bias: bias(&i[4]),
        activation,
        down: i[3].clone().into(),
        down_bias: bias(&i[5]),
    };
    feed_forward(i[0].clone(), norm.as_ref(), layer, dropout)
}

/// The same from small operations.
fn plain_feed_forward_of<B: Backend>(
    i: &[Tensor<B, 2>],
    [normed, biased]: [bool; 2],
    activation: Activation,
    dropout: Option<Dropout>,
) -> Tensor<B, 2> {
    let x = if normed { plain::norm(i[0].clone(), &Norm::rms(vector(&i[1]), 1e-5)) } else { i[0].clone() };
    let bias = |bias: &Tensor<B, 2>| biased.then(|| vector(bias));
    let hidden = plain::activate(plain::linear(x, i[2].clone(), bias(&i[4])), activation);
    let product = plain::linear(hidden, i[3].clone(), bias(&i[5]));
    i[0].clone() + dropout.map_or(product.clone(), |dropout| plain::dropout(product, dropout))
}

/// What such a layer is made of: activations are neither all alike nor all off.
fn feed_forward_inputs<B: Backend>(
    [rows, d_model, d_ff]: [usize; 3],
    gated: bool,
    device: &B::Device,
) -> [Tensor<B, 2>; 6] {
    let width = if gated { 2 * d_ff } else { d_ff };
    let near = |seed, shape: [usize; 2]| random::<B, 2>(seed, shape, device) * (3.0 / shape[1] as f64).sqrt();
    [
        random(1, [rows, d_model], device),
        random::<B, 2>(2, [1, d_model], device) + 1.0,
        near(3, [width, d_model]),
        near(4, [d_model, d_ff]),
        random(5, [1, width], device),
        random(6, [1, d_model], device),
    ]
}

const GATED_SILU: Activation = Activation { kind: ActivationKind::Silu, gated: true };

backend_test!(feed_forward_layers_match_the_reference::<B>(device) {
    let kept = Dropout { probability: 0.25, key: RandomKey::new(3) };
    // ReLU's slope is of a sum near 0 that rounding puts on either side: it stands in the next test.
    let mut cases = Vec::new();
    for kind in [ActivationKind::GeluErf, ActivationKind::GeluTanh, ActivationKind::Silu] {
        for gated in [false, true] {
            cases.extend([[1, 3, 5], [33, 18, 40]].map(|sizes| (sizes, Activation { kind, gated })));
        }
    }
    for (sizes, activation) in cases {
        let [x, gamma, up, down, up_bias, down_bias] = feed_forward_inputs::<B>(sizes, activation.gated, &device);
        let inputs = [strided(x), gamma, up, strided(down), up_bias, down_bias];
        for dropout in [None, Some(kept)] {
            // Parts that are not there have no gradient.
            let what = format!("feed_forward {sizes:?}, {activation:?}, dropout {dropout:?}");
            assert_parity(
                &what,
                &inputs,
                |i| feed_forward_of(i, [true; 2], activation, dropout),
                |i| plain_feed_forward_of(i, [true; 2], activation, dropout),
            );
            let [x, gamma, up, down, up_bias, down_bias] = &inputs;
            let fixed = [gamma, up_bias, down_bias].map(|x| Tensor::<Autodiff<B>, 2>::from_inner(x.clone()));
            let all = |i: &[Tensor<Autodiff<B>, 2>]| {
                let [gamma, up_bias, down_bias] = fixed.clone();
                [i[0].clone(), gamma, i[1].clone(), i[2].clone(), up_bias, down_bias]
            };
            assert_parity(
                &format!("{what}, without norm and bias"),
                &[x.clone(), up.clone(), down.clone()],
                |i| feed_forward_of(&all(i), [false; 2], activation, dropout),
                |i| plain_feed_forward_of(&all(i), [false; 2], activation, dropout),
            );
        }
    }
});

backend_test!(feed_forward_layers_of_few_rows_in_half_precision_are_close_to_the_reference::<B>(device) {
    half_feed_forward_parity::<B>(&[[70, 48, 96]], half_or_single::<B>(&device), [true; 2], &device);
});

backend_test!(feed_forward_layers_in_half_precision_are_close_to_the_reference::<B>(device) {
    // Tiles that are whole, cut along the inner dimension or at the edges, of one column and of several.
    let half = half_or_single::<B>(&device);
    let sizes = [[260, 136, 264], [1024, 512, 1024], [1000, 520, 648], [2056, 768, 3072]];
    half_feed_forward_parity::<B>(&sizes, half, [true; 2], &device);
    half_feed_forward_parity::<B>(&[[260, 136, 264], [1300, 1288, 640]], half, [false; 2], &device);
    if <B as burn::tensor::backend::Backend>::supports_dtype(&device, DType::F16) {
        half_feed_forward_parity::<B>(&[[1000, 520, 768]], DType::F16, [true; 2], &device);
    }
});

/// With a norm and biases, or without.
fn half_feed_forward_parity<B: Backend>(sizes: &[[usize; 3]], half: DType, parts: [bool; 2], device: &B::Device) {
    let kept = Dropout { probability: 0.25, key: RandomKey::new(3) };
    let plain_gelu = Activation::plain(ActivationKind::GeluTanh);
    for sizes in sizes.iter().copied().filter(|sizes| is_worth_it::<B>(device, sizes)) {
        for activation in [plain_gelu, Activation::plain(ActivationKind::Relu), GATED_SILU] {
            let inputs = feed_forward_inputs::<B>(sizes, activation.gated, device);
            // Only what is used has a gradient.
            let used = [true, parts[0], true, true, parts[1], parts[1]];
            let rounded = inputs.map(|x| x.cast(half));
            let tracked: Vec<_> = rounded.iter().zip(used).filter(|(_, used)| *used).map(|(x, _)| x.clone()).collect();
            let all = |i: &[Tensor<Autodiff<B>, 2>]| {
                let mut tracked = i.iter();
                let parts = rounded.iter().zip(used);
                let parts = parts.map(|(x, used)| match used {
                    true => tracked.next().expect("as many as are used").clone(),
                    false => Tensor::from_inner(x.clone()),
                });
                parts.collect::<Vec<_>>()
            };
            for dropout in [None, Some(kept)] {
                let what = format!("feed_forward {sizes:?}, {activation:?}, dropout {dropout:?}");
                let ours = || with_gradients(&tracked, half, |i| feed_forward_of(&all(i), parts, activation, dropout));
                let (output, gradients) = ours();
                let (wanted, wanted_gradients) = with_gradients(&tracked, DType::F32, |i| {
                    plain_feed_forward_of(&all(i), parts, activation, dropout)
                });
                assert_close(&what, &output, &wanted, 1e-2);
                let (again, gradients_again) = ours();
                assert_eq!(values(&output), values(&again), "{what}: the same bits again");
                // Of sums near 0 some are on ReLU's other side: the square root of their share.
                let tolerance = if activation.kind == ActivationKind::Relu { 0.1 } else { 1e-2 };
                for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                    let what = format!("{what}, gradient of input {at}");
                    assert_close(&what, gradient, wanted, tolerance);
                    assert_eq!(values(gradient), values(&gradients_again[at]), "{what}: the same bits again");
                }
            }
        }
    }
}

backend_test!(packed_attention_is_attention::<B>(device) {
    for (heads, batch_size, seq_length) in [
        (PackedHeads { n_heads: 1, n_kv_heads: 1, head_dim: 2 }, 1, 1),
        (PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 8 }, 2, 65),
        (PackedHeads { n_heads: 3, n_kv_heads: 3, head_dim: 32 }, 2, 64),
        (PackedHeads { n_heads: 4, n_kv_heads: 2, head_dim: 64 }, 2, 131),
    ] {
        let qkv = random::<B, 3>(1, [batch_size, seq_length, heads.width()], &device) * 2.0;
        let options = AttentionOptions::new(heads.head_dim);
        let mask = AttentionMask::Causal { window: None };
        assert_parity(
            &format!("{heads:?} {batch_size}x{seq_length}"),
            &[qkv],
            |qkv| qkv_attention(qkv[0].clone(), heads, &mask, options),
            |qkv| {
                let [query, key, value] = heads.split(qkv[0].clone());
                let output = plain::attention(query, key, value, &mask, options);
                output.reshape([batch_size, seq_length, heads.n_heads * heads.head_dim])
            },
        );
    }
});
