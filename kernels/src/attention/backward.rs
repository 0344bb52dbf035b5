//! Attention in the graph: query, key, value, output and log-sum-exp are kept, never the probabilities.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{AttentionMask, AttentionOptions, AttentionOutput};
use crate::Backend;
use crate::autodiff::{float, inner, inner_int, primitive};
use crate::recorder;

#[derive(Debug)]
struct AttentionNode;

#[derive(Clone, Debug)]
struct State<B: Backend> {
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    saved: AttentionOutput<B>,
    mask: AttentionMask<B>,
    options: AttentionOptions,
}

impl<B: Backend> Backward<B, 3> for AttentionNode {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let State { query, key, value, saved, mask, options } = ops.state;
        let _op = recorder::op("attention backward", || {
            vec![recorder::operand(&query), recorder::operand(&key), recorder::operand(&value)]
        });
        let gradients = B::attention_backward(grad, query, key, value, saved, &mask, options);
        let gradients = [gradients.query, gradients.key, gradients.value];
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, primitive(gradient));
            }
        }
    }
}

pub(crate) fn attention<B: Backend, C: CheckpointStrategy>(
    query: Tensor<Autodiff<B, C>, 4>,
    key: Tensor<Autodiff<B, C>, 4>,
    value: Tensor<Autodiff<B, C>, 4>,
    mask: &AttentionMask<Autodiff<B, C>>,
    options: AttentionOptions,
) -> Tensor<Autodiff<B, C>, 4> {
    let mask = match mask.clone() {
        AttentionMask::None => AttentionMask::None,
        AttentionMask::Causal { window } => AttentionMask::Causal { window },
        AttentionMask::Positions { positions, window } => {
            AttentionMask::Positions { positions: inner_int(positions), window }
        }
        AttentionMask::Lengths(lengths) => AttentionMask::Lengths(inner_int(lengths)),
    };
    let (q, k, v) = (inner(&query), inner(&key), inner(&value));
    let saved = B::attention_forward(q.clone(), k.clone(), v.clone(), &mask, options);
    let output = primitive(saved.output.clone());
    let state = State { query: q, key: k, value: v, saved, mask, options };
    let nodes = [primitive(query).node, primitive(key).node, primitive(value).node];
    float(match AttentionNode.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(state, output),
        OpsKind::UnTracked(node) => node.finish(output),
    })
}
