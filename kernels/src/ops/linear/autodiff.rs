//! Projections in the graph, alone and with what stands behind them. An absent bias stands as an untracked tensor.

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;
use burn::tensor::ops::FloatTensor;

use super::LinearGradients;
use crate::autodiff::{float, inner, primitive};
use crate::{Activation, Backend, Dropout, recorder};

/// Parents `[x, weight, bias]`.
#[derive(Debug)]
struct LinearNode;

/// Parents `[x, weight, bias, residual]`.
#[derive(Debug)]
struct LinearAddNode;

/// Parents `[x, weight, bias]`.
#[derive(Debug)]
struct LinearActivateNode;

#[derive(Clone, Debug)]
struct State<B: Backend, T> {
    x: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    more: T,
}

impl<B: Backend> Backward<B, 3> for LinearNode {
    /// Whether there is a bias.
    type State = State<B, bool>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let State { x, weight, more: has_bias } = ops.state;
        let _op = recorder::op("linear backward", || vec![recorder::operand(&x), recorder::operand(&weight)]);
        let parents = ops.parents.map(|parent| parent.map(|node| node.id));
        register(parents, B::linear_backward(grad, x, weight, has_bias), grads);
    }
}

impl<B: Backend> Backward<B, 4> for LinearAddNode {
    type State = State<B, (bool, Option<Dropout>)>;

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let State { x, weight, more: (has_bias, dropout) } = ops.state;
        let _op = recorder::op("linear_add backward", || vec![recorder::operand(&x), recorder::operand(&weight)]);
        let [x_node, weight_node, bias, residual] = ops.parents.map(|parent| parent.map(|node| node.id));
        if let Some(node) = residual {
            grads.register::<B>(node, grad.clone());
        }
        let gradients = B::linear_add_backward(float(grad), x, weight, has_bias, dropout);
        register([x_node, weight_node, bias], gradients, grads);
    }
}

impl<B: Backend> Backward<B, 3> for LinearActivateNode {
    /// The bias, what the forward pass saved, and the activation.
    type State = State<B, (Option<Tensor<B, 1>>, Tensor<B, 2>, Activation)>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let State { x, weight, more: (bias, saved, activation) } = ops.state;
        let _op = recorder::op("norm_gate_up backward", || vec![recorder::operand(&x), recorder::operand(&weight)]);
        let gradients = B::linear_activate_backward(grad, x, weight, bias, saved, activation);
        register(ops.parents.map(|parent| parent.map(|node| node.id)), gradients, grads);
    }
}

fn register<B: Backend>(parents: [Option<NodeId>; 3], gradients: LinearGradients<B>, grads: &mut Gradients) {
    let [x, weight, bias] = parents;
    if let Some(node) = x {
        grads.register::<B>(node, primitive(gradients.x));
    }
    if let Some(node) = weight {
        grads.register::<B>(node, primitive(gradients.weight));
    }
    if let (Some(node), Some(bias)) = (bias, gradients.bias) {
        grads.register::<B>(node, primitive(bias));
    }
}

/// The weight in the dtype of the input, cast once for the forward and the backward pass.
fn cast<B: Backend, C: CheckpointStrategy>(
    weight: &Tensor<Autodiff<B, C>, 2>,
    x: &Tensor<Autodiff<B, C>, 2>,
) -> Tensor<B, 2> {
    inner(weight).cast(x.dtype())
}

/// A bias in the graph, or something untracked where there is none.
fn bias_or_untracked<B: Backend, C: CheckpointStrategy>(
    bias: Option<Tensor<Autodiff<B, C>, 1>>,
    weight: &Tensor<B, 2>,
) -> FloatTensor<Autodiff<B, C>> {
    match bias {
        Some(bias) => primitive(bias),
        None => primitive(Tensor::<Autodiff<B, C>, 2>::from_inner(weight.clone())),
    }
}

pub(crate) fn linear<B: Backend, C: CheckpointStrategy>(
    x: Tensor<Autodiff<B, C>, 2>,
    weight: Tensor<Autodiff<B, C>, 2>,
    bias: Option<Tensor<Autodiff<B, C>, 1>>,
) -> Tensor<Autodiff<B, C>, 2> {
    let state = State { x: inner(&x), weight: cast(&weight, &x), more: bias.is_some() };
    let output = B::linear_forward(state.x.clone(), state.weight.clone(), bias.as_ref().map(inner));
    let nodes = [primitive(x).node, primitive(weight).node, bias_or_untracked(bias, &state.weight).node];
    float(match LinearNode.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(state, primitive(output)),
        OpsKind::UnTracked(node) => node.finish(primitive(output)),
    })
}

pub(crate) fn linear_add<B: Backend, C: CheckpointStrategy>(
    x: Tensor<Autodiff<B, C>, 2>,
    weight: Tensor<Autodiff<B, C>, 2>,
    bias: Option<Tensor<Autodiff<B, C>, 1>>,
    dropout: Option<Dropout>,
    residual: Tensor<Autodiff<B, C>, 2>,
) -> Tensor<Autodiff<B, C>, 2> {
    let state = State { x: inner(&x), weight: cast(&weight, &x), more: (bias.is_some(), dropout) };
    let (input, product) = (state.x.clone(), state.weight.clone());
    let output = B::linear_add_forward(input, product, bias.as_ref().map(inner), dropout, inner(&residual));
    let bias = bias_or_untracked(bias, &state.weight).node;
    let nodes = [primitive(x).node, primitive(weight).node, bias, primitive(residual).node];
    float(match LinearAddNode.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(state, primitive(output)),
        OpsKind::UnTracked(node) => node.finish(primitive(output)),
    })
}

pub(crate) fn linear_activate<B: Backend, C: CheckpointStrategy>(
    x: Tensor<Autodiff<B, C>, 2>,
    weight: Tensor<Autodiff<B, C>, 2>,
    bias: Option<Tensor<Autodiff<B, C>, 1>>,
    activation: Activation,
) -> Tensor<Autodiff<B, C>, 2> {
    let (input, matrix, shift) = (inner(&x), cast(&weight, &x), bias.as_ref().map(inner));
    let forward = B::linear_activate_forward(input.clone(), matrix.clone(), shift.clone(), activation);
    let nodes = [primitive(x).node, primitive(weight).node, bias_or_untracked(bias, &matrix).node];
    let state = State { x: input, weight: matrix, more: (shift, forward.saved, activation) };
    float(match LinearActivateNode.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(node) => node.finish(state, primitive(forward.output)),
        OpsKind::UnTracked(node) => node.finish(primitive(forward.output)),
    })
}
