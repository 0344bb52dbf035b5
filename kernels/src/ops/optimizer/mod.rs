//! AdamW with global-norm clipping over all parameters at once, without a read by the host.

mod autodiff;
#[cfg(feature = "ndarray")]
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod reference;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

use crate::checked::{Checked, Operands, part};
use crate::mutation::parts;
use crate::recorder::{self, Call, Operand};
use crate::selection::dispatch;

/// A parameter with its gradient and moments, each flattened to `[elements]` f32.
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
    /// Whether weight decay applies: usually to matrices.
    pub decays: bool,
    /// The copy in another dtype, the same for all parameters, that operations read: refreshed with
    /// the value.
    pub copy: Option<Tensor<B, 1>>,
}

// The gradient's buffer may be reused.
parts!(AdamWParameter { value, first_moment, second_moment, copy } kept gradient, decays);

/// Hyperparameters of one step of AdamW (Loshchilov and Hutter, 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, times the learning rate.
    pub weight_decay: f64,
    /// Maximum global gradient norm.
    pub max_grad_norm: Option<f64>,
    /// The step, counted from one, for bias correction.
    pub step: u64,
}

/// Operands of [`optimizer_step`].
#[derive(Clone, Debug)]
pub struct OptimizerStep<'a, B: Backend> {
    /// The parameters, some of which may be empty.
    pub parameters: Vec<AdamWParameter<B>>,
    /// The hyperparameters.
    pub adamw: &'a AdamW,
    /// The norm of all gradients, `[1]` f32, where these are a part of them.
    pub norm: Option<Tensor<B, 1>>,
}

/// What [`gradient_norm`] works on.
#[derive(Clone, Debug)]
pub struct GradientNorm<B: Backend> {
    /// At least one.
    pub gradients: Vec<Tensor<B, 1>>,
}

impl<B: Backend> Operands for GradientNorm<B> {
    fn check(&self) {
        let op = "gradient_norm";
        assert!(!self.gradients.is_empty(), "{op}: there are no gradients");
        let device = self.gradients[0].device();
        for gradient in &self.gradients {
            part(op, "a gradient", gradient).of(DType::F32);
            let own = gradient.device();
            assert!(own == device, "{op}: a gradient is on {own:?}, others on {device:?}");
        }
    }
}

impl<B: Backend> Operands for OptimizerStep<'_, B> {
    fn check(&self) {
        let op = "optimizer_step";
        if let Some(norm) = &self.norm {
            part(op, "norm", norm).of(DType::F32);
            assert!(norm.dims() == [1], "{op}: norm {:?} is to be [1]", norm.dims());
        }
        let mut copies = None;
        let device = self.parameters.first().map(|first| first.value.device());
        for AdamWParameter { value, gradient, first_moment, second_moment, copy, .. } in &self.parameters {
            let own: [usize; 1] = value.dims();
            let tensors = [
                ("value", Some(value)),
                ("gradient", Some(gradient)),
                ("first moment", Some(first_moment)),
                ("second moment", Some(second_moment)),
                ("copy", copy.as_ref()),
            ];
            for (name, tensor) in tensors {
                let Some(tensor) = tensor else { continue };
                let (dims, dtype) = (tensor.dims(), tensor.dtype());
                assert!(dims == own, "{op}: {name} {dims:?} does not fit value {own:?}");
                assert!(
                    Some(tensor.device()) == device,
                    "{op}: {name} is on {:?}, others on {device:?}",
                    tensor.device()
                );
                match name {
                    "copy" => assert!(*copies.get_or_insert(dtype) == dtype, "{op}: all copies have one dtype"),
                    name => assert!(dtype == DType::F32, "{op}: {name} is {dtype:?} but must be f32"),
                }
            }
        }
        let float = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        assert!(copies.is_none_or(float), "{op}: copies are {copies:?} but must be f32, f16 or bf16");
    }
}

/// The updated parameters, and the global gradient norm.
pub type Stepped<B> = (Vec<AdamWParameter<B>>, Tensor<B, 1>);

/// Optimizers of a backend.
pub trait OptimizerOps: Backend {
    /// [`optimizer_step`].
    fn optimizer_step(operands: Checked<OptimizerStep<'_, Self>>) -> Stepped<Self> {
        reference::optimizer_step(operands.into_inner())
    }

    /// Body of [`gradient_norm`].
    fn gradient_norm(operands: Checked<GradientNorm<Self>>) -> Tensor<Self, 1> {
        reference::gradient_norm(operands.into_inner())
    }
}

/// One step of AdamW over all `parameters`: returns the updated parameters, whose gradients are
/// used up, and the global gradient norm before clipping, `[1]` f32. Both stay on the device.
///
/// # Panics
/// If values, gradients or moments are not f32, copies have several dtypes, the tensors of a
/// parameter differ in length, or they are on several devices.
pub fn optimizer_step<B: OptimizerOps>(parameters: Vec<AdamWParameter<B>>, adamw: &AdamW) -> Stepped<B> {
    optimizer_step_of(parameters, adamw, None)
}

/// [`optimizer_step`] of a part of all parameters, as a rank has one: gradients are clipped by
/// `norm`, `[1]` f32, that of all gradients, which is also what is returned.
///
/// # Panics
/// As there, and if the norm is not one f32.
pub fn optimizer_step_of<B: OptimizerOps>(
    parameters: Vec<AdamWParameter<B>>,
    adamw: &AdamW,
    norm: Option<Tensor<B, 1>>,
) -> Stepped<B> {
    let _op = recorder::op("optimizer_step", || {
        // Reads value, gradient and moments, writes value and moments, and reads the gradient once
        // more for its norm.
        let once = |parameter: &AdamWParameter<B>| {
            let copy = parameter.copy.as_ref().map_or(0, |copy| recorder::operand(copy).bytes());
            8 * recorder::operand(&parameter.value).bytes() + copy
        };
        let bytes = parameters.iter().map(once).sum();
        let count = parameters.iter().map(|parameter| parameter.value.dims()[0]).sum::<usize>();
        Call { inputs: vec![Operand::new([count], DType::F32)], bytes, flops: 0 }
    });
    dispatch!(B: OptimizerOps::optimizer_step(Checked::new(OptimizerStep { parameters, adamw, norm })))
}

/// The norm of all gradients together, at least one, f32: `[1]` f32, on the device.
///
/// # Panics
/// If there is none, or one is empty, not f32, or on another device.
pub fn gradient_norm<B: OptimizerOps>(gradients: Vec<Tensor<B, 1>>) -> Tensor<B, 1> {
    let _op =
        recorder::op("gradient_norm", || Call::reads(gradients.iter().map(recorder::operand).collect::<Vec<_>>()));
    dispatch!(B: OptimizerOps::gradient_norm(Checked::new(GradientNorm { gradients })))
}
