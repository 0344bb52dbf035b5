//! Feed-forward layers against the reference.

use burn::backend::Autodiff;
use burn::tensor::{DType, Tensor};
use fireclay_kernels::{Activation, ActivationKind, Backend, Dropout, FeedForwardLayer, Norm, RandomKey, feed_forward};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random, values};
use crate::harness::{assert_parity, half_or_single, is_worth_it, strided, vector, with_gradients};
use crate::plain;

/// A feed-forward layer of `[x, gamma, up, down, up's bias, down's bias]`, with optional norm and
/// biases.
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

/// The same from basic operations.
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

/// Parameters for which activations are neither all alike nor all off.
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
    // ReLU's slope for sums near 0 depends on rounding: see the next test.
    let mut cases = Vec::new();
    let smooth = |kind: &ActivationKind| *kind != ActivationKind::Relu;
    for kind in ActivationKind::ALL.into_iter().filter(smooth) {
        for gated in [false, true] {
            cases.extend([[1, 3, 5], [33, 18, 40]].map(|sizes| (sizes, Activation { kind, gated })));
        }
    }
    for (sizes, activation) in cases {
        let [x, gamma, up, down, up_bias, down_bias] = feed_forward_inputs::<B>(sizes, activation.gated, &device);
        let inputs = [strided(x), gamma, up, strided(down), up_bias, down_bias];
        for dropout in [None, Some(kept)] {
            // Missing parts have no gradient.
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
    // Tiles that are whole, split along the inner dimension, or cut at the edges, of one column and
    // of several.
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
            // Only used inputs have a gradient.
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
                assert_close(&what, &output, &wanted, Tolerance::new(1e-2, half));
                let (again, gradients_again) = ours();
                assert_eq!(values(&output), values(&again), "{what}: the same bits again");
                // Some sums near 0 are on ReLU's other side: the error is the square root of their
                // share, and larger in some rows.
                let tolerance = match activation.kind {
                    ActivationKind::Relu => Tolerance { rounding: 0.4, ..Tolerance::new(0.1, half) },
                    _ => Tolerance::new(1e-2, half),
                };
                for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
                    let what = format!("{what}, gradient of input {at}");
                    assert_close(&what, gradient, wanted, tolerance);
                    assert_eq!(values(gradient), values(&gradients_again[at]), "{what}: the same bits again");
                }
            }
        }
    }
}
