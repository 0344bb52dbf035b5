//! A linear layer: its weight, and an optional low-rank adapter.

use burn::module::Module;
use burn::tensor::Tensor;

use fireclay_kernels::{
    Activation, Backend, Dropout, Norm, RandomKey, activate, dropout, linear, linear_add, norm, norm_gate_up,
    norm_linear,
};

use crate::matrix::Matrix;

/// The weight of a projection, `[d_output, d_input]`, with an optional adapter.
///
/// The base may be quantized or frozen (see
/// [`Transformer::with_trained`](crate::Transformer::with_trained)): gradients flow through it, but
/// it gets none itself.
#[derive(Module, Debug)]
pub struct Linear<B: Backend> {
    /// The weight.
    pub base: Matrix<B>,
    /// The adapter.
    pub adapter: Option<Adapter<B>>,
}

/// A low-rank adapter (LoRA; Hu et al., 2021), which adds `scale * (x a^T) b^T` to the projection
/// of `x`.
#[derive(Module, Debug)]
pub struct Adapter<B: Backend> {
    /// `[rank, d_input]`.
    pub a: Matrix<B>,
    /// `[d_output, rank]`.
    pub b: Matrix<B>,
    /// Scale of the adapter.
    pub scale: f64,
    /// Where `b` is blocks, one for each module that the weight holds, 1 within and 0 beyond them, `[d_output, rank]`: beyond them
    /// `b` is zero and stays so.
    pub blocks: Option<Tensor<B, 2>>,
    /// Probability that an element of `x` is zero, in training.
    pub dropout_probability: f64,
    /// The masks of this step.
    #[module(skip)]
    pub(crate) dropout: Option<Dropout>,
}

impl<B: Backend> From<Matrix<B>> for Linear<B> {
    fn from(base: Matrix<B>) -> Self {
        Self { base, adapter: None }
    }
}

impl<B: Backend> Linear<B> {
    /// `norm(x) weight^T + bias`, with optional norm and bias: `x` `[rows, d_input]`, the result
    /// `[rows, d_output]`.
    pub(crate) fn forward(
        &self,
        x: Tensor<B, 2>,
        pre_norm: Option<&Norm<B>>,
        bias: Option<Tensor<B, 1>>,
    ) -> Tensor<B, 2> {
        let Some(adapter) = &self.adapter else { return norm_linear(x, pre_norm, self.base.weight(), bias) };
        let x = normed(x, pre_norm);
        let output = linear(x.clone(), self.base.weight(), bias);
        adapter.add_to(x, output)
    }

    /// `activation(norm(x) weight^T + bias)`; see [`norm_gate_up`].
    pub(crate) fn activated(
        &self,
        x: Tensor<B, 2>,
        pre_norm: Option<&Norm<B>>,
        bias: Option<Tensor<B, 1>>,
        activation: Activation,
    ) -> Tensor<B, 2> {
        if self.adapter.is_none() {
            return norm_gate_up(x, pre_norm, self.base.weight(), bias, activation);
        }
        activate(self.forward(x, pre_norm, bias), activation)
    }

    /// `residual + dropped(x weight^T + bias)`; see [`linear_add`].
    pub(crate) fn add_to(
        &self,
        residual: Tensor<B, 2>,
        x: Tensor<B, 2>,
        bias: Option<Tensor<B, 1>>,
        dropped: Option<Dropout>,
    ) -> Tensor<B, 2> {
        let Some(adapter) = &self.adapter else { return linear_add(x, self.base.weight(), bias, dropped, residual) };
        match dropped {
            None => {
                let output = linear_add(x.clone(), self.base.weight(), bias, None, residual);
                adapter.add_to(x, output)
            }
            Some(dropped) => residual + dropout(self.forward(x, None, bias), dropped),
        }
    }
}

impl<B: Backend> Adapter<B> {
    /// An adapter of one block, without dropout.
    pub fn new(a: Matrix<B>, b: Matrix<B>, scale: f64) -> Self {
        Self { a, b, scale, blocks: None, dropout_probability: 0.0, dropout: None }
    }

    /// Sets what this step's masks are made from, or turns dropout off.
    pub(crate) fn set_dropout(&mut self, key: Option<RandomKey>) {
        let key = key.filter(|_| self.dropout_probability > 0.0);
        self.dropout = key.map(|key| Dropout { probability: self.dropout_probability, key });
    }

    /// `output + scale * (x a^T) b^T`.
    fn add_to(&self, x: Tensor<B, 2>, output: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = match self.dropout {
            Some(masks) => dropout(x, masks),
            None => x,
        };
        let inner = linear(x, self.a.weight(), None).mul_scalar(self.scale);
        linear_add(inner, self.b.weight(), None, None, output)
    }
}

/// Operands of a projection whose result is multiplied by `factor`.
pub(crate) fn scaled<B: Backend>(
    x: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    factor: f64,
) -> (Tensor<B, 2>, Option<Tensor<B, 1>>) {
    if factor == 1.0 {
        return (x, bias);
    }
    (x.mul_scalar(factor), bias.map(|bias| bias.mul_scalar(factor)))
}

/// `x`, normalized if there is a norm.
pub(crate) fn normed<B: Backend>(x: Tensor<B, 2>, pre_norm: Option<&Norm<B>>) -> Tensor<B, 2> {
    match pre_norm {
        Some(weights) => norm(x, weights),
        None => x,
    }
}
