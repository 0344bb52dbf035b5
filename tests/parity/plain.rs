//! The references, with the public functions' operands.

use burn::tensor::{FloatDType, Int, Tensor};
use fireclay_kernels::operands::{
    ActivateForward, AttentionForward, CachedAttention, Dequantize, Draw, DropoutForward, EmbedForward,
    HeadLossForward, LinearForward, Logits, LoraForward, NormForward, OptimizerStep, QkvNormForward, QkvRotaryForward,
    RotaryForward,
};
use fireclay_kernels::traits::Stepped;
use fireclay_kernels::{
    Activation, AdamW, AdamWParameter, AttentionMask, AttentionOptions, Backend, CachedTokens, Dropout,
    HeadLossOptions, HeadLossWanted, HeadNorms, LayerCache, LoraLayer, Norm, PackedHeads, Placement, QuantizedWeight,
    RotaryTable, SampledRows, TokenCounts, Weight, reference,
};

pub(crate) fn dropout<B: Backend>(x: Tensor<B, 2>, dropout: Dropout) -> Tensor<B, 2> {
    reference::dropout_forward(DropoutForward { x, dropout })
}

pub(crate) fn embed<B: Backend>(table: Tensor<B, 2>, tokens: Tensor<B, 2, Int>, dtype: FloatDType) -> Tensor<B, 3> {
    reference::embed_forward(EmbedForward { table: Weight::Float(table), tokens, dtype, added: None })
}

pub(crate) fn norm<B: Backend>(x: Tensor<B, 2>, norm: &Norm<B>) -> Tensor<B, 2> {
    reference::norm_forward(NormForward { x, norm: norm.clone() }).output
}

pub(crate) fn linear<B: Backend>(x: Tensor<B, 2>, weight: Tensor<B, 2>, bias: Option<Tensor<B, 1>>) -> Tensor<B, 2> {
    reference::linear_forward(LinearForward::new(x, weight, bias)).output
}

pub(crate) fn lora<B: Backend>(x: Tensor<B, 2>, layer: LoraLayer<B>, residual: Option<Tensor<B, 2>>) -> Tensor<B, 2> {
    reference::lora_forward(LoraForward { x, layer, residual, keeps: true }).output
}

pub(crate) fn activate<B: Backend>(x: Tensor<B, 2>, activation: Activation) -> Tensor<B, 2> {
    reference::activate_forward(ActivateForward { x, activation })
}

pub(crate) fn dequantize<B: Backend>(weight: &QuantizedWeight<B>, dtype: FloatDType) -> Tensor<B, 2> {
    reference::dequantize(Dequantize { weight: weight.clone(), dtype })
}

pub(crate) fn rotary<B: Backend>(
    x: Tensor<B, 4>,
    table: &RotaryTable<B>,
    positions: Tensor<B, 2, Int>,
) -> Tensor<B, 4> {
    reference::rotary_forward(RotaryForward { x, table: table.clone(), positions, inverse: false })
}

pub(crate) fn qkv_norm<B: Backend>(qkv: Tensor<B, 3>, heads: PackedHeads, norms: HeadNorms<B>) -> Tensor<B, 3> {
    reference::qkv_norm_forward(QkvNormForward { qkv, heads, norms }).output
}

pub(crate) fn qkv_rotary<B: Backend>(
    qkv: Tensor<B, 3>,
    heads: PackedHeads,
    table: &RotaryTable<B>,
    positions: Tensor<B, 2, Int>,
) -> Tensor<B, 3> {
    reference::qkv_rotary_forward(QkvRotaryForward { qkv, heads, table: table.clone(), positions, inverse: false })
}

/// `[batch_size, seq_length, n_heads, head_dim]`.
pub(crate) fn attention<B: Backend>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    mask: &AttentionMask<B>,
    options: AttentionOptions,
) -> Tensor<B, 4> {
    reference::attention_forward(AttentionForward { query, key, value, mask: mask.clone(), options }).output
}

/// `[tokens, n_heads, head_dim]`.
pub(crate) fn cached_attention<B: Backend>(
    qkv: Tensor<B, 2>,
    heads: PackedHeads,
    placement: Placement<B>,
    options: AttentionOptions,
    at: &CachedTokens<B>,
    cache: &mut LayerCache<B>,
) -> Tensor<B, 3> {
    reference::cached_attention(CachedAttention { qkv, heads, placement, options, at, cache })
}

pub(crate) fn head_loss<B: Backend>(
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    options: HeadLossOptions,
) -> Tensor<B, 1> {
    reference::head_loss_forward(HeadLossForward {
        hidden,
        weight: weight.into(),
        targets,
        options,
        wanted: HeadLossWanted::Nothing,
    })
    .loss
}

pub(crate) fn head_sample<B: Backend>(
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    rows: &SampledRows<B>,
    positions: Tensor<B, 1, Int>,
    counts: Option<&mut TokenCounts<B>>,
) -> Tensor<B, 1, Int> {
    let logits = reference::logits(Logits { hidden, weight: Weight::Float(weight) });
    reference::draw(Draw { logits, rows, positions, counts })
}

pub(crate) fn optimizer_step<B: Backend>(parameters: Vec<AdamWParameter<B>>, adamw: &AdamW) -> Stepped<B> {
    reference::optimizer_step(OptimizerStep { parameters, adamw, norm: None })
}
