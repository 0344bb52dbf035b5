//! AdamW with global-norm clipping over all parameters at once, without a read from the host.

#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::Tensor;

use crate::Backend;
use crate::recorder;

/// One parameter with its gradient and moments, each flattened to `[elements]` f32.
#[derive(Clone, Debug)]
pub struct AdamWParameter<B: Backend> {
    /// The parameter.
    pub value: Tensor<B, 1>,
    /// Its gradient, before clipping.
    pub gradient: Tensor<B, 1>,
    /// Running mean of the gradient.
    pub first_moment: Tensor<B, 1>,
    /// Running mean of its square.
    pub second_moment: Tensor<B, 1>,
    /// Whether weight decay applies: to matrices, as a rule.
    pub decays: bool,
    /// The parameter in another dtype, the same for all copies, as operations read it: refreshed with it.
    pub copy: Option<Tensor<B, 1>>,
}

/// The numbers of one step of AdamW (Loshchilov and Hutter, 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Step size of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, times the learning rate.
    pub weight_decay: f64,
    /// Gradients are scaled so that the norm of all of them together is at most this.
    pub max_grad_norm: Option<f64>,
    /// Which step this is, from one, for the correction of the moments' bias.
    pub step: u64,
}

/// One step of AdamW over all `parameters`: the updated ones, without their gradients' further use, and the global
/// norm of the gradients before clipping, `[1]` f32. Both stay on the device.
///
/// # Panics
/// On a GPU, if values, gradients or moments are not f32, copies are of several dtypes, or one has not its value's length.
pub fn optimizer_step<B: Backend>(
    parameters: Vec<AdamWParameter<B>>,
    adamw: &AdamW,
) -> (Vec<AdamWParameter<B>>, Tensor<B, 1>) {
    let _op = recorder::op("optimizer_step", || parameters.iter().map(|one| recorder::operand(&one.value)).collect());
    B::optimizer_step(parameters, adamw)
}
