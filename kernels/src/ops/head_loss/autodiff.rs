//! The head's loss in the graph: gradients are computed in the forward pass, and here scaled and
//! added to earlier ones.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{
    HeadLossBackward, HeadLossForward, HeadLossGradients, HeadLossOps, HeadLossWanted, head_loss_backward,
    head_loss_forward,
};
use crate::autodiff::{inner, inner_int, inner_stored, is_tracked, take_sum};
use crate::checked::Checked;
use crate::products::Forward;
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

#[derive(Debug)]
struct HeadLossNode(Forward);

impl<B: HeadLossOps> Backward<B, 2> for HeadLossNode {
    type State = Option<HeadLossGradients<B>>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let sum = ops.state.as_ref().and_then(|gradients| take_sum(&ops, 1, &gradients.hidden, grads));
        let Some(gradients) = ops.state else { return };
        let _forward = self.0.enter();
        let _op = recorder::op("head_loss backward", || {
            let weight = gradients.weight.iter().chain(&sum);
            let inputs = std::iter::once(&gradients.hidden).chain(weight).map(recorder::operand);
            let inputs: Vec<_> = inputs.collect();
            let written: u64 = inputs.iter().take(2).map(|input| input.bytes()).sum();
            Call::reads(inputs).and(written)
        });
        let operands = HeadLossBackward { grad, gradients, sum };
        let HeadLossGradients { hidden, weight } = head_loss_backward::<B>(Checked::new(operands));
        for (parent, gradient) in ops.parents.into_iter().zip([Some(hidden), weight]) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(node.id, primitive(gradient));
            }
        }
    }
}

impl<B: HeadLossOps, C: CheckpointStrategy> HeadLossOps for Autodiff<B, C> {
    fn head_loss(operands: Checked<HeadLossForward<Self>>) -> Tensor<Self, 1> {
        let _products = operands.products().enter();
        let HeadLossForward { hidden, weight, targets, options, .. } = operands.into_inner();
        let (weight, parameter) = match inner_stored(weight) {
            Ok(weight) => (Weight::Float(inner(&weight)), Some(weight)),
            Err(weight) => (weight, None),
        };
        let untracked = || primitive(Tensor::<Self, 2>::from_inner(inner(&hidden))).node;
        let wanted = match &parameter {
            Some(weight) if is_tracked(weight) => HeadLossWanted::Both,
            _ => HeadLossWanted::Hidden,
        };
        let weight_node = parameter.map_or_else(untracked, |weight| primitive(weight).node);
        let forward = HeadLossForward {
            hidden: inner(&hidden),
            weight,
            targets: inner_int(targets),
            options,
            wanted: HeadLossWanted::Nothing,
        };
        let nodes = [primitive(hidden).node, weight_node];
        float(match HeadLossNode(Forward::current()).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => {
                // Gradients are computed with the logits, chunk by chunk: two more products, and
                // both are written.
                recorder::also(|| {
                    let ([rows, d_model], [vocabulary, _]) = (forward.hidden.dims(), forward.weight.dims());
                    let (tables, products) = if wanted == HeadLossWanted::Both { (1, 2) } else { (0, 1) };
                    let written = rows * d_model * forward.hidden.dtype().size() + tables * vocabulary * d_model * 4;
                    Call::default().and(written as u64).computes(2 * products * (rows * d_model * vocabulary) as u64)
                });
                let forward = head_loss_forward::<B>(Checked::new(HeadLossForward { wanted, ..forward }));
                node.finish(forward.gradients, primitive(forward.loss))
            }
            OpsKind::UnTracked(node) => node.finish(primitive(head_loss_forward::<B>(Checked::new(forward)).loss)),
        })
    }
}
