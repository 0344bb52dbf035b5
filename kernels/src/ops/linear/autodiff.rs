//! Projections in the graph, with what stands behind them; a norm before them is a node of its own.
//! A bias or residual that is not there stands as an untracked tensor.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;

use super::{LinearBackward, LinearForward, LinearOps, Saved, Wanted, linear_backward, linear_forward, normed};
use crate::autodiff::{inner, inner_weight, is_tracked, take_sum};
use crate::checked::Checked;
use crate::ops::activation::Activation;
use crate::ops::dropout::Dropout;
use crate::products::Forward;
use crate::quant::Weight;
use crate::recorder::{self, Call};
use crate::tensor::{float, primitive};

/// Parents `[x, weight, bias, residual]`.
#[derive(Debug)]
struct LinearNode(Forward);

#[derive(Clone, Debug)]
struct State<B: LinearOps> {
    /// The operation that the backward pass is recorded as.
    name: &'static str,
    /// The input, if the weight is trained.
    x: Option<Tensor<B, 2>>,
    weight: Weight<B>,
    bias: Option<Tensor<B, 1>>,
    activation: Option<(Activation, Saved<B>)>,
    dropout: Option<Dropout>,
}

impl<B: LinearOps> Backward<B, 4> for LinearNode {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let sum = ops.state.x.as_ref().and_then(|x| take_sum(&ops, 1, x, grads));
        let grad = float(grad);
        let State { name, x, weight, bias, activation, dropout } = ops.state;
        let _forward = self.0.enter();
        let [x_node, weight_node, bias_node, residual_node] = ops.parents.map(|parent| parent.map(|node| node.id));
        let wanted = Wanted { weight: weight_node.is_some(), bias: bias_node.is_some() };
        let _op = recorder::op(name, || {
            let ([rows, _], [d_output, d_input]) = (grad.dims(), weight.dims());
            // A sum is read, too.
            let table = if wanted.weight { d_output * d_input * if sum.is_some() { 8 } else { 4 } } else { 0 };
            let written = rows * (d_input + d_output) * grad.dtype().size() + table;
            let input = recorder::operand(x.as_ref().unwrap_or(&grad));
            let call = Call::reads([input, weight.operand()]).and(written as u64);
            let products = if wanted.weight { 2 } else { 1 };
            call.computes(2 * products * (rows * d_input * d_output) as u64)
        });
        if let Some(node) = residual_node {
            grads.register::<B>(node, primitive(grad.clone()));
        }
        let operands = LinearBackward { grad, x, weight, bias, wanted, activation, dropout, sum };
        let gradients = linear_backward::<B>(Checked::new(operands));
        if let Some(node) = x_node {
            grads.register::<B>(node, primitive(gradients.x));
        }
        if let (Some(node), Some(weight)) = (weight_node, gradients.weight) {
            grads.register::<B>(node, primitive(weight));
        }
        if let (Some(node), Some(bias)) = (bias_node, gradients.bias) {
            grads.register::<B>(node, primitive(bias));
        }
    }
}

impl<B: LinearOps, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
    fn linear(operands: Checked<LinearForward<Self>>) -> Tensor<Self, 2> {
        let _products = operands.products().enter();
        let name = match operands.op() {
            "norm_gate_up" => "norm_gate_up backward",
            "linear_add" => "linear_add backward",
            _ => "linear backward",
        };
        let LinearForward { x, weight, bias, activation, dropout, residual, .. } = normed(operands.into_inner());
        let (input, (weight, parameter)) = (inner(&x), inner_weight(weight, x.dtype()));
        let shift = bias.as_ref().map(inner);
        let forward = linear_forward::<B>(Checked::new(LinearForward {
            activation,
            dropout,
            residual: residual.as_ref().map(inner),
            keeps: true,
            ..LinearForward::new(input.clone(), weight.clone(), shift.clone())
        }));
        let trained = parameter.as_ref().is_some_and(is_tracked);
        let untracked = || primitive(Tensor::<Self, 2>::from_inner(input.clone())).node;
        let nodes = [
            primitive(x).node,
            parameter.map_or_else(untracked, |weight| primitive(weight).node),
            bias.map_or_else(untracked, |bias| primitive(bias).node),
            residual.map_or_else(untracked, |residual| primitive(residual).node),
        ];
        let output = primitive(forward.output);
        let activation = activation.zip(forward.saved);
        // A frozen weight has no gradient, which alone needs the input.
        let x = trained.then_some(input);
        float(match LinearNode(Forward::current()).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(State { name, x, weight, bias: shift, activation, dropout }, output),
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }
}
