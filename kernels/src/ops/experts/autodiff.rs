//! Mixtures of experts in the graph. A missing bias is an untracked tensor.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::{Int, Tensor};

use super::{
    ChooseExperts, ExpertLoads, ExpertsBackward, ExpertsForward, ExpertsLayer, ExpertsOps, experts_backward,
    experts_forward,
};
use crate::autodiff::{inner, inner_int, inner_weight, take_sum};
use crate::checked::Checked;
use crate::ops::linear::Wanted;
use crate::products::Forward;
use crate::recorder;
use crate::tensor::{float, primitive};

/// Parents `[x, weights, up, up_bias, down, down_bias]`.
#[derive(Debug)]
struct ExpertsNode(Forward);

#[derive(Clone, Debug)]
struct State<B: ExpertsOps> {
    x: Tensor<B, 2>,
    chosen: Tensor<B, 2, Int>,
    weights: Tensor<B, 2>,
    inner: Tensor<B, 2>,
    layer: ExpertsLayer<B>,
}

impl<B: ExpertsOps> Backward<B, 6> for ExpertsNode {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 6>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad = float(grads.consume::<B>(&ops.node));
        let sums = [2, 4].map(|parent| take_sum(&ops, parent, &ops.state.x, grads));
        let wanted = [2, 4]
            .map(|weight| Wanted { weight: ops.parents[weight].is_some(), bias: ops.parents[weight + 1].is_some() });
        let State { x, chosen, weights, inner, layer } = ops.state;
        let nodes = ops.parents.map(|parent| parent.map(|node| node.id));
        let _forward = self.0.enter();
        let operands = Checked::new(ExpertsBackward { grad, x, chosen, weights, inner, layer, wanted, sums });
        let _op = recorder::op("experts backward", || operands.call());
        let gradients = experts_backward::<B>(operands);
        let matrices = [Some(gradients.x), Some(gradients.weights), gradients.up, gradients.down];
        for (node, gradient) in [0, 1, 2, 4].into_iter().zip(matrices) {
            if let (Some(node), Some(gradient)) = (nodes[node], gradient) {
                grads.register::<B>(node, primitive(gradient));
            }
        }
        for (node, gradient) in [3, 5].into_iter().zip([gradients.up_bias, gradients.down_bias]) {
            if let (Some(node), Some(gradient)) = (nodes[node], gradient) {
                grads.register::<B>(node, primitive(gradient));
            }
        }
    }
}

impl<B: ExpertsOps, C: CheckpointStrategy> ExpertsOps for Autodiff<B, C> {
    fn experts(operands: Checked<ExpertsForward<Self>>) -> Tensor<Self, 2> {
        let _products = operands.products().enter();
        let ExpertsForward { x, chosen, weights, layer, .. } = operands.into_inner();
        let ExpertsLayer { up, up_bias, activation, limit, down, down_bias } = layer;
        let [(up, up_parameter), (down, down_parameter)] = [up, down].map(|weight| inner_weight(weight, x.dtype()));
        let shift = |bias: &Option<Tensor<Self, 1>>| bias.as_ref().map(inner);
        let layer =
            ExpertsLayer { up, up_bias: shift(&up_bias), activation, limit, down, down_bias: shift(&down_bias) };
        let input = inner(&x);
        let forward = ExpertsForward {
            x: input.clone(),
            chosen: inner_int(chosen),
            weights: inner(&weights),
            layer: layer.clone(),
            keeps: true,
        };
        let (chosen, own_weights) = (forward.chosen.clone(), forward.weights.clone());
        let forward = experts_forward::<B>(Checked::new(forward));
        let untracked = || primitive(Tensor::<Self, 2>::from_inner(input.clone())).node;
        let of_weight = |weight: Option<Tensor<Self, 2>>| weight.map_or_else(untracked, |it| primitive(it).node);
        let of_bias = |bias: Option<Tensor<Self, 1>>| bias.map_or_else(untracked, |bias| primitive(bias).node);
        let nodes = [
            primitive(x).node,
            primitive(weights).node,
            of_weight(up_parameter),
            of_bias(up_bias),
            of_weight(down_parameter),
            of_bias(down_bias),
        ];
        let output = primitive(forward.output);
        let saved = forward.inner.expect("a forward pass that keeps saves what the activation gets");
        float(match ExpertsNode(Forward::current()).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(node) => {
                node.finish(State { x: input, chosen, weights: own_weights, inner: saved, layer }, output)
            }
            OpsKind::UnTracked(node) => node.finish(output),
        })
    }

    fn choose_experts(operands: Checked<ChooseExperts<Self>>) -> Tensor<Self, 2, Int> {
        let ChooseExperts { scores, k } = operands.into_inner();
        Tensor::from_primitive(
            B::choose_experts(Checked::new(ChooseExperts { scores: inner(&scores), k })).into_primitive(),
        )
    }

    fn expert_loads(operands: Checked<ExpertLoads<Self>>) -> Tensor<Self, 1> {
        let ExpertLoads { chosen, n_experts } = operands.into_inner();
        Tensor::from_inner(B::expert_loads(Checked::new(ExpertLoads { chosen: inner_int(chosen), n_experts })))
    }
}
