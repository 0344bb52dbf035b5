//! Attention in the graph: query, key, value, output and log-sum-exp are saved, never the
//! probabilities.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;

use super::{
    AttentionBackward, AttentionForward, AttentionMask, AttentionOps, AttentionOptions, AttentionOutput,
    QkvAttentionBackward, QkvAttentionForward, SinkAttention, attention_backward, attention_forward, packed_call,
    qkv_attention_backward, qkv_attention_forward, sinks,
};
use crate::autodiff::{inner, inner_int};
use crate::checked::Checked;
use crate::packed_heads::PackedHeads;
use crate::products::Forward;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

#[derive(Debug)]
struct AttentionNode(Forward);

#[derive(Clone, Debug)]
struct State<B: AttentionOps> {
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    saved: AttentionOutput<B>,
    mask: AttentionMask<B>,
    options: AttentionOptions,
}

impl<B: AttentionOps> Backward<B, 3> for AttentionNode {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let State { query, key, value, saved, mask, options } = ops.state;
        let _forward = self.0.enter();
        let _op = recorder::op("attention backward", || backward_call([&query, &key, &value], &mask));
        let operands = AttentionBackward { grad, query, key, value, saved, mask, options };
        let gradients = attention_backward::<B>(Checked::new(operands));
        let gradients = [gradients.query, gradients.key, gradients.value];
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, primitive(gradient));
            }
        }
    }
}

/// Bytes and FLOP of the gradients of query, key and value.
fn backward_call<B: AttentionOps>([query, key, value]: [&Tensor<B, 4>; 3], mask: &AttentionMask<B>) -> Call {
    let inputs = [query, key, value].map(recorder::operand);
    let written = inputs.iter().map(|input| input.bytes()).sum::<u64>() + 2 * inputs[0].bytes();
    let [batch_size, n_heads, queries, head_dim] = query.dims();
    let flops = mask.products(5, [batch_size, n_heads, queries, key.dims()[2], head_dim]);
    Call::reads(inputs).and(written).computes(flops)
}

/// Parents `[query, key, value, sinks]`.
#[derive(Debug)]
struct SinkAttentionNode(Forward);

impl<B: AttentionOps> Backward<B, 4> for SinkAttentionNode {
    /// The saved results are those with sinks.
    type State = (State<B>, Tensor<B, 1>);

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let (State { query, key, value, saved, mask, options }, sinks) = ops.state;
        let _forward = self.0.enter();
        let _op = recorder::op("sink_attention backward", || backward_call([&query, &key, &value], &mask));
        let [q, k, v, sink] = ops.parents.map(|parent| parent.map(|node| node.id));
        if let Some(node) = sink {
            grads.register::<B>(node, primitive(sinks::gradient(&grad, &saved, sinks)));
        }
        let operands = AttentionBackward { grad, query, key, value, saved, mask, options };
        let gradients = attention_backward::<B>(Checked::new(operands));
        for (node, gradient) in [q, k, v].into_iter().zip([gradients.query, gradients.key, gradients.value]) {
            if let Some(node) = node {
                grads.register::<B>(node, primitive(gradient));
            }
        }
    }
}

/// The node of attention over packed heads: one parent, one gradient.
#[derive(Debug)]
struct QkvAttentionNode(Forward);

#[derive(Clone, Debug)]
struct PackedState<B: AttentionOps> {
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    saved: AttentionOutput<B>,
    mask: AttentionMask<B>,
    options: AttentionOptions,
}

impl<B: AttentionOps> Backward<B, 1> for QkvAttentionNode {
    type State = PackedState<B>;

    fn backward(self, ops: Ops<PackedState<B>, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let PackedState { qkv, heads, saved, mask, options } = ops.state;
        let _forward = self.0.enter();
        let _op = recorder::op("qkv_attention backward", || packed_call(&qkv, heads, &mask, true));
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let operands = QkvAttentionBackward { grad: float(grad), qkv, heads, saved, mask, options };
            primitive(qkv_attention_backward::<B>(Checked::new(operands)))
        });
    }
}

/// The inner backend's view of a mask.
fn inner_mask<B: AttentionOps, C: CheckpointStrategy>(mask: AttentionMask<Autodiff<B, C>>) -> AttentionMask<B> {
    match mask {
        AttentionMask::None => AttentionMask::None,
        AttentionMask::Causal { window } => AttentionMask::Causal { window },
        AttentionMask::Positions { positions, window } => {
            AttentionMask::Positions { positions: inner_int(positions), window }
        }
        AttentionMask::Lengths(lengths) => AttentionMask::Lengths(inner_int(lengths)),
        AttentionMask::Documents { starts, window } => AttentionMask::Documents { starts: inner_int(starts), window },
        AttentionMask::Ranges(ranges) => AttentionMask::Ranges(inner_int(ranges)),
    }
}

impl<B: AttentionOps, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn attention(operands: Checked<AttentionForward<Self>>) -> Tensor<Self, 4> {
        let _products = operands.products().enter();
        let AttentionForward { query, key, value, mask, options } = operands.into_inner();
        let mask = inner_mask(mask);
        let forward = AttentionForward {
            query: inner(&query),
            key: inner(&key),
            value: inner(&value),
            mask: mask.clone(),
            options,
        };
        let (q, k, v) = (forward.query.clone(), forward.key.clone(), forward.value.clone());
        let saved = attention_forward::<B>(Checked::new(forward));
        let output = primitive(saved.output.clone());
        let state = State { query: q, key: k, value: v, saved, mask, options };
        let nodes = [primitive(query).node, primitive(key).node, primitive(value).node];
        float(match AttentionNode(Forward::current()).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(state, output),
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }

    fn sink_attention(operands: Checked<SinkAttention<Self>>) -> Tensor<Self, 4> {
        let _products = operands.products().enter();
        let SinkAttention { query, key, value, sinks: own, mask, options } = operands.into_inner();
        let mask = inner_mask(mask);
        let [q, k, v] = [&query, &key, &value].map(inner);
        let forward = SinkAttention {
            query: q.clone(),
            key: k.clone(),
            value: v.clone(),
            sinks: inner(&own),
            mask: mask.clone(),
            options,
        };
        let sinks = forward.sinks.clone();
        let saved = sinks::forward::<B>(Checked::new(forward).into_inner());
        let output = primitive(saved.output.clone());
        let state = (State { query: q, key: k, value: v, saved, mask, options }, sinks);
        let nodes = [primitive(query).node, primitive(key).node, primitive(value).node, primitive(own).node];
        float(match SinkAttentionNode(Forward::current()).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(state, output),
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }

    fn qkv_attention(operands: Checked<QkvAttentionForward<Self>>) -> Tensor<Self, 4> {
        let _products = operands.products().enter();
        let QkvAttentionForward { qkv, heads, mask, options } = operands.into_inner();
        let (mask, input) = (inner_mask(mask), inner(&qkv));
        let forward = QkvAttentionForward { qkv: input.clone(), heads, mask: mask.clone(), options };
        let saved = qkv_attention_forward::<B>(Checked::new(forward));
        let output = primitive(saved.output.clone());
        let state = PackedState { qkv: input, heads, saved, mask, options };
        float(
            match QkvAttentionNode(Forward::current()).prepare::<C>([primitive(qkv).node]).compute_bound().stateful() {
                OpsKind::Tracked(node) => node.finish(state, output),
                OpsKind::UnTracked(node) => node.finish(output),
            },
        )
    }
}
