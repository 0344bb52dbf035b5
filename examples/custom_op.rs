//! A custom operation with its gradient: fused on the CPU, from Burn's basic operations elsewhere,
//! and a check of both. `cargo run --release --example custom_op`.
//!
//! The operation is the squared ReLU of So et al. (2021, "Primer"): `max(x, 0)^2`, whose gradient
//! is `2 max(x, 0)`.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::{Autodiff, NdArray};
use burn::tensor::{Distribution, Tensor, TensorData, TensorPrimitive, Tolerance};
use fireclay_kernels::{Backend, recorder};

/// The operation on a backend: the default methods are the reference, which a backend may override.
trait SquaredReluOps: Backend {
    fn forward(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x.clamp_min(0.0).powi_scalar(2)
    }

    fn backward(x: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        grad * x.clamp_min(0.0).mul_scalar(2.0)
    }
}

/// The public function for models. The recorder counts it with the library's operations.
fn squared_relu<B: SquaredReluOps>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let _op = recorder::op("squared_relu", || vec![recorder::operand(&x)]);
    B::forward(x)
}

/// One pass over memory instead of Burn's two.
impl SquaredReluOps for NdArray {
    fn forward(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (shape, device) = (x.dims(), x.device());
        let values = x.into_data().iter::<f32>().map(|x| x.max(0.0) * x.max(0.0)).collect::<Vec<f32>>();
        Tensor::from_data(TensorData::new(values, shape), &device)
    }
}

/// Its graph node, which saves the input.
#[derive(Debug)]
struct SquaredRelu;

impl<B: SquaredReluOps> Backward<B, 1> for SquaredRelu {
    type State = Tensor<B, 2>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let x = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let grad = Tensor::from_primitive(TensorPrimitive::Float(grad));
            B::backward(x, grad).into_primitive().tensor()
        });
    }
}

/// On a backend with gradients, forward and backward are tied together.
impl<B: SquaredReluOps, C: CheckpointStrategy> SquaredReluOps for Autodiff<B, C> {
    fn forward(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let x = x.into_primitive().tensor();
        let input = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(x.primitive.clone()));
        let output = B::forward(input.clone()).into_primitive().tensor();
        let output = match SquaredRelu.prepare::<C>([x.node]).compute_bound().stateful() {
            OpsKind::Tracked(node) => node.finish(input, output),
            OpsKind::UnTracked(node) => node.finish(output),
        };
        Tensor::from_primitive(TensorPrimitive::Float(output))
    }
}

type B = Autodiff<NdArray>;

/// Output and gradient of `f` at `x`, for the same gradient of the output.
fn with_gradient(x: &Tensor<NdArray, 2>, f: fn(Tensor<B, 2>) -> Tensor<B, 2>) -> [TensorData; 2] {
    let x = Tensor::<B, 2>::from_inner(x.clone()).require_grad();
    let output = f(x.clone());
    let upstream = Tensor::from_inner(output.clone().inner().sin());
    let gradients = (output.clone() * upstream).sum().backward();
    [output.into_data(), x.grad(&gradients).expect("x is tracked").into_data()]
}

fn main() {
    for shape in [[1, 1], [3, 5], [64, 257]] {
        let x = Tensor::<NdArray, 2>::random(shape, Distribution::Normal(0.0, 1.0), &Default::default());
        let ours = with_gradient(&x, squared_relu);
        // Burn's own gradient of its basic operations.
        let theirs = with_gradient(&x, |x| x.clamp_min(0.0).powi_scalar(2));
        for (ours, theirs) in ours.iter().zip(&theirs) {
            ours.assert_approx_eq::<f32>(theirs, Tolerance::default());
        }
        println!("{shape:?}: output and gradient agree with Burn's");
    }
}
