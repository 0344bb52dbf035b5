//! [`Backend`] for the CPU: each operation in one pass over the data, products through `gemm`, threads over rows and
//! heads. The bodies stand beside their operations, in `ndarray.rs`.
//!
//! Sums are cut into pieces of a fixed size, never by the number of threads, so that results do not depend on it.

use burn::tensor::{Int, Tensor, TensorData};
use burn_ndarray::NdArray;

use crate::activation::{self, Activation};
use crate::attention::{self, AttentionGradients, AttentionMask, AttentionOptions, AttentionOutput};
use crate::dropout::{self, Dropout};
use crate::head_loss::{self, HeadLossOptions, HeadLossOutput};
use crate::linear::{self, LinearGradients};
use crate::norm::{self, Norm, NormGradients, NormOutput};
use crate::optimizer::{self, AdamW, AdamWParameter};
use crate::rotary::{self, RotaryTable};
use crate::softmax;
use crate::{Backend, RandomKey};

impl Backend for NdArray {
    fn random_bits(rows: usize, columns: usize, key: RandomKey, device: &Self::Device) -> Tensor<Self, 2, Int> {
        let at = |index: usize| i64::from(key.bits((index / columns) as u32, (index % columns) as u32));
        let bits: Vec<i64> = (0..rows * columns).map(at).collect();
        Tensor::from_data(TensorData::new(bits, [rows, columns]), device)
    }

    fn dropout(x: Tensor<Self, 2>, dropout: Dropout) -> Tensor<Self, 2> {
        dropout::ndarray::dropout(x, dropout)
    }

    fn norm_forward(x: Tensor<Self, 2>, norm: &Norm<Self>) -> NormOutput<Self> {
        norm::ndarray::norm_forward(x, norm)
    }

    fn norm_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        saved: NormOutput<Self>,
        norm: &Norm<Self>,
        residual: Option<Tensor<Self, 2>>,
    ) -> NormGradients<Self> {
        norm::ndarray::norm_backward(grad, x, saved, norm, residual)
    }

    fn softmax_forward(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        softmax::ndarray::softmax(x)
    }

    fn softmax_backward(grad: Tensor<Self, 2>, output: Tensor<Self, 2>) -> Tensor<Self, 2> {
        softmax::ndarray::softmax_backward(grad, output)
    }

    fn linear_forward(x: Tensor<Self, 2>, weight: Tensor<Self, 2>, bias: Option<Tensor<Self, 1>>) -> Tensor<Self, 2> {
        linear::ndarray::linear_forward(x, weight, bias)
    }

    fn linear_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        has_bias: bool,
    ) -> LinearGradients<Self> {
        linear::ndarray::linear_backward(grad, x, weight, has_bias)
    }

    fn activate_forward(x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        activation::ndarray::activate(x, activation)
    }

    fn activate_backward(grad: Tensor<Self, 2>, x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        activation::ndarray::activate_backward(grad, x, activation)
    }

    fn rotary(
        x: Tensor<Self, 4>,
        table: &RotaryTable<Self>,
        positions: Tensor<Self, 2, Int>,
        inverse: bool,
    ) -> Tensor<Self, 4> {
        rotary::ndarray::rotary(x, table, positions, inverse)
    }

    fn attention_forward(
        query: Tensor<Self, 4>,
        key: Tensor<Self, 4>,
        value: Tensor<Self, 4>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        attention::ndarray::attention_forward(query, key, value, mask, options)
    }

    fn attention_backward(
        grad: Tensor<Self, 4>,
        query: Tensor<Self, 4>,
        key: Tensor<Self, 4>,
        value: Tensor<Self, 4>,
        saved: AttentionOutput<Self>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> AttentionGradients<Self> {
        attention::ndarray::attention_backward(grad, query, key, value, saved, mask, options)
    }

    fn head_loss_forward(
        hidden: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        targets: Tensor<Self, 1, Int>,
        options: HeadLossOptions,
        gradients: bool,
    ) -> HeadLossOutput<Self> {
        head_loss::ndarray::head_loss_forward(hidden, weight, targets, options, gradients)
    }

    fn optimizer_step(
        parameters: Vec<AdamWParameter<Self>>,
        adamw: &AdamW,
    ) -> (Vec<AdamWParameter<Self>>, Tensor<Self, 1>) {
        optimizer::ndarray::optimizer_step(parameters, adamw)
    }
}
