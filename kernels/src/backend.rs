//! The trait that the model is written against.

use burn::tensor::backend::ExecutionError;
use burn::tensor::{FloatDType, Int, Tensor};

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
use crate::ops::weight::{self, Int8Weight, Weight};
use crate::packed_heads::PackedHeads;
use crate::random::{self, RandomKey};
use crate::recorder::Probe;

/// A Burn backend with the fused operations of a transformer.
///
/// Each method has the reference as its body, so that a new backend needs one line, `impl Backend for Mine {}`, and
/// replaces bodies as its kernels arrive. An operation with a hand-written gradient has three methods: `op`,
/// `op_forward`, which also returns what the backward pass needs, and `op_backward`. Kernels override the latter two;
/// [`Autodiff`](burn::backend::Autodiff) overrides `op` alone, and calls them on the backend it wraps.
///
/// Call the functions of this crate's root, which check shapes, rather than these methods.
pub trait Backend: burn::tensor::backend::Backend {
    /// What shows a [`Recording`](crate::recorder::Recording) the work of `device`; none where calls are all that is
    /// known.
    fn probe(_device: &Self::Device) -> Option<Box<dyn Probe>> {
        None
    }

    /// Waits until the device has what was uploaded to it, and lets go of what the host still holds of that.
    fn finish_uploads(device: &Self::Device) -> Result<(), ExecutionError> {
        Self::sync(device)
    }

    /// Body of [`reshape`](crate::reshape).
    fn reshape<const D: usize, const E: usize>(x: Tensor<Self, D>, shape: [usize; E]) -> Tensor<Self, E> {
        x.reshape(shape)
    }

    /// Body of [`random_bits`](crate::random_bits).
    fn random_bits(rows: usize, columns: usize, key: RandomKey, device: &Self::Device) -> Tensor<Self, 2, Int> {
        random::reference::random_bits(rows, columns, key, device)
    }

    /// Body of [`dropout`](crate::dropout) over `[rows, columns]`.
    fn dropout(x: Tensor<Self, 2>, dropout: Dropout) -> Tensor<Self, 2> {
        dropout::reference::dropout(x, dropout)
    }

    /// Body of [`embed`](crate::embed).
    fn embed(table: Tensor<Self, 2>, tokens: Tensor<Self, 2, Int>, dtype: FloatDType) -> Tensor<Self, 3> {
        Self::embed_forward(table, tokens, dtype)
    }
    /// Forward of [`embed`](crate::embed).
    fn embed_forward(table: Tensor<Self, 2>, tokens: Tensor<Self, 2, Int>, dtype: FloatDType) -> Tensor<Self, 3> {
        embed::reference::embed(table, tokens, dtype)
    }
    /// Body of [`embed_add`](crate::embed_add).
    fn embed_add(table: Tensor<Self, 2>, tokens: Tensor<Self, 2, Int>, x: Tensor<Self, 3>) -> Tensor<Self, 3> {
        embed::reference::embed_add(table, tokens, x)
    }
    /// Backward of [`embed`](crate::embed): the gradient of the table, f32, from that of `[rows, d_model]` and the tokens
    /// of the rows.
    fn embed_backward(grad: Tensor<Self, 2>, tokens: Tensor<Self, 1, Int>, vocabulary: usize) -> Tensor<Self, 2> {
        embed::reference::embed_backward(grad, tokens, vocabulary)
    }

