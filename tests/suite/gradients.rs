//! Gradients against finite differences along a random direction.

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor};
use fireclay_kernels::{
    Activation, ActivationKind, AttentionMask, AttentionOptions, Backend, Dropout, ExpertsLayer, HeadLossOptions,
    HeadNorms, LoraLayer, Norm, PackedHeads, RandomKey, activate, attention, experts, head_loss, linear, lora, norm,
    qkv_norm, sink_attention,
};

use crate::backend_test;
use crate::compare::random;

/// Compares `<gradient, direction>` with the central difference of `f` along it, for the first
/// input: along the random direction, of several, in which `f` changes most.
#[track_caller]
fn assert_slope<B: Backend, const D: usize, const O: usize>(
    what: &str,
    x: Tensor<B, D>,
    f: impl Fn(Tensor<Autodiff<B>, D>) -> Tensor<Autodiff<B>, O>,
) {
    let device = x.device();
    let scalar = |x: Tensor<B, D>| {
        let x = Tensor::<Autodiff<B>, D>::from_inner(x).require_grad();
        let output = f(x.clone());
        let weights = Tensor::from_inner(random::<B, O>(77, output.dims(), &device));
        (x, (output * weights).sum())
    };
    let value = |x: Tensor<B, D>| f64::from(scalar(x).1.inner().into_data().iter::<f32>().next().expect("a value"));
    let step = 5e-3;
    let along = |direction: &Tensor<B, D>| {
        let [ahead, behind] = [step, -step].map(|step| value(x.clone() + direction.clone() * step));
        (ahead - behind) / (2.0 * step)
    };
    let directions = (78..84).map(|seed| random::<B, D>(seed, x.dims(), &device));
    let slopes = directions.map(|direction| (along(&direction), direction));
    let (difference, direction) = slopes.max_by(|(a, _), (b, _)| a.abs().total_cmp(&b.abs())).expect("directions");

    let (input, output) = scalar(x.clone());
    let gradient = input.grad(&output.backward()).expect("a gradient");
    let slope = (gradient * direction).sum().into_data().iter::<f32>().next().map(f64::from).expect("a value");
    // The accuracy of an f32 difference is about their spacing over the step; a slope near zero
    // would show nothing.
    let allowed = 5e-3 * difference.abs() + 2e-3;
    assert!(difference.abs() > 0.02, "{what}: a slope of {difference} is too small to be seen");
    assert!((slope - difference).abs() < allowed, "{what}: gradient says {slope}, difference {difference}");
}

