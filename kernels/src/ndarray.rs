//! [`Backend`] for the CPU: each operation in one pass over the data, products through `gemm`, threads over rows and
//! heads. The bodies stand beside their operations, in `ndarray.rs`.
//!
//! Sums are cut into pieces of a fixed size, never by the number of threads, so that results do not depend on it.

use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use burn_ndarray::NdArray;

use crate::cpu::Values;
use crate::ops::activation::{self, Activation};
use crate::ops::attention::{self, AttentionGradients, AttentionMask, AttentionOptions, AttentionOutput};
use crate::ops::cached_attention::{self, CachedTokens, LayerCache, Placement};
use crate::ops::dropout::{self, Dropout};
use crate::ops::embed;
use crate::ops::head_loss::{self, HeadLossOptions, HeadLossOutput};
use crate::ops::head_sample::{self, SampledRows, Sampling};
use crate::ops::linear::{self, LinearActivateOutput, LinearGradients};
use crate::ops::norm::{self, Norm, NormGradients, NormOutput};
use crate::ops::optimizer::{self, AdamW, AdamWParameter};
use crate::ops::rotary::{self, RotaryTable};
use crate::ops::softmax;
use crate::ops::weight::{self, Int8Weight};
use crate::packed_heads::PackedHeads;
use crate::random;
use crate::selection::reference_only;
use crate::{Backend, RandomKey};

impl Backend for NdArray {
    fn reshape<const D: usize, const E: usize>(x: Tensor<Self, D>, shape: [usize; E]) -> Tensor<Self, E> {
        Values::strided(x).reshaped(shape)
    }

    fn random_bits(rows: usize, columns: usize, key: RandomKey, device: &Self::Device) -> Tensor<Self, 2, Int> {
        if reference_only() {
            return random::reference::random_bits(rows, columns, key, device);
        }
        let at = |index: usize| i64::from(key.bits((index / columns) as u32, (index % columns) as u32));
        let bits: Vec<i64> = (0..rows * columns).map(at).collect();
        Tensor::from_data(TensorData::new(bits, [rows, columns]), device)
    }

    fn dropout(x: Tensor<Self, 2>, dropout: Dropout) -> Tensor<Self, 2> {
        if reference_only() {
            return dropout::reference::dropout(x, dropout);
        }
        dropout::cpu::dropout(x, dropout)
    }

    fn embed_forward(table: Tensor<Self, 2>, tokens: Tensor<Self, 2, Int>, dtype: FloatDType) -> Tensor<Self, 3> {
        if reference_only() {
            return embed::reference::embed(table, tokens, dtype);
        }
        embed::cpu::embed_forward(table, tokens)
    }

    fn embed_backward(grad: Tensor<Self, 2>, tokens: Tensor<Self, 1, Int>, vocabulary: usize) -> Tensor<Self, 2> {
        if reference_only() {
            return embed::reference::embed_backward(grad, tokens, vocabulary);
        }
        embed::cpu::embed_backward(grad, tokens, vocabulary)
    }

    fn norm_forward(x: Tensor<Self, 2>, norm: &Norm<Self>) -> NormOutput<Self> {
        if reference_only() {
            return norm::reference::norm_forward(x, norm);
        }
        norm::cpu::norm_forward(x, norm)
    }

