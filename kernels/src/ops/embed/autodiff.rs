//! The lookup in the graph: of the table, only its size is kept.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, binary, unary};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{FloatDType, Int, Tensor};

use crate::Backend;
use crate::autodiff::{float, inner, inner_int, primitive};
use crate::recorder;

#[derive(Debug)]
struct EmbedNode;

/// Parents `[table, x]`.
#[derive(Debug)]
struct EmbedAddNode;

/// What a table's gradient needs: tokens and the table's size.
#[derive(Clone, Debug)]
struct Lookup<B: Backend> {
    tokens: Tensor<B, 2, Int>,
    table: [usize; 2],
}

impl<B: Backend> Lookup<B> {
    fn new<C: CheckpointStrategy>(table: &Tensor<Autodiff<B, C>, 2>, tokens: &Tensor<B, 2, Int>) -> Self {
        Self { tokens: tokens.clone(), table: table.dims() }
    }

    fn backward(self, grad: FloatTensor<B>) -> FloatTensor<B> {
        let Self { tokens, table: [vocabulary, d_model] } = self;
        let rows = tokens.dims().iter().product::<usize>();
        let grad = B::reshape(float::<B, 3>(grad), [rows, d_model]);
        let _op = recorder::op("embed backward", || vec![recorder::operand(&grad), recorder::operand(&tokens)]);
        primitive(B::embed_backward(grad, tokens.reshape([rows]), vocabulary))
    }
}

impl<B: Backend> Backward<B, 1> for EmbedNode {
    type State = Lookup<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, grads, |grad| ops.state.backward(grad));
    }
}

impl<B: Backend> Backward<B, 2> for EmbedAddNode {
    type State = Lookup<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        binary::<B, _, _>(ops.parents, ops.node, grads, |grad| ops.state.backward(grad), |grad| grad);
    }
}

pub(crate) fn embed<B: Backend, C: CheckpointStrategy>(
    table: Tensor<Autodiff<B, C>, 2>,
    tokens: Tensor<Autodiff<B, C>, 2, Int>,
    dtype: FloatDType,
) -> Tensor<Autodiff<B, C>, 3> {
    let tokens = inner_int(tokens);
    let saved = Lookup::new(&table, &tokens);
    let output = primitive(B::embed_forward(inner(&table), tokens, dtype));
    float(match EmbedNode.prepare::<C>([primitive(table).node]).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(saved, output),
        OpsKind::UnTracked(node) => node.finish(output),
    })
}

pub(crate) fn embed_add<B: Backend, C: CheckpointStrategy>(
    table: Tensor<Autodiff<B, C>, 2>,
    tokens: Tensor<Autodiff<B, C>, 2, Int>,
    x: Tensor<Autodiff<B, C>, 3>,
) -> Tensor<Autodiff<B, C>, 3> {
    let tokens = inner_int(tokens);
    let saved = Lookup::new(&table, &tokens);
    let output = primitive(B::embed_add(inner(&table), tokens, inner(&x)));
    let nodes = [primitive(table).node, primitive(x).node];
    float(match EmbedAddNode.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(saved, output),
        OpsKind::UnTracked(node) => node.finish(output),
    })
}
