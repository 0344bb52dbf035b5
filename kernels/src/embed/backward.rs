//! The lookup in the graph: of the table, only its size is kept.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::{FloatDType, Int, Tensor};

use crate::Backend;
use crate::autodiff::{float, inner, inner_int, primitive};
use crate::recorder;

#[derive(Debug)]
struct EmbedNode;

impl<B: Backend> Backward<B, 1> for EmbedNode {
    type State = (Tensor<B, 2, Int>, [usize; 2], FloatDType);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (tokens, [vocabulary, d_model], dtype) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let rows = tokens.dims().iter().product::<usize>();
            let grad = B::reshape(float::<B, 3>(grad), [rows, d_model]);
            let _op = recorder::op("embed backward", || vec![recorder::operand(&grad), recorder::operand(&tokens)]);
            primitive(B::embed_backward(grad, tokens.reshape([rows]), vocabulary, dtype))
        });
    }
}

pub(crate) fn embed<B: Backend, C: CheckpointStrategy>(
    table: Tensor<Autodiff<B, C>, 2>,
    tokens: Tensor<Autodiff<B, C>, 2, Int>,
    dtype: FloatDType,
) -> Tensor<Autodiff<B, C>, 3> {
    let tokens = inner_int(tokens);
    let saved = (tokens.clone(), table.dims(), table.dtype().into());
    let output = primitive(B::embed_forward(inner(&table), tokens, dtype));
    float(match EmbedNode.prepare::<C>([primitive(table).node]).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(saved, output),
        OpsKind::UnTracked(node) => node.finish(output),
    })
}
