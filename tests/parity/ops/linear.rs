//! Projections against the reference.

use burn::backend::Autodiff;
use burn::tensor::{DType, FloatDType, Tensor};
use fireclay_kernels::{
    Activation, ActivationKind, Backend, Dropout, F32Products, Format, Norm, QuantizedWeight, RandomKey, Weight,
    compile_ahead, linear, linear_add, norm_gate_up, norm_linear,
};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random, relative_error, tolerance, values};
use crate::harness::{
    assert_parity, dtype_under_test, dtypes, half_or_single, halves, is_worth_it, strided, upstream, vector,
    with_gradients,
};
use crate::plain;

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
    // Edges of tiles, and rows that are not aligned to vectors, in one of the products or in all.
    for sizes in [[700, 600, 650], [641, 603, 645]] {
        let (x, weight) = inputs(sizes);
        check(x, weight);
    }
    // A gradient in pieces, with both layouts of its sides.
    let (x, weight) = inputs([4096, 128, 260]);
    check(x.clone(), weight.clone());
    check(strided(x), strided(weight));
    // Parts of matrices.
    let (x, weight) = inputs([540, 560, 620]);
    check(x.narrow(0, 7, 530).narrow(1, 8, 520), weight.narrow(0, 3, 600).narrow(1, 16, 520));
});

backend_test!(products_of_f32_are_as_accurate_as_sums_of_f32::<B>(device) {
    // Whole tiles, partial stages of the inner dimension, odd sizes, and small ones; as large as
    // tensor cores need.
    for [rows, d_input, d_output] in [[1024, 768, 512], [1024, 771, 514], [640, 1537, 301], [70, 300, 130]] {
        let (x, weight) =
            (random::<B, 2>(1, [rows, d_input], &device), random::<B, 2>(2, [d_output, d_input], &device));
        let grad = upstream::<B, 2>([rows, d_output], &device);
        let [host_x, host_weight, host_grad] = [&x, &weight, &grad].map(values);
        // The forward pass with products of one kind, and the backward pass while the other is
        // requested.
        let errors = |forward: F32Products, later: F32Products| {
            let inputs =
                [x.clone(), strided(weight.clone())].map(|x| Tensor::<Autodiff<B>, 2>::from_inner(x).require_grad());
            let span = forward.enter();
            let output = linear(inputs[0].clone(), inputs[1].clone(), None);
            drop(span);
            let loss = (output.clone() * Tensor::from_inner(grad.clone())).sum();
            let span = later.enter();
            let gradients = loss.backward();
            drop(span);
            let [d_x, d_weight] = inputs.map(|x| x.grad(&gradients).expect("a gradient"));
            // Some elements of each product, compared with sums in f64: of `[m, n]`, whose factors
            // have these strides along their inner dimension.
            let off = |got: &Tensor<B, 2>, a: (&[f32], usize, usize), b: (&[f32], usize, usize), depth: usize| {
                let [m, n] = got.dims();
                let got = values(got);
                let at = (0..m * n).step_by(m * n / 499 + 1).map(|at| (at / n, at % n));
                let exact = |(row, column): (usize, usize)| -> f32 {
                    let product =
                        |k: usize| f64::from(a.0[row * a.1 + k * a.2]) * f64::from(b.0[column * b.1 + k * b.2]);
                    (0..depth).map(product).sum::<f64>() as f32
                };
                let wanted: Vec<f32> = at.clone().map(exact).collect();
                relative_error(&at.map(|(row, column)| got[row * n + column]).collect::<Vec<_>>(), &wanted)
            };
            [
                off(&output.inner(), (&host_x, d_input, 1), (&host_weight, d_input, 1), d_input),
                off(&d_x, (&host_grad, d_output, 1), (&host_weight, 1, d_input), d_output),
                off(&d_weight, (&host_grad, 1, d_output), (&host_x, 1, d_input), rows),
            ]
        };
        let what = format!("{rows}x{d_input}x{d_output}");
        let exact = errors(F32Products::Exact, F32Products::Tf32);
        assert!(exact.iter().all(|error| *error < 5e-6), "{what}: {exact:?}");
        let tf32 = errors(F32Products::Tf32, F32Products::Exact);
        println!("{what}: {exact:?}, in TF32 {tf32:?}");
        if B::name(&device).contains("cuda") {
            assert!(tf32.iter().all(|error| *error < 2e-3), "{what} in TF32: {tf32:?}");
            // Large products use tensor cores; a backward pass has the mode of its forward pass.
            let rounded = rows < 640 || tf32.iter().all(|error| *error > 5e-5);
            assert!(rounded, "{what} in TF32, whatever is asked for later: {tf32:?}");
        } else {
            assert!(tf32.iter().all(|error| *error < 5e-6), "{what} where there is no TF32: {tf32:?}");
        }
    }
});

