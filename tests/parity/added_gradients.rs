//! Gradients accumulated over passes.

use burn::backend::Autodiff;
use burn::tensor::{DType, Int, Tensor, TensorData};
use fireclay_kernels::{
    Activation, ActivationKind, Backend, ExpertsLayer, FeedForwardLayer, HeadLossOptions, Norm, backward, embed,
    experts, feed_forward, head_loss, linear, linear_add,
};

use crate::backend_test;
use crate::compare::{assert_close, random, values};
use crate::harness::{half_or_single, vector};

backend_test!(gradients_of_a_second_pass_are_added_to_those_of_the_first_and_leave_what_others_hold::<B>(device) {
    let half = half_or_single::<B>(&device);
    added_gradients_parity::<B>(&[(DType::F32, [33, 20, 5, 7]), (half, [65, 130, 24, 40])], &device);
});

backend_test!(gradients_of_large_products_are_added_to_those_of_a_pass_before::<B>(device) {
    // Large enough that the products of a Hopper GPU accumulate in place; elsewhere such sizes only
    // take long.
    let sizes = if B::name(&device).contains("cuda") { [600, 1100, 512, 1024] } else { [140, 260, 64, 136] };
    let half = half_or_single::<B>(&device);
    added_gradients_parity::<B>(&[half, DType::F32].map(|dtype| (dtype, sizes)), &device);
});

const EXPERTS: usize = 3;

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
            leaf(11, [EXPERTS * d_ff, d_model]),
            leaf(12, [1, EXPERTS * d_ff]),
            leaf(13, [EXPERTS * d_model, d_ff]),
            leaf(14, [1, EXPERTS * d_model]),
        ];
        let [table, up, down, bias, gamma, late, wide, wide_bias, narrow, narrow_bias, of_experts @ ..] = &weights;
        let [expert_up, expert_up_bias, expert_down, expert_down_bias] = of_experts;
        // Each pass has other tokens, and one weight occurs only in the second.
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
            // Experts of whom one has no token in one pass.
            let chosen = (0..tokens).map(|at| (at * 3 % (EXPERTS - pass)) as i32).collect::<Vec<_>>();
            let chosen = Tensor::<Autodiff<B>, 2, Int>::from_data(TensorData::new(chosen, [tokens, 1]), device);
            let layer = ExpertsLayer {
                up: expert_up.clone().into(),
                up_bias: Some(vector(expert_up_bias)),
                activation: gelu,
                limit: None,
                down: expert_down.clone().into(),
                down_bias: Some(vector(expert_down_bias)),
            };
            let shares = Tensor::<Autodiff<B>, 2>::ones([tokens, 1], device) * 0.5;
            let rows = x.clone().reshape([tokens, d_model]);
            x = x + experts(rows, chosen, shares, layer).reshape([1, tokens, d_model]);
            let inner = linear(x.clone(), wide.clone(), Some(vector(wide_bias)));
            x = linear_add(inner, narrow.clone(), Some(vector(narrow_bias)), None, x);
            // The gradient of a loss is not always one.
            let loss = head_loss(x, table.clone(), ids, HeadLossOptions::default());
            if pass == 1 { loss * 0.5 } else { loss }
        };
        let gradient = |weight: &Tensor<Autodiff<B>, 2>, gradients: &_| weight.grad(gradients);
        let [first, second] = [0, 1].map(|pass| backward(loss(pass), None));
        // Some gradients are shared, others not.
        let alone = backward(loss(0), None);
        let held = [up, wide, table, expert_up].map(|weight| gradient(weight, &first).expect("a gradient"));
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