    fn norm_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        saved: NormOutput<Self>,
        norm: &Norm<Self>,
        residual: Option<Tensor<Self, 2>>,
    ) -> NormGradients<Self> {
        if reference_only() {
            return norm::reference::norm_backward(grad, x, saved, norm, residual);
        }
        norm::cpu::norm_backward(grad, x, saved, norm, residual)
    }

    fn softmax_forward(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if reference_only() {
            return softmax::reference::softmax(x);
        }
        softmax::cpu::softmax(x)
    }

    fn softmax_backward(grad: Tensor<Self, 2>, output: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if reference_only() {
            return softmax::reference::softmax_backward(grad, output);
        }
        softmax::cpu::softmax_backward(grad, output)
    }

    fn linear_forward(x: Tensor<Self, 2>, weight: Tensor<Self, 2>, bias: Option<Tensor<Self, 1>>) -> Tensor<Self, 2> {
        if reference_only() {
            return linear::reference::linear_forward(x, weight, bias);
        }
        linear::cpu::linear_forward(x, weight, bias)
    }

    fn linear_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        has_bias: bool,
    ) -> LinearGradients<Self> {
        if reference_only() {
            return linear::reference::linear_backward(grad, x, weight, has_bias);
        }
        linear::cpu::linear_backward(grad, x, weight, has_bias)
    }

    fn linear_add_forward(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        dropout: Option<Dropout>,
        residual: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        if reference_only() {
            return linear::reference::linear_add_forward(x, weight, bias, dropout, residual);
        }
        match dropout {
            None => linear::cpu::linear_add_forward(x, weight, bias, residual),
            dropout => linear::reference::linear_add_forward(x, weight, bias, dropout, residual),
        }
    }

    fn linear_activate_forward(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        activation: Activation,
    ) -> LinearActivateOutput<Self> {
        if reference_only() {
            return linear::reference::linear_activate_forward(x, weight, bias, activation);
        }
        linear::cpu::linear_activate_forward(x, weight, bias, activation)
    }

    fn linear_activate_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        saved: Tensor<Self, 2>,
        activation: Activation,
    ) -> LinearGradients<Self> {
        if reference_only() {
            return linear::reference::linear_activate_backward(grad, x, weight, bias, saved, activation);
        }
        linear::cpu::linear_activate_backward(grad, x, weight, bias.is_some(), saved, activation)
    }

    fn activate_forward(x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        if reference_only() {
            return activation::reference::activate(x, activation);
        }
        activation::cpu::activate(x, activation)
    }

    fn activate_backward(grad: Tensor<Self, 2>, x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        if reference_only() {
            return activation::reference::activate_backward(grad, x, activation);
        }
        activation::cpu::activate_backward(grad, x, activation)
    }

    fn rotary(
        x: Tensor<Self, 4>,
        table: &RotaryTable<Self>,
        positions: Tensor<Self, 2, Int>,
        inverse: bool,
    ) -> Tensor<Self, 4> {
        if reference_only() {
            return rotary::reference::rotary(x, table, positions, inverse);
        }
        rotary::cpu::rotary(x, table, positions, inverse)
    }

    fn qkv_rotary(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        table: &RotaryTable<Self>,
        positions: Tensor<Self, 2, Int>,
        inverse: bool,
    ) -> Tensor<Self, 3> {
        if reference_only() {
            return rotary::reference::qkv_rotary(qkv, heads, table, positions, inverse);
        }
        rotary::cpu::qkv_rotary(qkv, heads, table, positions, inverse)
    }

    fn attention_forward(
        query: Tensor<Self, 4>,
        key: Tensor<Self, 4>,
        value: Tensor<Self, 4>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        if reference_only() {
            return attention::reference::attention_forward(query, key, value, mask, options);
        }
        attention::cpu::attention_forward(query, key, value, mask, options)
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
        if reference_only() {
            return attention::reference::attention_backward(grad, query, key, value, saved, mask, options);
        }
        attention::cpu::attention_backward(grad, query, key, value, saved, mask, options)
    }

    fn qkv_attention_forward(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        if reference_only() {
            return attention::reference::qkv_attention_forward(qkv, heads, mask, options);
        }
        attention::cpu::qkv_attention_forward(qkv, heads, mask, options)
    }

    fn qkv_attention_backward(
        grad: Tensor<Self, 4>,
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        saved: AttentionOutput<Self>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> Tensor<Self, 3> {
        if reference_only() {
            return attention::reference::qkv_attention_backward(grad, qkv, heads, saved, mask, options);
        }
        attention::cpu::qkv_attention_backward(grad, qkv, heads, saved, mask, options)
    }

    fn cached_attention(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        placement: Placement<Self>,
        at: &CachedTokens<Self>,
        cache: &mut LayerCache<Self>,
    ) -> Tensor<Self, 4> {
        if reference_only() {
            return cached_attention::reference::cached_attention(qkv, heads, placement, at, cache);
        }
        cached_attention::cpu::cached_attention(qkv, heads, placement, at, cache)
    }

    fn draw(logits: Tensor<Self, 2>, sampling: &Sampling, rows: &mut SampledRows<Self>) -> Tensor<Self, 1, Int> {
        if reference_only() {
            return head_sample::reference::draw(logits, sampling, rows);
        }
        head_sample::cpu::draw(logits, sampling, rows)
    }

    fn int8_embed(table: &Int8Weight<Self>, tokens: Tensor<Self, 2, Int>, dtype: FloatDType) -> Tensor<Self, 3> {
        if reference_only() {
            return weight::reference::int8_embed(table, tokens, dtype);
        }
        weight::cpu::embed(table, tokens)
    }

    fn int8_linear(
        x: Tensor<Self, 2>,
        norm: Option<&Norm<Self>>,
        weight: &Int8Weight<Self>,
        bias: Option<Tensor<Self, 1>>,
        activation: Option<Activation>,
        residual: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let few = match reference_only() {
            true => None,
            false => linear::cpu::int8_linear(x.clone(), norm, weight, bias.clone(), activation, residual.clone()),
        };
        few.unwrap_or_else(|| weight::reference::int8_linear(x, norm, weight, bias, activation, residual))
    }

    fn int8_to_float(weight: &Int8Weight<Self>, dtype: FloatDType) -> Tensor<Self, 2> {
        if reference_only() {
            return weight::reference::int8_to_float(weight, dtype);
        }
        weight::cpu::int8_to_float(weight)
    }

    fn head_loss_forward(
        hidden: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        targets: Tensor<Self, 1, Int>,
        options: HeadLossOptions,
        gradients: bool,
    ) -> HeadLossOutput<Self> {
        if reference_only() {
            return head_loss::reference::head_loss_forward(hidden, weight, targets, options, gradients);
        }
        head_loss::cpu::head_loss_forward(hidden, weight, targets, options, gradients)
    }

    fn head_loss_backward(
        grad: Tensor<Self, 1>,
        d_hidden: Tensor<Self, 2>,
        d_weight: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        if reference_only() {
            return head_loss::reference::head_loss_backward(grad, d_hidden, d_weight);
        }
        head_loss::cpu::head_loss_backward(grad, d_hidden, d_weight)
    }

    fn optimizer_step(
        parameters: Vec<AdamWParameter<Self>>,
        adamw: &AdamW,
    ) -> (Vec<AdamWParameter<Self>>, Tensor<Self, 1>) {
        if reference_only() {
            return optimizer::reference::optimizer_step(parameters, adamw);
        }
        optimizer::cpu::optimizer_step(parameters, adamw)
    }
}
