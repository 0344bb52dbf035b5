//! Norms of packed heads in the graph.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{HeadNorms, QkvNormBackward, QkvNormForward, QkvNormOps, qkv_norm_backward, qkv_norm_forward};
use crate::autodiff::inner;
use crate::checked::Checked;
use crate::ops::norm::Norm;
use crate::packed_heads::PackedHeads;
use crate::products::Forward;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

/// Parents `[qkv, query's scale, key's scale]`.
#[derive(Debug)]
struct QkvNormNode(Forward);

#[derive(Clone, Debug)]
struct State<B: QkvNormOps> {
    qkv: Tensor<B, 3>,
    inverse_deviation: Tensor<B, 2>,
    heads: PackedHeads,
    norms: HeadNorms<B>,
}

impl<B: QkvNormOps> Backward<B, 3> for QkvNormNode {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let State { qkv, inverse_deviation, heads, norms } = ops.state;
        let _forward = self.0.enter();
        let _op = recorder::op("qkv_norm backward", || Call::reads([recorder::operand(&qkv)]).and_first(2));
        let [x_node, query_node, key_node] = ops.parents.map(|parent| parent.map(|node| node.id));
        let trained = query_node.is_some() || key_node.is_some();
        let operands = QkvNormBackward { grad, qkv, inverse_deviation, heads, norms, trained };
        let gradients = qkv_norm_backward::<B>(Checked::new(operands));
        if let Some(node) = x_node {
            grads.register::<B>(node, primitive(gradients.qkv));
        }
        for (node, gradient) in [(query_node, gradients.query), (key_node, gradients.key)] {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node, primitive(gradient));
            }
        }
    }
}

impl<B: QkvNormOps, C: CheckpointStrategy> QkvNormOps for Autodiff<B, C> {
    fn qkv_norm(operands: Checked<QkvNormForward<Self>>) -> Tensor<Self, 3> {
        let _products = operands.products().enter();
        let QkvNormForward { qkv, heads, norms: HeadNorms { query, key } } = operands.into_inner();
        let weights = |norm: &Norm<Self>| Norm {
            kind: norm.kind,
            gamma: inner(&norm.gamma),
            beta: norm.beta.as_ref().map(inner),
            epsilon: norm.epsilon,
        };
        let norms = HeadNorms { query: weights(&query), key: weights(&key) };
        let input = inner(&qkv);
        let forward = QkvNormForward { qkv: input.clone(), heads, norms: norms.clone() };
        let forward = qkv_norm_forward::<B>(Checked::new(forward));
        let nodes = [primitive(qkv).node, primitive(query.gamma).node, primitive(key.gamma).node];
        let output = primitive(forward.output);
        float(match QkvNormNode(Forward::current()).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => {
                let inverse_deviation = forward.inverse_deviation;
                node.finish(State { qkv: input, inverse_deviation, heads, norms }, output)
            }
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }
}
