//! The rotation in the graph: its gradient is the rotation back.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::{Int, Tensor};

use super::{PackedHeads, RotaryTable};
use crate::Backend;
use crate::autodiff::{float, inner, inner_int, primitive};
use crate::recorder;

#[derive(Debug)]
struct RotaryNode;

impl<B: Backend> Backward<B, 1> for RotaryNode {
    type State = (RotaryTable<B>, Tensor<B, 2, Int>, bool);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (table, positions, inverse) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let grad = float(grad);
            let _op = recorder::op("rotary backward", || vec![recorder::operand::<B, 4, _>(&grad)]);
            primitive(B::rotary(grad, &table, positions, !inverse))
        });
    }
}

#[derive(Debug)]
struct QkvRotaryNode;

impl<B: Backend> Backward<B, 1> for QkvRotaryNode {
    type State = (PackedHeads, RotaryTable<B>, Tensor<B, 2, Int>, bool);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (heads, table, positions, inverse) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let grad = float(grad);
            let _op = recorder::op("qkv_rotary backward", || vec![recorder::operand::<B, 3, _>(&grad)]);
            primitive(B::qkv_rotary(grad, heads, &table, positions, !inverse))
        });
    }
}

pub(crate) fn rotary<B: Backend, C: CheckpointStrategy>(
    x: Tensor<Autodiff<B, C>, 4>,
    table: &RotaryTable<Autodiff<B, C>>,
    positions: Tensor<Autodiff<B, C>, 2, Int>,
    inverse: bool,
) -> Tensor<Autodiff<B, C>, 4> {
    let table = RotaryTable { cos: inner(&table.cos), sin: inner(&table.sin) };
    let positions = inner_int(positions);
    let output = primitive(B::rotary(inner(&x), &table, positions.clone(), inverse));
    float(match RotaryNode.prepare::<C>([primitive(x).node]).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish((table, positions, inverse), output),
        OpsKind::UnTracked(node) => node.finish(output),
    })
}

pub(crate) fn qkv_rotary<B: Backend, C: CheckpointStrategy>(
    qkv: Tensor<Autodiff<B, C>, 3>,
    heads: PackedHeads,
    table: &RotaryTable<Autodiff<B, C>>,
    positions: Tensor<Autodiff<B, C>, 2, Int>,
    inverse: bool,
) -> Tensor<Autodiff<B, C>, 3> {
    let table = RotaryTable { cos: inner(&table.cos), sin: inner(&table.sin) };
    let positions = inner_int(positions);
    // Moved, not cloned: the rotation may then take place where the heads lie.
    let qkv = primitive(qkv);
    let output = primitive(B::qkv_rotary(float(qkv.primitive), heads, &table, positions.clone(), inverse));
    float(match QkvRotaryNode.prepare::<C>([qkv.node]).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish((heads, table, positions, inverse), output),
        OpsKind::UnTracked(node) => node.finish(output),
    })
}
