//! Log-probabilities of tokens against a softmax over all logits.

use burn::backend::Autodiff;
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Int, Tensor, TensorData};
use fireclay_kernels::{Backend, IGNORED_TARGET, head_log_probs};

use crate::backend_test;
use crate::compare::{Tolerance, assert_close, random};
use crate::harness::{assert_parity, halves, with_gradients};

/// Targets below `vocabulary`, some of them ignored.
fn targets<B: Backend>(rows: usize, vocabulary: usize, device: &B::Device) -> Tensor<B, 1, Int> {
    let target = |row: usize| if row % 5 == 3 { IGNORED_TARGET } else { (row * 7 % vocabulary) as i32 };
    Tensor::from_data(TensorData::new((0..rows).map(target).collect::<Vec<_>>(), [rows]), device)
}

/// The same from all logits at once, as a column.
fn plain<B: Backend>(hidden: Tensor<B, 2>, weight: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    let [rows] = targets.dims();
    let counted = targets.clone().greater_equal_elem(0).float().cast(DType::F32).reshape([rows, 1]);
    let logits = hidden.matmul(weight.transpose());
    log_softmax(logits, 1).gather(1, targets.clamp_min(0).reshape([rows, 1])) * counted
}

backend_test!(head_log_probs_are_those_of_a_softmax_whatever_the_chunk::<B>(device) {
    for (rows, d_model, vocabulary) in [(1, 3, 2), (9, 16, 33), (40, 24, 130)] {
        let (hidden, weight) =
            (random::<B, 2>(1, [rows, d_model], &device), random::<B, 2>(2, [vocabulary, d_model], &device));
        let targets = targets::<Autodiff<B>>(rows, vocabulary, &device);
        for chunk in [None, Some(1), Some(7)] {
            assert_parity(
                &format!("head_log_probs {rows}x{d_model}x{vocabulary}, chunk {chunk:?}"),
                &[hidden.clone(), weight.clone()],
                |i| head_log_probs(i[0].clone(), i[1].clone(), targets.clone(), chunk).reshape([rows, 1]),
                |i| plain(i[0].clone(), i[1].clone(), targets.clone()),
            );
        }
    }
});

backend_test!(head_log_probs_in_half_precision_are_close_to_those_of_a_softmax::<B>(device) {
    for dtype in halves::<B>(&device) {
        let hidden = random::<B, 2>(1, [40, 24], &device).cast(dtype).cast(DType::F32);
        let weight = random::<B, 2>(2, [130, 24], &device).cast(dtype).cast(DType::F32);
        let targets = targets::<Autodiff<B>>(40, 130, &device);
        let inputs = [hidden, weight];
        let (output, gradients) = with_gradients(&inputs, DType::F32, |i| {
            head_log_probs(i[0].clone().cast(dtype), i[1].clone(), targets.clone(), Some(7)).reshape([40, 1])
        });
        let (wanted, wanted_gradients) =
            with_gradients(&inputs, DType::F32, |i| plain(i[0].clone(), i[1].clone(), targets.clone()));
        assert_close(&format!("{dtype:?} head_log_probs"), &output, &wanted, Tolerance::new(1e-2, dtype));
        for (at, (gradient, wanted)) in gradients.iter().zip(&wanted_gradients).enumerate() {
            assert_close(
                &format!("{dtype:?} head_log_probs, gradient {at}"),
                gradient,
                wanted,
                Tolerance::new(2e-2, dtype),
            );
        }
    }
});
