//! Feed-forward layers in the graph; a norm before them is a separate node. A missing bias is an
//! untracked tensor.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{
    FeedForwardBackward, FeedForwardForward, FeedForwardLayer, FeedForwardOps, feed_forward_backward,
    feed_forward_forward,
};
use crate::autodiff::{inner, inner_weight, is_tracked, take_sum};
use crate::checked::Checked;
use crate::ops::dropout::Dropout;
use crate::ops::linear::{Saved, Wanted};
use crate::ops::norm::norm_rows;
use crate::products::Forward;
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

/// Parents `[x, up, up_bias, down, down_bias, residual]`; without a norm `x` is the residual.
#[derive(Debug)]
struct FeedForwardNode(Forward);

#[derive(Clone, Debug)]
struct State<B: FeedForwardOps> {
    /// The input, if `up` is trained.
    x: Option<Tensor<B, 2>>,
    saved: Saved<B>,
    /// The input of `down`, if that is trained.
    hidden: Option<Tensor<B, 2>>,
    layer: FeedForwardLayer<B>,
    dropout: Option<Dropout>,
}

impl<B: FeedForwardOps> State<B> {
    /// Four products: the requested gradients of two weights, and two gradients of their inputs.
    /// The gradient before the activation is written, and read twice; earlier sums are read, too.
    fn call(&self, sums: &[Option<Tensor<B, 2>>; 2], wanted: [Wanted; 2]) -> Call {
        let FeedForwardLayer { up, down, .. } = &self.layer;
        let saved = self.saved.tensor();
        let ([rows, _], [width, d_model], [_, d_ff]) = (saved.dims(), up.dims(), down.dims());
        let bytes = saved.dtype().size();
        let of_tables = [up, down].into_iter().zip(sums).zip(wanted).filter(|(_, wanted)| wanted.weight);
        let table = |weight: &Weight<B>| weight.dims().iter().product::<usize>();
        let tables: usize = of_tables.map(|((weight, sum), _)| table(weight) * if sum.is_some() { 8 } else { 4 }).sum();
        let moved = rows * (2 * d_model + 3 * width) * bytes + tables;
        let kept = [self.x.as_ref(), Some(saved), self.hidden.as_ref()];
        let kept = kept.into_iter().flatten().map(recorder::operand);
        let inputs: Vec<_> = kept.chain([up.operand(), down.operand()]).collect();
        let call = Call::reads(inputs).and(moved as u64);
        let products = wanted.map(|wanted| if wanted.weight { 2 } else { 1 });
        call.computes(2 * (rows * d_model * (products[0] * width + products[1] * d_ff)) as u64)
    }
}

impl<B: FeedForwardOps> Backward<B, 6> for FeedForwardNode {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 6>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let sums = [1, 3].map(|parent| take_sum(&ops, parent, ops.state.saved.tensor(), grads));
        let wanted = [1, 3]
            .map(|weight| Wanted { weight: ops.parents[weight].is_some(), bias: ops.parents[weight + 1].is_some() });
        let _forward = self.0.enter();
        let _op = recorder::op("feed_forward backward", || ops.state.call(&sums, wanted));
        let State { x, saved, hidden, layer, dropout } = ops.state;
        let nodes = ops.parents.map(|parent| parent.map(|node| node.id));
        if let Some(node) = nodes[5] {
            grads.register::<B>(node, grad.clone());
        }
        let grad = float(grad);
        let operands = FeedForwardBackward { grad, x, saved, hidden, layer, wanted, dropout, sums };
        let gradients = feed_forward_backward::<B>(Checked::new(operands));
        if let Some(node) = nodes[0] {
            grads.register::<B>(node, primitive(gradients.x));
        }
        for (node, gradient) in [nodes[1], nodes[3]].into_iter().zip([gradients.up, gradients.down]) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node, primitive(gradient));
            }
        }
        for (node, gradient) in [nodes[2], nodes[4]].into_iter().zip([gradients.up_bias, gradients.down_bias]) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node, primitive(gradient));
            }
        }
    }
}

impl<B: FeedForwardOps, C: CheckpointStrategy> FeedForwardOps for Autodiff<B, C> {
    fn feed_forward(operands: Checked<FeedForwardForward<Self>>) -> Tensor<Self, 2> {
        let _products = operands.products().enter();
        let FeedForwardForward { x, norm, residual, layer, dropout } = operands.into_inner();
        let FeedForwardLayer { up, up_bias, activation, down, down_bias } = layer;
        let x = match norm {
            Some(norm) => norm_rows(x, norm),
            None => x,
        };
        let input = inner(&x);
        let [(up, up_parameter), (down, down_parameter)] = [up, down].map(|weight| inner_weight(weight, x.dtype()));
        let shift = |bias: &Option<Tensor<Self, 1>>| bias.as_ref().map(inner);
        let layer = FeedForwardLayer { up, up_bias: shift(&up_bias), activation, down, down_bias: shift(&down_bias) };
        let forward = feed_forward_forward::<B>(Checked::new(FeedForwardForward {
            x: input.clone(),
            norm: None,
            residual: inner(&residual),
            layer: layer.clone(),
            dropout,
        }));
        let trained = [&up_parameter, &down_parameter].map(|weight| weight.as_ref().is_some_and(is_tracked));
        let untracked = || primitive(Tensor::<Self, 2>::from_inner(input.clone())).node;
        let of_weight = |weight: Option<Tensor<Self, 2>>| weight.map_or_else(untracked, |it| primitive(it).node);
        let of_bias = |bias: Option<Tensor<Self, 1>>| bias.map_or_else(untracked, |bias| primitive(bias).node);
        let nodes = [
            primitive(x).node,
            of_weight(up_parameter),
            of_bias(up_bias),
            of_weight(down_parameter),
            of_bias(down_bias),
            primitive(residual).node,
        ];
        let output = primitive(forward.output);
        let part = Forward::current();
        float(match FeedForwardNode(part).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => {
                let [up, down] = trained;
                let (x, hidden) = (up.then_some(input), down.then_some(forward.hidden));
                node.finish(State { x, saved: forward.saved, hidden, layer, dropout }, output)
            }
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }
}