// A rehearsal launches only some kernels: its results are garbage, and later ones are right.
backend_test!(products_are_right_behind_a_rehearsal_of_them::<B>(device) {
    let dtype = half_or_single::<B>(&device);
    let (x, weight) =
        (random::<B, 2>(1, [640, 512], &device).cast(dtype), random::<B, 2>(2, [1024, 512], &device).cast(dtype));
    let mut calls = 0;
    compile_ahead::<B>(&device, || {
        calls += 1;
        drop(linear(x.clone(), weight.clone(), None));
    });
    assert!(calls <= usize::from(B::name(&device).contains("cuda")), "{calls} calls");
    let wanted = plain::linear(x.clone().cast(DType::F32), weight.clone().cast(DType::F32), None);
    let tolerance = if dtype == DType::F32 { tolerance::<B>(&device) } else { Tolerance::new(2e-2, dtype) };
    assert_close("linear", &linear(x, weight, None).cast(DType::F32), &wanted, tolerance);
});

backend_test!(projections_in_half_precision_are_close_to_the_reference::<B>(device) {
    for dtype in halves::<B>(&device) {
        // Whole tiles, their edges, many rows, unaligned rows in one product or all, a gradient in
        // pieces, and small sizes.
        let sizes = [
            [1024, 512, 768],
            [1000, 520, 648],
            [4096, 136, 2056],
            [8192, 512, 512],
            [1003, 640, 640],
            [3000, 328, 776],
            [530, 601, 603],
            [2048, 64, 72],
            // Narrow results, and narrow gradients of weights.
            [16_384, 1024, 16],
            [8200, 1032, 40],
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
                let (wanted, wanted_gradients) =
                    with_gradients(&[x, weight], DType::F32, |i| plain::linear(i[0].clone(), i[1].clone(), None));
                assert_close(&what, &output, &wanted, Tolerance::new(1e-2, dtype));
                for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                    assert_close(
                        &format!("{what}, gradient of input {at}"),
                        gradient,
                        wanted,
                        Tolerance::new(2e-2, dtype),
                    );
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
    for dtype in halves::<B>(&device) {
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
                assert_close(
                    &what,
                    &wide(&linear(x.clone(), weight.clone(), bias.clone())),
                    &product,
                    Tolerance::new(1e-2, dtype),
                );
                // Contiguous, parts of wider rows with and without aligned pairs, column-major, and
                // f32.
                for (layout, residual) in [
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
                    for drop in if layout < 2 { vec![None, Some(drop)] } else { vec![None] } {
                        let ours = linear_add(x.clone(), weight.clone(), bias.clone(), drop, residual.clone());
                        let kept = drop.map_or(product.clone(), |drop| plain::dropout(product.clone(), drop));
                        let what = format!("{what}, residual {layout}, dropped {}", drop.is_some());
                        assert_close(&what, &wide(&ours), &(wide(&residual) + kept), Tolerance::new(1e-2, dtype));
                    }
                }
            }
        }
    }
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

backend_test!(skinny_projections_match_the_reference::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for shape in [
            [1, 1, 2], [1, 64, 130], [2, 3, 4], [3, 264, 66], [8, 1000, 62], [17, 520, 34], [32, 96, 128],
            [33, 64, 64], [2, 72, 6150], [20, 72, 6144],
        ] {
            check_projections::<B>(shape, dtype, tolerance, &device);
        }
    }
});

// Partial tiles of rows and columns, split K that ends within a stage, more tiles than blocks, and
// many rows of few outputs. In f32 the last are Burn's product, which takes minutes on a software
// GPU.
backend_test!(projections_of_few_rows_match_the_reference::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        let few = [
            [9, 1032, 400], [17, 520, 808], [33, 1000, 1344], [64, 264, 1208], [100, 2048, 136], [129, 1288, 400],
            [12, 72, 34_000],
        ];
        let burns = dtype == FloatDType::F32 && !B::is_synchronous();
        let many: &[_] = if burns { &[] } else { &[[500, 520, 1000], [1000, 1344, 1016]] };
        for shape in few.into_iter().chain(many.iter().copied()) {
            check_projections::<B>(shape, dtype, tolerance, &device);
        }
    }
});

// In f16, values times gamma overflow before the norm divides them.
backend_test!(a_norm_before_a_product_holds_large_numbers::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for rows in [3, 12, 70] {
            let x = (random::<B, 2>(1, [rows, 1024], &device) * 3000.0).cast(dtype);
            let weight = random::<B, 2>(2, [512, 1024], &device).cast(dtype);
            let norm = Norm::rms(random::<B, 1>(3, [1024], &device) * 5.0 + 35.0, 1e-6);
            let ours = norm_linear(x.clone(), Some(&norm), weight.clone(), None).cast(DType::F32);
            let wanted = plain::linear(plain::norm(x.cast(DType::F32), &norm), weight.cast(DType::F32), None);
            assert_close(&format!("{rows} rows, {dtype:?}"), &ours, &wanted, tolerance);
        }
    }
});