backend_test!(gradients_are_slopes::<B>(device) {
    let lift = |x: Tensor<B, 2>| Tensor::<Autodiff<B>, 2>::from_inner(x);
    let weights = random::<B, 2>(2, [1, 9], &device);
    let gamma = || lift(weights.clone()).flatten::<1>(0, 1);
    assert_slope("layer norm", random::<B, 2>(1, [4, 9], &device), |x| {
        norm(x, &Norm::layer(gamma(), Some(gamma()), 1e-5))
    });
    assert_slope("rms norm", random::<B, 2>(1, [4, 9], &device), |x| norm(x, &Norm::rms(gamma(), 1e-6)));
    assert_slope("norm's scale", weights.clone(), |gamma| {
        let x = lift(random::<B, 2>(1, [4, 9], &device));
        norm(x, &Norm::rms(gamma.flatten::<1>(0, 1), 1e-6))
    });
    let smooth = |kind: &ActivationKind| *kind != ActivationKind::Relu;
    for kind in ActivationKind::ALL.into_iter().filter(smooth) {
        for gated in [false, true] {
            let x = random::<B, 2>(3, [3, 8], &device) * 2.0;
            assert_slope(&format!("{kind:?}"), x, |x| activate(x, Activation { kind, gated }));
        }
    }
    assert_slope("projection's weight", random::<B, 2>(4, [5, 9], &device), |weight| {
        linear(lift(random::<B, 2>(1, [4, 9], &device)), weight, None)
    });

    let shapes = [[4, 9], [3, 9], [5, 3], [4, 5]];
    let inputs = || shapes.iter().zip(10..).map(|(shape, seed)| random::<B, 2>(seed, *shape, &device));
    for (at, name) in ["input", "a", "b", "residual"].into_iter().enumerate() {
        assert_slope(&format!("adapter's {name}"), inputs().nth(at).expect("four inputs"), |own| {
            let mut all: Vec<_> = inputs().map(lift).collect();
            all[at] = own;
            let layer = LoraLayer {
                weight: lift(random::<B, 2>(4, [5, 9], &device)).into(),
                bias: None,
                a: all[1].clone().into(),
                b: all[2].clone().into(),
                scale: 0.75,
                activation: None,
            };
            lora(all[0].clone(), layer, Some(all[3].clone()))
        });
    }

    let shapes = [[4, 6], [4, 2], [3 * 10, 6], [3 * 6, 5]];
    let inputs = || shapes.iter().zip(20..).map(|(shape, seed)| random::<B, 2>(seed, *shape, &device));
    let chosen = Tensor::<Autodiff<B>, 2, Int>::from_data([[0, 2], [2, 0], [0, 2], [2, 2]], &device);
    for (at, name) in ["input", "weights", "up", "down"].into_iter().enumerate() {
        assert_slope(&format!("experts' {name}"), inputs().nth(at).expect("four inputs"), |own| {
            let mut all: Vec<_> = inputs().map(lift).collect();
            all[at] = own;
            let layer = ExpertsLayer {
                up: all[2].clone().into(),
                up_bias: None,
                activation: Activation::gated(ActivationKind::Silu),
                limit: None,
                down: all[3].clone().into(),
                down_bias: None,
            };
            experts(all[0].clone(), chosen.clone(), all[1].clone(), layer)
        });
    }

    let packed = PackedHeads { n_heads: 2, n_kv_heads: 1, head_dim: 6 };
    let shapes = [[2, 3, 24], [1, 1, 6], [1, 1, 6]];
    let inputs = || shapes.iter().zip(50..).map(|(shape, seed)| random::<B, 3>(seed, *shape, &device) + 0.5);
    for (at, name) in ["packed heads", "scale of queries", "scale of keys"].into_iter().enumerate() {
        assert_slope(name, inputs().nth(at).expect("three inputs"), |own| {
            let mut all: Vec<_> = inputs().map(Tensor::<Autodiff<B>, 3>::from_inner).collect();
            all[at] = own;
            let [query, key] = [1, 2].map(|at| Norm::rms(all[at].clone().flatten::<1>(0, 2), 1e-5));
            qkv_norm(all[0].clone(), packed, HeadNorms { query, key })
        });
    }

    let heads = |seed| random::<B, 4>(seed, [2, 2, 6, 4], &device);
    let lifted = |seed| Tensor::<Autodiff<B>, 4>::from_inner(heads(seed));
    let options = AttentionOptions::new(4);
    let dropped = options.with_dropout(Some(Dropout { probability: 0.3, key: RandomKey::new(3) }));
    for (options, name) in [(options, "attention"), (dropped, "attention with dropout")] {
        let mask = AttentionMask::Causal { window: Some(4) };
        assert_slope(&format!("{name}: query"), heads(5), |q| attention(q, lifted(6), lifted(7), &mask, options));
        assert_slope(&format!("{name}: key"), heads(6), |k| attention(lifted(5), k, lifted(7), &mask, options));
        assert_slope(&format!("{name}: value"), heads(7), |v| attention(lifted(5), lifted(6), v, &mask, options));
        let sinks = random::<B, 1>(8, [2], &device);
        assert_slope(&format!("{name}: query with sinks"), heads(5), |q| {
            sink_attention(q, lifted(6), lifted(7), Tensor::from_inner(sinks.clone()), &mask, options)
        });
        assert_slope(&format!("{name}: sinks"), sinks.clone(), |sinks| {
            sink_attention(lifted(5), lifted(6), lifted(7), sinks, &mask, options)
        });
    }

    let targets = Tensor::<Autodiff<B>, 1, Int>::from_data([3, -100, 0, 6, 2], &device);
    let options = HeadLossOptions::new().with_label_smoothing(0.1).with_chunk(2);
    let (hidden, weight) = (random::<B, 2>(8, [5, 4], &device), random::<B, 2>(9, [7, 4], &device));
    assert_slope("head_loss: hidden", hidden.clone(), |hidden| {
        head_loss(hidden, lift(weight.clone()), targets.clone(), options)
    });
    assert_slope("head_loss: weight", weight.clone(), |weight| {
        head_loss(lift(hidden.clone()), weight, targets.clone(), options)
    });
});
