//! Several threads on one device.

use std::process::Command;
use std::thread;

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use fireclay_kernels::{
    Activation, ActivationKind, AttentionMask, AttentionOptions, Backend, PackedHeads, activate, linear, linear_add,
    qkv_attention,
};

use crate::compare::{assert_close, random, tolerance, values};
use crate::{OWN_STREAMS, backend_name, backend_test};

const D_MODEL: usize = 64;

/// A layer of a few rows: its results are in scratch buffers, and are added to in place.
fn layer<B: Backend>(x: Tensor<B, 2>, device: &B::Device) -> Tensor<B, 2> {
    let weight = random::<B, 2>(1, [D_MODEL, D_MODEL], device) / 8.0;
    let hidden = activate(linear(x.clone(), weight.clone(), None), Activation::plain(ActivationKind::Silu));
    linear_add(hidden, weight, None, None, x)
}

backend_test!(results_go_from_thread_to_thread::<B>(device) {
    let input = random::<B, 2>(0, [3, D_MODEL], &device);
    let expected = (0..12).fold(input.clone(), |x, _| layer(x, &device));
    for _ in 0..4 {
        let result = (0..12).fold(input.clone(), |x, _| {
            let next = thread::scope(|scope| scope.spawn(|| layer(x, &device)).join());
            next.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        assert_close("twelve layers, a thread each", &result, &expected, tolerance::<B>(&device));
    }
});

/// Loss and gradients of one pass over attention and a projection.
fn pass<B: Backend>(seed: u64, device: &B::Device) -> Vec<f32> {
    let heads = PackedHeads { n_heads: 2, n_kv_heads: 2, head_dim: D_MODEL / 2 };
    let x = random::<Autodiff<B>, 3>(seed, [2, 19, D_MODEL], device).require_grad();
    let weight = random::<Autodiff<B>, 2>(seed + 1, [3 * D_MODEL, D_MODEL], device).require_grad();
    let qkv = linear(x.clone(), weight.clone(), None);
    let output =
        qkv_attention(qkv, heads, &AttentionMask::Causal { window: None }, AttentionOptions::new(heads.head_dim));
    let gradients = (output.clone() * output).sum().backward();
    let mut all = values(&weight.grad(&gradients).expect("the weight has a gradient"));
    all.extend(values(&x.grad(&gradients).expect("the input has a gradient")));
    all
}

backend_test!(threads_that_train_at_once_get_the_gradients_of_one::<B>(device) {
    let expected: Vec<_> = (0..3).map(|thread| pass::<B>(thread, &device)).collect();
    thread::scope(|scope| {
        for (seed, expected) in expected.iter().enumerate() {
            let device = device.clone();
            scope.spawn(move || {
                for _ in 0..8 {
                    let error = crate::compare::relative_error(&pass::<B>(seed as u64, &device), expected);
                    assert!(error <= tolerance::<B>(&device).relative, "thread {seed}: relative error {error:.2e}");
                }
            });
        }
    });
});

#[test]
fn tensors_of_another_thread_are_refused_where_threads_have_streams_of_their_own() {
    let test = "threads::results_go_from_thread_to_thread";
    let binary = std::env::current_exe().expect("a test knows its binary");
    let output = Command::new(binary).args(["--exact", test]).env(OWN_STREAMS, "1").output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    if backend_name() == "cpu" {
        assert!(output.status.success(), "the CPU has no streams: {said}");
    } else {
        assert!(!output.status.success(), "it was not refused: {said}");
        assert!(said.contains("linear: the tensor belongs to another thread"), "{said}");
    }
}
