//! The loss of the head against the reference.

use burn::backend::Autodiff;
use burn::tensor::{DType, Int, Tensor};
use fireclay_kernels::{HeadLossOptions, head_loss};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random, values};
use crate::harness::{assert_parity_within, halves, is_worth_it, strided, tolerance_under_test, with_gradients};
use crate::plain;

backend_test!(head_loss_matches_the_reference_whatever_the_chunk::<B>(device) {
    for [rows, d_model, vocabulary] in [[1, 2, 3], [13, 24, 61], [65, 8, 1000], [130, 16, 63], [3, 4, 20_001]] {
        let hidden = random::<B, 2>(1, [rows, d_model], &device);
        let weight = random::<B, 2>(2, [vocabulary, d_model], &device) * 3.0;
        let target = |at: usize| if at % 5 == 3 { -100 } else { (at * 37 % vocabulary) as i32 };
        let targets: Vec<i32> = (0..rows).map(target).collect();
        let targets = Tensor::<Autodiff<B>, 1, Int>::from_data(targets.as_slice(), &device);
        let tolerance = tolerance_under_test::<B>(&device);
        // Burn's sum of this many exponentials is accurate to 4e-4 of each; a row of the gradient
        // may be a small difference of these; and in 16 bits rows vary more.
        let tolerance = match vocabulary > 20_000 {
            true => Tolerance { rounding: tolerance.rounding.max(1e-3), ..tolerance.at_least(1e-3).times(1.5) },
            false => tolerance,
        };
        for (smoothing, softcap) in [(0.0, None), (0.1, None), (0.1, Some(1.5))] {
            // A case of the reference on other backends.
            if softcap.is_some() && vocabulary > 1000 {
                continue;
            }
            // Of the order of the sum over the rows.
            let options = HeadLossOptions::new().with_label_smoothing(smoothing).with_softcap(softcap);
            let options = options.with_weight((1.0 - smoothing) * rows as f64);
            for chunk in [1, 7, 64, 1000] {
                assert_parity_within(
                    tolerance,
                    &format!(
                        "head_loss {rows}x{d_model}x{vocabulary}, smoothing {smoothing}, cap {softcap:?}, chunk {chunk}"
                    ),
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
    // A chunk's products are large, so that they accumulate in place on devices that support it;
    // others only take long.
    let large = [1100, 264, 2056];
    let [rows, d_model, vocabulary] = if is_worth_it::<B>(&device, &large) { large } else { [140, 24, 130] };
    let targets: Vec<i32> = (0..rows).map(|at| (at * 37 % vocabulary) as i32).collect();
    let targets = Tensor::<Autodiff<B>, 1, Int>::from_data(targets.as_slice(), &device);
    // The sum over the rows, so that a gradient does not underflow in 16 bits.
    let options = HeadLossOptions::new().with_weight(rows as f64);
    for dtype in halves::<B>(&device) {
        let rounded = |x: Tensor<B, 2>| x.cast(dtype).cast(DType::F32);
        let hidden = rounded(random::<B, 2>(1, [rows, d_model], &device));
        let weight = rounded(random::<B, 2>(2, [vocabulary, d_model], &device));
        let inputs = [hidden, weight];
        let (wanted, wanted_gradients) = with_gradients(&inputs, DType::F32, |i| {
            plain::head_loss(i[0].clone(), i[1].clone(), targets.clone(), options)
        });
        for chunk in [rows / 2, rows] {
            let what = format!("{dtype:?} head_loss, chunk {chunk}");
            let (loss, gradients) = with_gradients(&inputs, DType::F32, |i| {
                head_loss(i[0].clone().cast(dtype), i[1].clone(), targets.clone(), options.with_chunk(chunk))
            });
            assert_close(&what, &loss, &wanted, Tolerance::new(1e-2, dtype));
            for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                let what = format!("{what}, gradient of input {at}");
                assert_close(&what, gradient, wanted, Tolerance::new(3e-2, dtype));
            }
        }
    }
});

backend_test!(head_loss_of_a_large_vocabulary_in_half_precision_is_close_to_the_reference::<B>(device) {
    for dtype in halves::<B>(&device) {
        // No whole vectors, whole vectors, whole tiles, rows of which several fit; and one that
        // does not fit.
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
            // Some are ignored, one is the last token, and the others are among the first ones.
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
                // Large, so that gradients do not underflow in f16.
                let options = HeadLossOptions::new().with_label_smoothing(smoothing).with_weight(1e3);
                let (wanted, wanted_gradients) = with_gradients(&inputs, DType::F32, |i| {
                    plain::head_loss(i[0].clone(), i[1].clone(), targets.clone(), options)
                });
                let (loss, gradients) = with_gradients(&inputs, DType::F32, |i| {
                    head_loss(i[0].clone().cast(dtype), i[1].clone(), targets.clone(), options.with_chunk(chunk))
                });
                let what =
                    format!("{dtype:?} head_loss {rows}x{d_model}x{vocabulary}, smoothing {smoothing}, chunk {chunk}");
                assert_close(&what, &loss, &wanted, Tolerance::new(1e-2, dtype));
                let [hidden, weight] = inputs.clone();
                let alone = head_loss(hidden.cast(dtype), weight, targets.clone().inner(), options.with_chunk(chunk));
                assert_close(&format!("{what}, without gradients"), &alone, &loss, 1e-5);
                assert_close(
                    &format!("{what}, gradient of hidden"),
                    &gradients[0],
                    &wanted_gradients[0],
                    Tolerance::new(3e-2, dtype),
                );
                assert_close(
                    &format!("{what}, gradient of the weight"),
                    &gradients[1],
                    &wanted_gradients[1],
                    Tolerance::new(4e-2, dtype),
                );
                // Tokens that are not targets have far smaller gradients.
                let others = |x: &Tensor<B, 2>| x.clone().narrow(0, FIRST, vocabulary - FIRST - 1);
                let [gradient, wanted] = [&gradients[1], &wanted_gradients[1]].map(others);
                assert_close(
                    &format!("{what}, gradient of the other tokens' weight"),
                    &gradient,
                    &wanted,
                    Tolerance::new(4e-2, dtype),
                );
            }
        }
    }
});

backend_test!(head_loss_of_nothing_is_zero::<B>(device) {
    let hidden = random::<B, 2>(1, [3, 4], &device);
    let weight = random::<B, 2>(2, [5, 4], &device);
    let targets = Tensor::<B, 1, Int>::from_data([-100, -100, -100], &device);
    assert_eq!(values(&head_loss(hidden, weight, targets, HeadLossOptions::new())), [0.0]);
});
