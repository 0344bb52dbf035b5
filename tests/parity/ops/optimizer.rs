//! The optimizer against the reference.

use burn::tensor::Tensor;
use fireclay_kernels::operands::GradientNorm;
use fireclay_kernels::{AdamW, AdamWParameter, gradient_norm, optimizer_step, optimizer_step_of, reference};

use crate::backend_test;
use crate::compare::{assert_close, random, values};
use crate::harness::half_or_single;
use crate::plain;

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

backend_test!(a_part_of_the_parameters_is_clipped_by_the_norm_of_all::<B>(device) {
    let adamw = AdamW {
        learning_rate: 0.01,
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        max_grad_norm: Some(0.5),
        step: 1,
    };
    let parameter = |size: usize| AdamWParameter::<B> {
        value: random(size as u64, [size], &device),
        gradient: random(7 + size as u64, [size], &device),
        // In the sums of two steps the size of a clipped gradient shows, which one step divides away.
        first_moment: random(11 + size as u64, [size], &device),
        second_moment: random::<B, 1>(13 + size as u64, [size], &device).powi_scalar(2),
        decays: true,
        copy: None,
    };
    let all = || [3, 65, 1000, 40_001].map(parameter).to_vec();
    let gradients: Vec<Tensor<B, 1>> = all().into_iter().map(|parameter| parameter.gradient).collect();
    let norm = gradient_norm(gradients.clone());
    assert_close("the norm", &norm, &reference::gradient_norm(GradientNorm { gradients }), 1e-5);
    let (wanted, whole) = plain::optimizer_step(all(), &adamw);
    for (at, wanted) in wanted.iter().enumerate() {
        let (part, told) = optimizer_step_of(vec![all().swap_remove(at)], &adamw, Some(norm.clone()));
        assert_close("the norm of all", &told, &whole, 1e-5);
        assert_close(&format!("parameter {at}"), &part[0].value, &wanted.value, 1e-5);
        assert_close(&format!("moment {at}"), &part[0].first_moment, &wanted.first_moment, 1e-5);
    }
});