fn check_projections<B: Backend>(
    [rows, d_input, d_output]: [usize; 3],
    dtype: FloatDType,
    tolerance: Tolerance,
    device: &B::Device,
) {
    let x = random::<B, 2>(1, [rows, d_input], device).cast(dtype);
    let weight = random::<B, 2>(2, [d_output, d_input], device).cast(dtype);
    let bias = random::<B, 1>(3, [d_output], device).cast(dtype);
    let residual = random::<B, 2>(4, [rows, d_output], device).cast(dtype);
    let gamma = random::<B, 1>(5, [d_input], device) + 1.5;
    let norms = [
        None,
        Some(Norm::rms(gamma.clone(), 1e-6)),
        Some(Norm::layer(gamma.clone(), Some(random::<B, 1>(6, [d_input], device)), 1e-5)),
    ];
    // The reference computes in f32, from the same values.
    let wide = |x: &Tensor<B, 2>| x.clone().cast(DType::F32);
    for norm in norms {
        for bias in [None, Some(bias.clone())] {
            let what = format!(
                "{rows}x{d_input}x{d_output} {dtype:?}, norm {:?}, bias {}",
                norm.as_ref().map(|norm| norm.kind),
                bias.is_some()
            );
            let input = match &norm {
                Some(norm) => plain::norm(wide(&x), norm),
                None => wide(&x),
            };
            let wide_bias = bias.clone().map(|bias| bias.cast(DType::F32));
            let product = plain::linear(input, wide(&weight), wide_bias);
            let ours = norm_linear(x.clone(), norm.as_ref(), weight.clone(), bias.clone());
            assert_eq!(ours.dtype(), DType::from(dtype), "{what}");
            assert_close(&format!("norm_linear {what}"), &ours.cast(DType::F32), &product, tolerance);
            if norm.is_none() {
                let ours = linear(x.clone(), weight.clone(), bias.clone()).cast(DType::F32);
                assert_close(&format!("linear {what}"), &ours, &product, tolerance);
                let ours = linear_add(x.clone(), weight.clone(), bias.clone(), None, residual.clone());
                let wanted = product.clone() + wide(&residual);
                assert_close(&format!("linear_add {what}"), &ours.cast(DType::F32), &wanted, tolerance);
            }
            for activation in [Activation::plain(ActivationKind::GeluTanh), Activation::gated(ActivationKind::Silu)] {
                let ours = norm_gate_up(x.clone(), norm.as_ref(), weight.clone(), bias.clone(), activation);
                let wanted = plain::activate(product.clone(), activation);
                let what = format!("norm_gate_up {what}, {activation:?}");
                assert_close(&what, &ours.cast(DType::F32), &wanted, tolerance);
            }
        }
    }
}

backend_test!(results_in_scratch_buffers_stay_as_they_are_while_they_are_held::<B>(device) {
    let weight = random::<B, 2>(1, [66, 64], &device);
    let input = |seed: u64| random::<B, 2>(seed, [3, 64], &device);
    // More at once than there are scratch buffers; then some of those, while the others continue.
    let mut held: Vec<(u64, Tensor<B, 2>)> = Vec::new();
    for round in 0..3 {
        held.retain(|(seed, _)| seed % 3 == 0);
        held.extend(
            (0..12).map(|at| 2 + 12 * round + at).map(|seed| (seed, linear(input(seed), weight.clone(), None))),
        );
        for (seed, result) in &held {
            let wanted = plain::linear(input(*seed), weight.clone(), None);
            assert_close(&format!("input {seed} in round {round}"), result, &wanted, tolerance::<B>(&device));
        }
    }
});

backend_test!(projections_to_very_many_outputs_match_the_reference::<B>(device) {
    for (dtype, tolerance) in dtypes::<B>(&device) {
        for [rows, d_input, d_output] in
            [[17, 72, 17_000], [9, 2560, 9001], [32, 1000, 17_001], [3, 1024, 16_400], [20, 264, 34_000]]
        {
            let what = format!("{rows}x{d_input}x{d_output} {dtype:?}");
            let x = random::<B, 2>(1, [rows, d_input], &device).cast(dtype);
            let weight = random::<B, 2>(2, [d_output, d_input], &device);
            let values: Vec<f32> = weight.clone().into_data().iter::<f32>().collect();
            let bytes = QuantizedWeight::<B>::quantize(Format::Int8, &values, [d_output, d_input], &device);
            let bytes = Weight::Quantized(bytes.expect("the device works").expect("rows of multiples of four"));
            for weight in [Weight::from(weight.cast(dtype)), bytes] {
                let wide = weight.clone().into_float(FloatDType::F32).cast(DType::F32);
                let wanted = plain::linear(x.clone().cast(DType::F32), wide, None);
                assert_close(&what, &linear(x.clone(), weight, None).cast(DType::F32), &wanted, tolerance);
            }
        }
    }
});
