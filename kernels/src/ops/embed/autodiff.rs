//! The lookup in the graph: only the table's size is saved.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Int, Tensor};

use super::{EmbedBackward, EmbedForward, EmbedOps, embed_backward, embed_forward};
use crate::autodiff::{inner, inner_int, inner_stored, take_sum};
use crate::checked::Checked;
use crate::products::Forward;
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

#[derive(Debug)]
struct EmbedNode(Forward);

/// Parents `[table, x]`.
#[derive(Debug)]
struct EmbedAddNode(Forward);

/// Saved for the table's gradient: tokens and the table's size.
#[derive(Clone, Debug)]
struct Lookup<B: EmbedOps> {
    tokens: Tensor<B, 2, Int>,
    table: [usize; 2],
}

impl<B: EmbedOps> Lookup<B> {
    fn new(table: &Weight<B>, tokens: &Tensor<B, 2, Int>) -> Self {
        Self { tokens: tokens.clone(), table: table.dims() }
    }

    /// Registers the table's gradient, the first parent's, including its earlier one.
    fn backward<S, const N: usize>(self, grad: FloatTensor<B>, ops: &Ops<S, N>, grads: &mut Gradients) {
        let Some(node) = &ops.parents[0] else { return };
        let Self { tokens, table: [vocabulary, d_model] } = self;
        let rows = tokens.dims().iter().product::<usize>();
        let grad = B::reshape(float::<B, 3>(grad), [rows, d_model]);
        let sum = take_sum(ops, 0, &grad, grads);
        let _op = recorder::op("embed backward", || {
            // Writes the gradient of the whole table, or reads and writes rows of it.
            let table = (vocabulary * d_model * 4) as u64;
            let written = if sum.is_some() { (rows * d_model * 8) as u64 } else { table };
            Call::reads([recorder::operand(&grad), recorder::operand(&tokens)]).and(written.min(2 * table))
        });
        let operands = EmbedBackward { grad, tokens, vocabulary, sum };
        grads.register::<B>(node.id, primitive(embed_backward::<B>(Checked::new(operands))));
    }
}

impl<B: EmbedOps> Backward<B, 1> for EmbedNode {
    type State = Lookup<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let _forward = self.0.enter();
        let grad = grads.consume::<B>(&ops.node);
        ops.state.clone().backward(grad, &ops, grads);
    }
}

impl<B: EmbedOps> Backward<B, 2> for EmbedAddNode {
    type State = Lookup<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let _forward = self.0.enter();
        let grad = grads.consume::<B>(&ops.node);
        if let Some(node) = &ops.parents[1] {
            grads.register::<B>(node.id, grad.clone());
        }
        ops.state.clone().backward(grad, &ops, grads);
    }
}

impl<B: EmbedOps, C: CheckpointStrategy> EmbedOps for Autodiff<B, C> {
    fn embed(operands: Checked<EmbedForward<Self>>) -> Tensor<Self, 3> {
        let _products = operands.products().enter();
        let EmbedForward { table, tokens, dtype, added } = operands.into_inner();
        // Rows are looked up as they are stored, and cast then.
        let (table, parameter) = match inner_stored(table) {
            Ok(table) => (Weight::Float(inner(&table)), table),
            // Nothing is tracked in its place.
            Err(table) => (table, Tensor::zeros([1, 1], &tokens.device())),
        };
        let tokens = inner_int(tokens);
        let saved = Lookup::new(&table, &tokens);
        let forward = EmbedForward { table, tokens, dtype, added: added.as_ref().map(inner) };
        let output = primitive(embed_forward::<B>(Checked::new(forward)));
        let (table, part) = (primitive(parameter).node, Forward::current());
        float(match added {
            None => match EmbedNode(part).prepare::<C>([table]).compute_bound().stateful() {
                OpsKind::Tracked(node) => node.finish(saved, output),
                OpsKind::UnTracked(node) => node.finish(output),
            },
            Some(x) => match EmbedAddNode(part).prepare::<C>([table, primitive(x).node]).compute_bound().stateful() {
                OpsKind::Tracked(node) => node.finish(saved, output),
                OpsKind::UnTracked(node) => node.finish(output),
            },
        })
    }
}
