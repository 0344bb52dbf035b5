//! Softmax in the graph: the output is kept.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;

use crate::Backend;
use crate::autodiff::{float, inner, primitive};

#[derive(Debug)]
struct SoftmaxNode;

impl<B: Backend> Backward<B, 1> for SoftmaxNode {
    type State = Tensor<B, 2>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let output = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| primitive(B::softmax_backward(float(grad), output)));
    }
}

pub(crate) fn softmax<B: Backend, C: CheckpointStrategy>(x: Tensor<Autodiff<B, C>, 2>) -> Tensor<Autodiff<B, C>, 2> {
    let output = B::softmax_forward(inner(&x));
    float(match SoftmaxNode.prepare::<C>([primitive(x).node]).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(output.clone(), primitive(output)),
        OpsKind::UnTracked(node) => node.finish(primitive(output)),
    })
}
