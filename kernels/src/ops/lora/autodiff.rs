//! Projections with adapters in the graph. A missing residual is an untracked tensor.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{LoraBackward, LoraForward, LoraLayer, LoraOps, LoraWanted, lora_backward, lora_forward, projections};
use crate::autodiff::{inner, inner_weight, is_tracked, take_sum};
use crate::checked::Checked;
use crate::ops::linear::Saved;
use crate::products::Forward;
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

/// Parents `[x, a, b, residual]`.
#[derive(Debug)]
struct LoraNode(Forward);

#[derive(Clone, Debug)]
struct State<B: LoraOps> {
    x: Tensor<B, 2>,
    inner: Tensor<B, 2>,
    layer: LoraLayer<B>,
    saved: Option<Saved<B>>,
}

impl<B: LoraOps> State<B> {
    /// The products that are wanted: one of the weight and two of each matrix of the adapter, at most.
    /// The outputs' gradient is read with the weight and twice with `b`.
    fn call(&self, wanted: LoraWanted) -> Call {
        let LoraLayer { weight, a, b, .. } = &self.layer;
        let ([rows, d_input], [d_output, _], [rank, _]) = (self.x.dims(), weight.dims(), a.dims());
        let grad = rows * self.layer.outputs() * self.x.dtype().size();
        let kept = [&self.x, &self.inner].into_iter().chain(self.saved.as_ref().map(Saved::tensor));
        let inputs = kept.map(recorder::operand).chain([weight.operand(), a.operand(), b.operand()]);
        let written = rows * d_input * self.x.dtype().size() + 4 * rank * (d_input + d_output);
        let of_x = if wanted.x { d_input * (d_output + rank) } else { 0 };
        let products = of_x + usize::from(wanted.a) * rank * d_input + (1 + usize::from(wanted.b)) * rank * d_output;
        Call::reads(inputs.collect::<Vec<_>>()).and((3 * grad + written) as u64).computes((2 * rows * products) as u64)
    }
}

impl<B: LoraOps> Backward<B, 4> for LoraNode {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let sums = [1, 2].map(|parent| take_sum(&ops, parent, &ops.state.x, grads));
        let _forward = self.0.enter();
        let wanted = [0, 1, 2].map(|parent: usize| ops.parents[parent].is_some());
        let wanted = LoraWanted { x: wanted[0], a: wanted[1], b: wanted[2] };
        let _op = recorder::op("lora backward", || ops.state.call(wanted));
        let State { x, inner, layer, saved } = ops.state;
        let [x_node, a_node, b_node, residual_node] = ops.parents.map(|parent| parent.map(|node| node.id));
        if let Some(node) = residual_node {
            grads.register::<B>(node, grad.clone());
        }
        let operands = LoraBackward { grad: float(grad), x, inner, layer, saved, wanted, sums };
        let gradients = lora_backward::<B>(Checked::new(operands));
        for (node, gradient) in [(x_node, gradients.x), (a_node, gradients.a), (b_node, gradients.b)] {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node, primitive(gradient));
            }
        }
    }
}

impl<B: LoraOps, C: CheckpointStrategy> LoraOps for Autodiff<B, C> {
    fn lora(operands: Checked<LoraForward<Self>>) -> Tensor<Self, 2> {
        let _products = operands.products().enter();
        let operands = operands.into_inner();
        let LoraLayer { weight, bias, .. } = &operands.layer;
        let trained = |weight: &Weight<Self>| matches!(weight, Weight::Float(weight) if is_tracked(weight));
        if trained(weight) || bias.as_ref().is_some_and(is_tracked) {
            return projections::separate(operands);
        }
        let LoraForward { x, layer, residual, .. } = operands;
        let LoraLayer { weight, bias, a, b, scale, activation } = layer;
        let input = inner(&x);
        let [(weight, _), (a, a_parameter), (b, b_parameter)] =
            [weight, a, b].map(|weight| inner_weight(weight, x.dtype()));
        let layer = LoraLayer { weight, bias: bias.as_ref().map(inner), a, b, scale, activation };
        let forward = lora_forward::<B>(Checked::new(LoraForward {
            x: input.clone(),
            layer: layer.clone(),
            residual: residual.as_ref().map(inner),
            keeps: true,
        }));
        let untracked = || primitive(Tensor::<Self, 2>::from_inner(input.clone())).node;
        let node = |tensor: Option<Tensor<Self, 2>>| tensor.map_or_else(untracked, |tensor| primitive(tensor).node);
        let nodes = [primitive(x).node, node(a_parameter), node(b_parameter), node(residual)];
        let output = primitive(forward.output);
        float(match LoraNode(Forward::current()).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => {
                let state = State { x: input, inner: forward.inner, layer, saved: forward.saved };
                node.finish(state, output)
            }
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }
}
