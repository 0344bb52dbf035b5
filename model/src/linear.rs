//! A linear layer: its weight, and an optional low-rank adapter.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use fireclay_kernels::{
    Activation, Backend, Dropout, LoraLayer, Norm, RandomKey, Weight, activate, dropout, linear, linear_add, lora,
    norm, norm_gate_up, norm_linear,
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
    /// Where `b` is blocks, one for each module that the weight holds, 1 within and 0 outside them,
    /// `[d_output, rank]`: outside them `b` is zero and stays so.
    pub blocks: Option<Tensor<B, 2>>,
    /// Probability that an element of `x` is zero, in training.
    pub dropout_probability: f64,
    /// With DoRA, the lengths of the rows of the weight with its adapter.
    pub magnitude: Option<Magnitude<B>>,
    /// The masks of this step.
    #[module(skip)]
    pub(crate) dropout: Option<Dropout>,
}

/// The lengths that the rows of a weight with its adapter are scaled to (DoRA; Liu et al., 2024):
///
/// ```text
/// V = base + scale * b a            y = x (magnitude / |V|)^T V^T, the length of each row without a gradient
/// ```
#[derive(Module, Debug)]
pub struct Magnitude<B: Backend> {
    /// `[d_output]`.
    pub parameter: Param<Tensor<B, 1>>,
    /// The squared length of each row of the base weight, f32 `[d_output]`.
    pub base_squares: Tensor<B, 1>,
    /// Where the weight has rows without an adapter: 1 for those with one, and 0 for the others,
    /// which keep their lengths, `[d_output]`.
    pub rows: Option<Tensor<B, 1>>,
}

impl<B: Backend> Magnitude<B> {
    /// What each row of the base weight with its adapter is multiplied by, f32 `[d_output]`.
    ///
    /// The squared length of a row is `|w|^2 + 2 scale w (b a)^T + scale^2 |b a|^2`: the sum of the two matrices is
    /// never formed.
    fn factors(&self, base: &Matrix<B>, adapter: &Adapter<B>) -> Tensor<B, 1> {
        let [a, b] = [&adapter.a, &adapter.b].map(Matrix::constant);
        let scale = adapter.scale;
        let along = linear(a.clone(), base.weight(), None).transpose();
        let along = (along * b.clone()).sum_dim(1).squeeze_dim::<1>(1);
        let gram = a.clone().matmul(a.transpose());
        let added = (b.clone().matmul(gram) * b).sum_dim(1).squeeze_dim::<1>(1);
        let squares = self.base_squares.clone() + along.mul_scalar(2.0 * scale) + added.mul_scalar(scale * scale);
        self.parameter.val() / squares.sqrt()
    }
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
        match &self.adapter {
            None => norm_linear(x, pre_norm, self.base.weight(), bias),
            Some(adapter) => self.adapted(adapter, normed(x, pre_norm), bias, None),
        }
    }

    /// `residual + x weight^T + bias` of the weight with its adapter.
    fn adapted(
        &self,
        adapter: &Adapter<B>,
        x: Tensor<B, 2>,
        bias: Option<Tensor<B, 1>>,
        residual: Option<Tensor<B, 2>>,
    ) -> Tensor<B, 2> {
        let weight = self.base.weight();
        let Some(magnitude) = &adapter.magnitude else {
            let Some(masks) = adapter.dropout else { return lora(x, adapter.on(weight, bias, None), residual) };
            let output = match residual {
                Some(residual) => linear_add(x.clone(), weight, bias, None, residual),
                None => linear(x.clone(), weight, bias),
            };
            return adapter.add_to(dropout(x, masks), output);
        };
        let output = lora(x, adapter.on(weight, None, None), None);
        let dtype = output.dtype();
        let mut output = output * magnitude.factors(&self.base, adapter).cast(dtype).unsqueeze();
        if let Some(bias) = bias {
            output = output + bias.cast(dtype).unsqueeze();
        }
        match residual {
            Some(residual) => residual + output,
            None => output,
        }
    }

    /// `activation(norm(x) weight^T + bias)`; see [`norm_gate_up`].
    pub(crate) fn activated(
        &self,
        x: Tensor<B, 2>,
        pre_norm: Option<&Norm<B>>,
        bias: Option<Tensor<B, 1>>,
        activation: Activation,
    ) -> Tensor<B, 2> {
        match &self.adapter {
            None => norm_gate_up(x, pre_norm, self.base.weight(), bias, activation),
            Some(adapter) if adapter.magnitude.is_none() && adapter.dropout.is_none() => {
                lora(normed(x, pre_norm), adapter.on(self.base.weight(), bias, Some(activation)), None)
            }
            Some(_) => activate(self.forward(x, pre_norm, bias), activation),
        }
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
            None => self.adapted(adapter, x, bias, Some(residual)),
            Some(dropped) => residual + dropout(self.forward(x, None, bias), dropped),
        }
    }
}

impl<B: Backend> Adapter<B> {
    /// An adapter of one block, without dropout.
    pub fn new(a: Matrix<B>, b: Matrix<B>, scale: f64) -> Self {
        Self { a, b, scale, blocks: None, dropout_probability: 0.0, magnitude: None, dropout: None }
    }

    /// Sets what this step's masks are made from, or turns dropout off.
    pub(crate) fn set_dropout(&mut self, key: Option<RandomKey>) {
        let key = key.filter(|_| self.dropout_probability > 0.0);
        self.dropout = key.map(|key| Dropout { probability: self.dropout_probability, key });
    }

    /// The operands of [`lora`] on `weight`.
    fn on(&self, weight: Weight<B>, bias: Option<Tensor<B, 1>>, activation: Option<Activation>) -> LoraLayer<B> {
        LoraLayer { weight, bias, a: self.a.weight(), b: self.b.weight(), scale: self.scale, activation }
    }

    /// `output + scale * (x a^T) b^T`.
    fn add_to(&self, x: Tensor<B, 2>, output: Tensor<B, 2>) -> Tensor<B, 2> {
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