    /// Body of [`norm`](crate::norm) over `[rows, d_model]`.
    fn norm(x: Tensor<Self, 2>, norm: &Norm<Self>) -> Tensor<Self, 2> {
        Self::norm_forward(x, norm).output
    }
    /// Forward of [`norm`](crate::norm), with the statistics that its backward needs.
    fn norm_forward(x: Tensor<Self, 2>, norm: &Norm<Self>) -> NormOutput<Self> {
        norm::reference::norm_forward(x, norm)
    }
    /// Backward of [`norm`](crate::norm): gradients of the input and of the weights. Where `x` also goes around the
    /// norm, `residual` is the gradient that it has from there, and is added to its gradient from here.
    fn norm_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        saved: NormOutput<Self>,
        norm: &Norm<Self>,
        residual: Option<Tensor<Self, 2>>,
    ) -> NormGradients<Self> {
        norm::reference::norm_backward(grad, x, saved, norm, residual)
    }

    /// Body of [`softmax`](crate::softmax) over `[rows, columns]`.
    fn softmax(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        Self::softmax_forward(x)
    }
    /// Forward of [`softmax`](crate::softmax).
    fn softmax_forward(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        softmax::reference::softmax(x)
    }
    /// Backward of [`softmax`](crate::softmax), from its output.
    fn softmax_backward(grad: Tensor<Self, 2>, output: Tensor<Self, 2>) -> Tensor<Self, 2> {
        softmax::reference::softmax_backward(grad, output)
    }

    /// Body of [`linear`](crate::linear) over `[rows, d_input]`.
    fn linear(x: Tensor<Self, 2>, weight: Tensor<Self, 2>, bias: Option<Tensor<Self, 1>>) -> Tensor<Self, 2> {
        Self::linear_forward(x, weight, bias)
    }
    /// Forward of [`linear`](crate::linear).
    fn linear_forward(x: Tensor<Self, 2>, weight: Tensor<Self, 2>, bias: Option<Tensor<Self, 1>>) -> Tensor<Self, 2> {
        linear::reference::linear_forward(x, weight, bias)
    }
    /// Backward of [`linear`](crate::linear); parameter gradients come back in the parameter's dtype.
    fn linear_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        has_bias: bool,
    ) -> LinearGradients<Self> {
        linear::reference::linear_backward(grad, x, weight, has_bias)
    }

    /// Body of [`norm_linear`](crate::norm_linear).
    fn norm_linear(
        x: Tensor<Self, 2>,
        norm: Option<&Norm<Self>>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        linear::reference::norm_linear(x, norm, weight, bias)
    }

    /// Body of [`linear_add`](crate::linear_add).
    fn linear_add(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        dropout: Option<Dropout>,
        residual: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        Self::linear_add_forward(x, weight, bias, dropout, residual)
    }
    /// Forward of [`linear_add`](crate::linear_add).
    fn linear_add_forward(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        dropout: Option<Dropout>,
        residual: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        linear::reference::linear_add_forward(x, weight, bias, dropout, residual)
    }
    /// Backward of [`linear_add`](crate::linear_add); the residual's gradient is `grad` as it came.
    fn linear_add_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        has_bias: bool,
        dropout: Option<Dropout>,
    ) -> LinearGradients<Self> {
        linear::reference::linear_add_backward(grad, x, weight, has_bias, dropout)
    }

    /// Body of [`norm_gate_up`](crate::norm_gate_up).
    fn norm_gate_up(
        x: Tensor<Self, 2>,
        norm: Option<&Norm<Self>>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        activation: Activation,
    ) -> Tensor<Self, 2> {
        linear::reference::norm_gate_up(x, norm, weight, bias, activation)
    }
    /// A projection and the activation behind it.
    fn linear_activate(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        activation: Activation,
    ) -> Tensor<Self, 2> {
        Self::linear_activate_forward(x, weight, bias, activation).output
    }
    /// Forward of [`linear_activate`](Self::linear_activate).
    fn linear_activate_forward(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        activation: Activation,
    ) -> LinearActivateOutput<Self> {
        linear::reference::linear_activate_forward(x, weight, bias, activation)
    }
    /// Backward of [`linear_activate`](Self::linear_activate), from what the same backend's forward saved.
    fn linear_activate_backward(
        grad: Tensor<Self, 2>,
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        saved: Tensor<Self, 2>,
        activation: Activation,
    ) -> LinearGradients<Self> {
        linear::reference::linear_activate_backward(grad, x, weight, bias, saved, activation)
    }

    /// Body of [`activate`](crate::activate) over `[rows, width]`.
    fn activate(x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        Self::activate_forward(x, activation)
    }
    /// Forward of [`activate`](crate::activate).
    fn activate_forward(x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        activation::reference::activate(x, activation)
    }
    /// Backward of [`activate`](crate::activate), from the input as it was.
    fn activate_backward(grad: Tensor<Self, 2>, x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        activation::reference::activate_backward(grad, x, activation)
    }

    /// Body of [`rotary`](crate::rotary); with `inverse`, the rotation back, which is also its gradient.
    fn rotary(
        x: Tensor<Self, 4>,
        table: &RotaryTable<Self>,
        positions: Tensor<Self, 2, Int>,
        inverse: bool,
    ) -> Tensor<Self, 4> {
        rotary::reference::rotary(x, table, positions, inverse)
    }

    /// Body of [`next_positions`](crate::next_positions).
    fn next_positions(positions: Tensor<Self, 2, Int>, last: usize) -> Tensor<Self, 2, Int> {
        positions.add_scalar(1).clamp_max(last as i32)
    }

    /// Body of [`qkv_rotary`](crate::qkv_rotary); `inverse` as in [`rotary`](Self::rotary).
    fn qkv_rotary(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        table: &RotaryTable<Self>,
        positions: Tensor<Self, 2, Int>,
        inverse: bool,
    ) -> Tensor<Self, 3> {
        rotary::reference::qkv_rotary(qkv, heads, table, positions, inverse)
    }

    /// Body of [`attention`](crate::attention).
    fn attention(
        query: Tensor<Self, 4>,
        key: Tensor<Self, 4>,
        value: Tensor<Self, 4>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> Tensor<Self, 4> {
        Self::attention_forward(query, key, value, mask, options).output
    }
    /// Forward of [`attention`](crate::attention), with the log-sum-exp of every row of scores.
    fn attention_forward(
        query: Tensor<Self, 4>,
        key: Tensor<Self, 4>,
        value: Tensor<Self, 4>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        attention::reference::attention_forward(query, key, value, mask, options)
    }
    /// Backward of [`attention`](crate::attention).
    fn attention_backward(
        grad: Tensor<Self, 4>,
        query: Tensor<Self, 4>,
        key: Tensor<Self, 4>,
        value: Tensor<Self, 4>,
        saved: AttentionOutput<Self>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> AttentionGradients<Self> {
        attention::reference::attention_backward(grad, query, key, value, saved, mask, options)
    }

    /// Body of [`qkv_attention`](crate::qkv_attention): `[batch_size, seq_length, n_heads, head_dim]`.
    fn qkv_attention(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> Tensor<Self, 4> {
        Self::qkv_attention_forward(qkv, heads, mask, options).output
    }
    /// Forward of [`qkv_attention`](crate::qkv_attention).
    fn qkv_attention_forward(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        attention::reference::qkv_attention_forward(qkv, heads, mask, options)
    }
    /// Backward of [`qkv_attention`](crate::qkv_attention): one gradient, packed like its input.
    fn qkv_attention_backward(
        grad: Tensor<Self, 4>,
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        saved: AttentionOutput<Self>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> Tensor<Self, 3> {
        attention::reference::qkv_attention_backward(grad, qkv, heads, saved, mask, options)
    }

    /// Body of [`cached_attention`](crate::cached_attention): `[batch_size, seq_length, n_heads, head_dim]`.
    fn cached_attention(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        placement: Placement<Self>,
        at: &CachedTokens<Self>,
        cache: &mut LayerCache<Self>,
    ) -> Tensor<Self, 4> {
        cached_attention::reference::cached_attention(qkv, heads, placement, at, cache)
    }
    /// The first half of [`cached_attention`](Self::cached_attention): places queries and keys and writes keys and
    /// values into the cache. Gives the queries, `[batch_size, n_heads, seq_length, head_dim]`.
    fn rotary_append(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        placement: Placement<Self>,
        at: &CachedTokens<Self>,
        cache: &mut LayerCache<Self>,
    ) -> Tensor<Self, 4> {
        cached_attention::reference::rotary_append(qkv, heads, placement, at, cache)
    }

    /// Body of [`head_loss`](crate::head_loss).
    fn head_loss(
        hidden: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        targets: Tensor<Self, 1, Int>,
        options: HeadLossOptions,
    ) -> Tensor<Self, 1> {
        Self::head_loss_forward(hidden, weight, targets, options, false).loss
    }
    /// Forward of [`head_loss`](crate::head_loss); with `gradients`, one pass over the vocabulary gives both the loss
    /// and the gradients for an upstream gradient of one, and the backward pass only scales them.
    fn head_loss_forward(
        hidden: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        targets: Tensor<Self, 1, Int>,
        options: HeadLossOptions,
        gradients: bool,
    ) -> HeadLossOutput<Self> {
        head_loss::reference::head_loss_forward(hidden, weight, targets, options, gradients)
    }
    /// Backward of [`head_loss`](crate::head_loss): the gradients of the hidden states and of the weight.
    fn head_loss_backward(
        grad: Tensor<Self, 1>,
        d_hidden: Tensor<Self, 2>,
        d_weight: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        head_loss::reference::head_loss_backward(grad, d_hidden, d_weight)
    }

    /// The first half of [`head_sample`](crate::head_sample): logits `[batch_size, vocabulary]`, f32.
    fn logits(hidden: Tensor<Self, 2>, weight: &Weight<Self>) -> Tensor<Self, 2> {
        head_sample::reference::logits(hidden, weight)
    }
    /// The second half of [`head_sample`](crate::head_sample): a word for each row of f32 logits.
    fn draw(logits: Tensor<Self, 2>, sampling: &Sampling, rows: &mut SampledRows<Self>) -> Tensor<Self, 1, Int> {
        head_sample::reference::draw(logits, sampling, rows)
    }

    /// The rows of a weight of bytes as floats.
    fn int8_to_float(weight: &Int8Weight<Self>, dtype: FloatDType) -> Tensor<Self, 2> {
        weight::reference::int8_to_float(weight, dtype)
    }
    /// Body of [`embed`](crate::embed) for a table of bytes.
    fn int8_embed(table: &Int8Weight<Self>, tokens: Tensor<Self, 2, Int>, dtype: FloatDType) -> Tensor<Self, 3> {
        weight::reference::int8_embed(table, tokens, dtype)
    }
    /// Body of [`linear`](crate::linear), [`norm_linear`](crate::norm_linear), [`linear_add`](crate::linear_add) and
    /// [`norm_gate_up`](crate::norm_gate_up) for a weight of bytes: `residual + activation(norm(x) * weight^T + bias)`,
    /// as far as these are there; a residual only without norm and activation.
    fn int8_linear(
        x: Tensor<Self, 2>,
        norm: Option<&Norm<Self>>,
        weight: &Int8Weight<Self>,
        bias: Option<Tensor<Self, 1>>,
        activation: Option<Activation>,
        residual: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        weight::reference::int8_linear(x, norm, weight, bias, activation, residual)
    }

    /// Body of [`Weight::rounded`].
    fn rounded(_value: Tensor<Self, 2>, copy: Tensor<Self, 2>) -> Tensor<Self, 2> {
        copy
    }

    /// Body of [`optimizer_step`](crate::optimizer_step).
    fn optimizer_step(
        parameters: Vec<AdamWParameter<Self>>,
        adamw: &AdamW,
    ) -> (Vec<AdamWParameter<Self>>, Tensor<Self, 1>) {
        optimizer::reference::optimizer_step(parameters, adamw)
    }
}
