//! Log-probabilities of tokens in the graph: the operands are saved, and logits are computed again.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{
    HeadLogProbsBackward, HeadLogProbsForward, HeadLogProbsGradients, HeadLogProbsOps, head_log_probs_backward,
    head_log_probs_forward,
};
use crate::autodiff::{inner, inner_int, inner_weight, take_sum};
use crate::checked::Checked;
use crate::products::Forward;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

/// Parents `[hidden, weight]`.
#[derive(Debug)]
struct HeadLogProbsNode(Forward);

impl<B: HeadLogProbsOps> Backward<B, 2> for HeadLogProbsNode {
    type State = HeadLogProbsForward<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let sum = take_sum(&ops, 1, &ops.state.hidden, grads);
        let [hidden, weight] = ops.parents.map(|parent| parent.map(|node| node.id));
        let (forward, trained) = (ops.state, weight.is_some());
        let _forward = self.0.enter();
        let _op = recorder::op("head_log_probs backward", || {
            let ([rows, d_model], [vocabulary, _]) = (forward.hidden.dims(), forward.weight.dims());
            let products = if trained { 3 } else { 2 };
            let call = Call::reads([recorder::operand(&forward.hidden), forward.weight.operand()]).and_first(1);
            call.computes(2 * products * (rows * d_model * vocabulary) as u64)
        });
        let operands = HeadLogProbsBackward { grad, forward, trained, sum };
        let HeadLogProbsGradients { hidden: d_hidden, weight: d_weight } =
            head_log_probs_backward::<B>(Checked::new(operands));
        if let Some(node) = hidden {
            grads.register::<B>(node, primitive(d_hidden));
        }
        if let (Some(node), Some(d_weight)) = (weight, d_weight) {
            grads.register::<B>(node, primitive(d_weight));
        }
    }
}

impl<B: HeadLogProbsOps, C: CheckpointStrategy> HeadLogProbsOps for Autodiff<B, C> {
    fn head_log_probs(operands: Checked<HeadLogProbsForward<Self>>) -> Tensor<Self, 1> {
        let _products = operands.products().enter();
        let HeadLogProbsForward { hidden, weight, targets, chunk } = operands.into_inner();
        let (weight, parameter) = inner_weight(weight, hidden.dtype());
        let forward = HeadLogProbsForward { hidden: inner(&hidden), weight, targets: inner_int(targets), chunk };
        let output = primitive(head_log_probs_forward::<B>(Checked::new(forward.clone())));
        let untracked = || primitive(Tensor::<Self, 2>::from_inner(forward.hidden.clone())).node;
        let nodes = [primitive(hidden).node, parameter.map_or_else(untracked, |weight| primitive(weight).node)];
        float(match HeadLogProbsNode(Forward::current()).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(forward, output),
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }
}
