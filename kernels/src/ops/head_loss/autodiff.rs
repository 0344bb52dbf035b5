//! The head's loss in the graph: gradients are made in the forward pass, and scaled here, and added to those of an earlier pass.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{HeadLossBackward, HeadLossForward, HeadLossOps, head_loss_backward, head_loss_forward};
use crate::autodiff::{inner, inner_int, take_sum};
use crate::checked::Checked;
use crate::products::Forward;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

#[derive(Debug)]
struct HeadLossNode(Forward);

impl<B: HeadLossOps> Backward<B, 2> for HeadLossNode {
    type State = Option<(Tensor<B, 2>, Tensor<B, 2>)>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let sum = ops.state.as_ref().and_then(|(_, d_weight)| take_sum(&ops, 1, d_weight, grads));
        let Some((d_hidden, d_weight)) = ops.state else { return };
        let _forward = self.0.enter();
        let _op = recorder::op("head_loss backward", || {
            let inputs = [recorder::operand(&d_hidden), recorder::operand(&d_weight)];
            let written: u64 = inputs.iter().map(|input| input.bytes()).sum();
            let read = sum.as_ref().map_or(0, |sum| recorder::operand(sum).bytes());
            Call::reads(inputs).and(written + read)
        });
        let operands = HeadLossBackward { grad, d_hidden, d_weight, sum };
        let (d_hidden, d_weight) = head_loss_backward::<B>(Checked::new(operands));
        for (parent, gradient) in ops.parents.into_iter().zip([d_hidden, d_weight]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, primitive(gradient));
            }
        }
    }
}

impl<B: HeadLossOps, C: CheckpointStrategy> HeadLossOps for Autodiff<B, C> {
    fn head_loss(operands: Checked<HeadLossForward<Self>>) -> Tensor<Self, 1> {
        let _products = operands.products().enter();
        let HeadLossForward { hidden, weight, targets, options, .. } = operands.into_inner();
        let forward = HeadLossForward {
            hidden: inner(&hidden),
            weight: inner(&weight),
            targets: inner_int(targets),
            options,
            gradients: false,
        };
        let nodes = [primitive(hidden).node, primitive(weight).node];
        float(match HeadLossNode(Forward::current()).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => {
                // The gradients are made where the logits are, chunk by chunk: two products more, and both are written.
                recorder::also(|| {
                    let ([rows, d_model], [vocabulary, _]) = (forward.hidden.dims(), forward.weight.dims());
                    let written = rows * d_model * forward.hidden.dtype().size() + vocabulary * d_model * 4;
                    Call::default().and(written as u64).computes(4 * (rows * d_model * vocabulary) as u64)
                });
                let forward = head_loss_forward::<B>(Checked::new(HeadLossForward { gradients: true, ..forward }));
                node.finish(forward.gradients, primitive(forward.loss))
            }
            OpsKind::UnTracked(node) => node.finish(primitive(head_loss_forward::<B>(Checked::new(forward)).loss)),
        })
    }
}
