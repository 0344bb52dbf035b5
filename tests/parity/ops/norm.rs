//! Norms against the reference.

use burn::backend::Autodiff;
use burn::tensor::{DType, Tensor};
use fireclay_kernels::{Norm, norm};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random};
use crate::harness::{
    assert_parity, assert_parity_within, halves, strided, tolerance_under_test, vector, with_gradients,
};
use crate::plain;

backend_test!(norms_match_the_reference::<B>(device) {
    for (rows, columns) in [(1, 2), (3, 3), (63, 65), (64, 64), (129, 7), (2, 1000), (5, 4100), (4097, 24), (2, 20_000)]
    {
        let x = random::<B, 2>(1, [rows, columns], &device) + 0.5;
        let gamma = random::<B, 2>(2, [1, columns], &device);
        let beta = random::<B, 2>(3, [1, columns], &device);
        for x in [x.clone(), strided(x)] {
            let name = format!("{rows}x{columns}");
            // Rows of two have one of two shapes: their gradient is near zero, the difference of
            // larger values.
            let tolerance = tolerance_under_test::<B>(&device).or_zero();
            let tolerance = if columns == 2 { tolerance.at_least(1e-2) } else { tolerance };
            assert_parity_within(
                tolerance,
                &format!("layer norm {name}"),
                &[x.clone(), gamma.clone(), beta.clone()],
                |i| norm(i[0].clone(), &Norm::layer(vector(&i[1]), Some(vector(&i[2])), 1e-5)),
                |i| {
                    let norm = Norm::layer(vector(&i[1]), Some(vector(&i[2])), 1e-5);
                    plain::norm(i[0].clone(), &norm)
                },
            );
            assert_parity_within(
                tolerance,
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
    for dtype in halves::<B>(&device) {
        // Many rows have a separate kernel on some devices.
        let sizes = [
            (3, 40), (63, 65), (128, 128), (700, 384), (1057, 768), (2200, 1280), (1200, 65), (7000, 264), (4097, 512),
        ];
        for (rows, columns) in sizes {
            // Some rows are parts of wider ones.
            let around_rows = if rows % 2 == 0 { 8 } else { 0 };
            let x = random::<B, 2>(1, [rows, columns + 2 * around_rows], &device).cast(dtype).cast(DType::F32);
            let [gamma, beta] = [2, 3].map(|seed| random::<B, 2>(seed, [1, columns], &device));
            // Weights are f32, as in training, except for one size.
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
                    "{dtype:?} norm {rows}x{columns}, layer {layer}, shifted {shifted}, with what goes around it \
                     {around}"
                );
                assert_close(&what, &output, &wanted, Tolerance::new(1e-2, dtype));
                // Sums over many rows average out rounding: one missing row is visible.
                let of_weights = if rows >= 1000 && weight_dtype == DType::F32 { 5e-3 } else { 2e-2 };
                for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                    let tolerance = if at == 0 { 2e-2 } else { of_weights };
                    assert_close(
                        &format!("{what}, gradient of input {at}"),
                        gradient,
                        wanted,
                        Tolerance::new(tolerance, dtype),
                    );
                }
                let last = |x: &Tensor<B, 2>| x.clone().narrow(0, rows - rows.min(8), rows.min(8));
                assert_close(
                    &format!("{what}, the last rows"),
                    &last(&gradients[0]),
                    &last(&wanted_gradients[0]),
                    Tolerance::new(2e-2, dtype),
                );
            }
        }
    }
});
