//! Rotation in the graph: its gradient is the inverse rotation.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::{Int, Tensor};

use super::{QkvRotaryForward, RotaryForward, RotaryOps, RotaryTable, qkv_rotary_forward, rotary_forward};
use crate::autodiff::{inner, inner_int};
use crate::checked::Checked;
use crate::packed_heads::PackedHeads;
use crate::products::Forward;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

#[derive(Debug)]
struct RotaryNode(Forward);

impl<B: RotaryOps> Backward<B, 1> for RotaryNode {
    type State = (RotaryTable<B>, Tensor<B, 2, Int>, bool);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (table, positions, inverse) = ops.state;
        let _forward = self.0.enter();
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let x = float(grad);
            let _op = recorder::op("rotary backward", || Call::reads([recorder::operand::<B, 4, _>(&x)]).and_first(1));
            let operands = RotaryForward { x, table, positions, inverse: !inverse };
            primitive(rotary_forward::<B>(Checked::new(operands)))
        });
    }
}

#[derive(Debug)]
struct QkvRotaryNode(Forward);

impl<B: RotaryOps> Backward<B, 1> for QkvRotaryNode {
    type State = (PackedHeads, RotaryTable<B>, Tensor<B, 2, Int>, bool);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (heads, table, positions, inverse) = ops.state;
        let _forward = self.0.enter();
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let qkv = float(grad);
            let _op =
                recorder::op("qkv_rotary backward", || Call::reads([recorder::operand::<B, 3, _>(&qkv)]).and_first(1));
            let operands = QkvRotaryForward { qkv, heads, table, positions, inverse: !inverse };
            primitive(qkv_rotary_forward::<B>(Checked::new(operands)))
        });
    }
}

impl<B: RotaryOps, C: CheckpointStrategy> RotaryOps for Autodiff<B, C> {
    fn rotary(operands: Checked<RotaryForward<Self>>) -> Tensor<Self, 4> {
        let _products = operands.products().enter();
        let RotaryForward { x, table, positions, inverse } = operands.into_inner();
        let (table, positions) = (inner_table(&table), inner_int(positions));
        let forward = RotaryForward { x: inner(&x), table: table.clone(), positions: positions.clone(), inverse };
        let output = primitive(rotary_forward::<B>(Checked::new(forward)));
        float(match RotaryNode(Forward::current()).prepare::<C>([primitive(x).node]).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish((table, positions, inverse), output),
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }

    fn qkv_rotary(operands: Checked<QkvRotaryForward<Self>>) -> Tensor<Self, 3> {
        let _products = operands.products().enter();
        let QkvRotaryForward { qkv, heads, table, positions, inverse } = operands.into_inner();
        let (table, positions) = (inner_table(&table), inner_int(positions));
        // Moved, not cloned, so that the rotation can be in place.
        let qkv = primitive(qkv);
        let (node, own) = (qkv.node, float(qkv.primitive));
        let (own_table, at) = (table.clone(), positions.clone());
        let forward = QkvRotaryForward { qkv: own, heads, table: own_table, positions: at, inverse };
        let output = primitive(qkv_rotary_forward::<B>(Checked::new(forward)));
        float(match QkvRotaryNode(Forward::current()).prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish((heads, table, positions, inverse), output),
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }
}

fn inner_table<B: RotaryOps, C: CheckpointStrategy>(table: &RotaryTable<Autodiff<B, C>>) -> RotaryTable<B> {
    RotaryTable { cos: inner(&table.cos), sin: inner(&table.sin) }
}
