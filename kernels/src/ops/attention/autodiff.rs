//! Attention in the graph: query, key, value, output and log-sum-exp are kept, never the probabilities.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;

use super::{AttentionMask, AttentionOptions, AttentionOutput};
use crate::autodiff::{float, inner, inner_int, primitive};
use crate::{Backend, PackedHeads, recorder};

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

/// The node of attention over packed heads: one parent, one gradient.
#[derive(Debug)]
struct QkvAttentionNode;

#[derive(Clone, Debug)]
struct PackedState<B: Backend> {
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    saved: AttentionOutput<B>,
    mask: AttentionMask<B>,
    options: AttentionOptions,
}

impl<B: Backend> Backward<B, 1> for QkvAttentionNode {
    type State = PackedState<B>;

    fn backward(self, ops: Ops<PackedState<B>, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let PackedState { qkv, heads, saved, mask, options } = ops.state;
        let _op = recorder::op("qkv_attention backward", || vec![recorder::operand(&qkv)]);
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            primitive(B::qkv_attention_backward(float(grad), qkv, heads, saved, &mask, options))
        });
    }
}

/// The wrapped backend's view of a mask.
fn inner_mask<B: Backend, C: CheckpointStrategy>(mask: &AttentionMask<Autodiff<B, C>>) -> AttentionMask<B> {
    match mask.clone() {
        AttentionMask::None => AttentionMask::None,
        AttentionMask::Causal { window } => AttentionMask::Causal { window },
        AttentionMask::Positions { positions, window } => {
            AttentionMask::Positions { positions: inner_int(positions), window }
        }
        AttentionMask::Lengths(lengths) => AttentionMask::Lengths(inner_int(lengths)),
    }
}

pub(crate) fn qkv_attention<B: Backend, C: CheckpointStrategy>(
    qkv: Tensor<Autodiff<B, C>, 3>,
    heads: PackedHeads,
    mask: &AttentionMask<Autodiff<B, C>>,
    options: AttentionOptions,
) -> Tensor<Autodiff<B, C>, 4> {
    let (mask, input) = (inner_mask(mask), inner(&qkv));
    let saved = B::qkv_attention_forward(input.clone(), heads, &mask, options);
    let output = primitive(saved.output.clone());
    let state = PackedState { qkv: input, heads, saved, mask, options };
    float(match QkvAttentionNode.prepare::<C>([primitive(qkv).node]).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(state, output),
        OpsKind::UnTracked(node) => node.finish(output),
    })
}

pub(crate) fn attention<B: Backend, C: CheckpointStrategy>(
    query: Tensor<Autodiff<B, C>, 4>,
    key: Tensor<Autodiff<B, C>, 4>,
    value: Tensor<Autodiff<B, C>, 4>,
    mask: &AttentionMask<Autodiff<B, C>>,
    options: AttentionOptions,
) -> Tensor<Autodiff<B, C>, 4> {
    let mask = inner_mask(mask);
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
