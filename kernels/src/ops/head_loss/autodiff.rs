//! The head's loss in the graph: gradients are made in the forward pass, and scaled here.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::{Int, Tensor};

use super::HeadLossOptions;
use crate::Backend;
use crate::autodiff::{float, inner, inner_int, primitive};
use crate::recorder;

#[derive(Debug)]
struct HeadLossNode;

impl<B: Backend> Backward<B, 2> for HeadLossNode {
    type State = Option<(Tensor<B, 2>, Tensor<B, 2>)>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let Some((d_hidden, d_weight)) = ops.state else { return };
        let _op =
            recorder::op("head_loss backward", || vec![recorder::operand(&d_hidden), recorder::operand(&d_weight)]);
        let (d_hidden, d_weight) = B::head_loss_backward(grad, d_hidden, d_weight);
        for (parent, gradient) in ops.parents.into_iter().zip([d_hidden, d_weight]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, primitive(gradient));
            }
        }
    }
}

pub(crate) fn head_loss<B: Backend, C: CheckpointStrategy>(
    hidden: Tensor<Autodiff<B, C>, 2>,
    weight: Tensor<Autodiff<B, C>, 2>,
    targets: Tensor<Autodiff<B, C>, 1, Int>,
    options: HeadLossOptions,
) -> Tensor<Autodiff<B, C>, 1> {
    let (inputs, targets) = ((inner(&hidden), inner(&weight)), inner_int(targets));
    let nodes = [primitive(hidden).node, primitive(weight).node];
    let forward = |gradients| B::head_loss_forward(inputs.0, inputs.1, targets, options, gradients);
    float(match HeadLossNode.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(node) => {
            let forward = forward(true);
            node.finish(forward.gradients, primitive(forward.loss))
        }
        OpsKind::UnTracked(node) => node.finish(primitive(forward(false).loss)),
    })
}
