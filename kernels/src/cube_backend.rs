//! [`Backend`] for CubeCL's runtimes, CUDA and WGPU: kernels written once. The bodies stand beside their operations,
//! in `cube.rs`.

use burn::tensor::backend::ExecutionError;
use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::autodiff::{float, primitive};
use crate::cubecl::reduce::sum_over_rows;
use crate::cubecl::{contiguous, empty};
use crate::ops::activation::{self, Activation};
use crate::ops::attention::cubecl::{CubeMask, Dims, Heads};
use crate::ops::attention::{self, AttentionGradients, AttentionMask, AttentionOptions, AttentionOutput};
use crate::ops::cached_attention::cubecl::{At, CubePlacement};
use crate::ops::cached_attention::{self, CachedTokens, LayerCache, Placement};
use crate::ops::dropout::{self, Dropout};
use crate::ops::embed;
use crate::ops::head_loss::{self, HeadLossOptions, HeadLossOutput};
use crate::ops::head_sample::{self, SampledRows, Sampling};
use crate::ops::linear::cubecl::gemm::{product, transposed};
use crate::ops::linear::cubecl::skinny::{
    CubeWeight, Ending, FEW_ROWS, floats_on_matrix_units, norm_project_few, on_matrix_units, project_few,
};
use crate::ops::linear::{self, LinearActivateOutput, LinearGradients};
use crate::ops::norm::cubecl::CubeNorm;
use crate::ops::norm::{self, Norm, NormGradients, NormKind, NormOutput};
use crate::ops::optimizer::{self, AdamW, AdamWParameter};
use crate::ops::rotary::cubecl::Turn;
use crate::ops::rotary::{self, RotaryTable};
use crate::ops::softmax;
use crate::ops::weight::cubecl::CubeInt8;
use crate::ops::weight::{self, Int8Weight, Weight};
use crate::packed_heads::PackedHeads;
use crate::random;
use crate::recorder::fell_back;
use crate::selection::reference_only;
use crate::{Backend, RandomKey};

/// Why a norm has no kernel.
const TOO_WIDE: &str = "its rows are too wide for the units of one cube";

impl<R, F, I, BT> Backend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    #[cfg(feature = "cuda")]
    fn probe(device: &Self::Device) -> Option<Box<dyn crate::recorder::Probe>> {
        let cuda = R::name(&R::client(device)) == "cuda";
        cuda.then(|| Box::new(crate::recorder::cupti::CuptiProbe::<R>::new(device)) as _)
    }

    fn finish_uploads(device: &Self::Device) -> Result<(), ExecutionError> {
        let client = R::client(device);
        // The runtime holds what it uploads until the second flush behind it, and launches alone flush by themselves.
        for _ in 0..2 {
            client.flush().map_err(|error| ExecutionError::WithContext { reason: error.to_string() })?;
        }
        <Self as burn::tensor::backend::Backend>::sync(device)
    }

    fn random_bits(rows: usize, columns: usize, key: RandomKey, device: &Self::Device) -> Tensor<Self, 2, Int> {
        if reference_only() {
            return random::reference::random_bits(rows, columns, key, device);
        }
        let bits = Tensor::<Self, 2, Int>::empty([rows, columns], (device, DType::I32)).into_primitive();
        Tensor::from_primitive(dropout::cubecl::random_bits(contiguous(bits), key))
    }

    fn dropout(x: Tensor<Self, 2>, dropout: Dropout) -> Tensor<Self, 2> {
        if reference_only() {
            return dropout::reference::dropout(x, dropout);
        }
        float(dropout::cubecl::dropout(primitive(x), dropout))
    }

    fn norm_forward(x: Tensor<Self, 2>, norm: &Norm<Self>) -> NormOutput<Self> {
        if reference_only() {
            return norm::reference::norm_forward(x, norm);
        }
        match norm::cubecl::norm_forward(primitive(x.clone()), cube_norm(norm)) {
            Some((output, mean, inverse_deviation)) => {
                NormOutput { output: float(output), mean: mean.map(float), inverse_deviation: float(inverse_deviation) }
            }
            None => {
                fell_back("norm", &<Self as burn::tensor::backend::Backend>::name(&x.device()), TOO_WIDE);
                norm::reference::norm_forward(x, norm)
            }
        }
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
        let residual = residual.map(|residual| residual.cast(x.dtype()));
        let inputs = [grad.clone().cast(x.dtype()), x.clone()].map(primitive);
        let mean = saved.mean.clone().map(primitive);
        let inverse = primitive(saved.inverse_deviation.clone());
        let [d_y, input] = inputs;
        let around = residual.clone().map(primitive);
        match norm::cubecl::norm_backward(d_y, input, mean, inverse, cube_norm(norm), around) {
            Some((d_x, d_gamma, d_beta)) => NormGradients {
                x: float(d_x),
                gamma: float(d_gamma),
                beta: norm.beta.as_ref().zip(d_beta).map(|(beta, d_beta)| {
                    let d_beta: Tensor<Self, 1> = float(d_beta);
                    d_beta.cast(beta.dtype())
                }),
            },
            None => {
                fell_back("norm backward", &<Self as burn::tensor::backend::Backend>::name(&x.device()), TOO_WIDE);
                norm::reference::norm_backward(grad, x, saved, norm, residual)
            }
        }
    }

    fn linear_forward(x: Tensor<Self, 2>, weight: Tensor<Self, 2>, bias: Option<Tensor<Self, 1>>) -> Tensor<Self, 2> {
        if reference_only() {
            return linear::reference::linear_forward(x, weight, bias);
        }
        if is_few(&x) {
            let ending = Ending { bias: bias.map(primitive), ..Ending::none(x.dtype()) };
            return float(project_few(primitive(x), CubeWeight::Float(primitive(weight)), ending));
        }
        float(linear::cubecl::project_add(primitive(x), primitive(weight), bias.map(primitive), None, None))
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
        let bias = has_bias.then(|| float(sum_over_rows(primitive(grad.clone()))));
        let (x, weight) = linear::cubecl::project_backward(primitive(grad), primitive(x), primitive(weight));
        LinearGradients { x: float(x), weight: float(weight), bias }
    }

    fn norm_linear(
        x: Tensor<Self, 2>,
        norm: Option<&Norm<Self>>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let Some(norm) = norm.filter(|_| !reference_only() && is_few(&x)) else {
            return linear::reference::norm_linear(x, norm, weight, bias);
        };
        let (x, weight) = (primitive(x), primitive(weight));
        if !floats_on_matrix_units(&x, &weight) {
            return linear::reference::norm_linear(float(x), Some(norm), float(weight), bias);
        }
        let ending = Ending { bias: bias.map(primitive), ..Ending::none(x.dtype) };
        float(norm_project_few(x, cube_norm(norm), CubeWeight::Float(weight), ending))
    }

    fn norm_gate_up(
        x: Tensor<Self, 2>,
        norm: Option<&Norm<Self>>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        activation: Activation,
    ) -> Tensor<Self, 2> {
        let Some(norm) = norm.filter(|_| !reference_only() && is_few(&x)) else {
            return linear::reference::norm_gate_up(x, norm, weight, bias, activation);
        };
        let (x, weight) = (primitive(x), primitive(weight));
        if !floats_on_matrix_units(&x, &weight) {
            return linear::reference::norm_gate_up(float(x), Some(norm), float(weight), bias, activation);
        }
        let ending = Ending { bias: bias.map(primitive), activation: Some(activation), ..Ending::none(x.dtype) };
        float(norm_project_few(x, cube_norm(norm), CubeWeight::Float(weight), ending))
    }

    fn linear_activate(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        activation: Activation,
    ) -> Tensor<Self, 2> {
        if reference_only() || !is_few(&x) {
            return Self::linear_activate_forward(x, weight, bias, activation).output;
        }
        let activation = Some(activation);
        let ending = Ending { bias: bias.map(primitive), activation, ..Ending::none(x.dtype()) };
        float(project_few(primitive(x), CubeWeight::Float(primitive(weight)), ending))
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
        let product = linear::cubecl::project(primitive(x), primitive(weight));
        let output = activation::cubecl::activate(product.clone(), bias.map(primitive), activation);
        LinearActivateOutput { output: float(output), saved: float(product) }
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
        let has_bias = bias.is_some();
        let bias = bias.map(primitive);
        let grad = activation::cubecl::activate_backward(primitive(grad), primitive(saved), bias, activation);
        Self::linear_backward(float(grad), x, weight, has_bias)
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
        if dropout.is_none() && is_few(&x) {
            let residual = Some(primitive(residual));
            let ending = Ending { bias: bias.map(primitive), residual, ..Ending::none(x.dtype()) };
            return float(project_few(primitive(x), CubeWeight::Float(primitive(weight)), ending));
        }
        let (bias, residual) = (bias.map(primitive), Some(primitive(residual)));
        float(linear::cubecl::project_add(primitive(x), primitive(weight), bias, dropout, residual))
    }

    fn softmax_forward(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if reference_only() {
            return softmax::reference::softmax(x);
        }
        float(softmax::cubecl::softmax(primitive(x)))
    }

    fn softmax_backward(grad: Tensor<Self, 2>, output: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if reference_only() {
            return softmax::reference::softmax_backward(grad, output);
        }
        let grad = grad.cast(output.dtype());
        float(softmax::cubecl::softmax_backward(primitive(grad), primitive(output)))
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
        head_loss::cubecl::head_loss_forward(hidden, weight, targets, options, gradients)
    }

    fn activate_forward(x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        if reference_only() {
            return activation::reference::activate(x, activation);
        }
        float(activation::cubecl::activate(primitive(x), None, activation))
    }

    fn activate_backward(grad: Tensor<Self, 2>, x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        if reference_only() {
            return activation::reference::activate_backward(grad, x, activation);
        }
        float(activation::cubecl::activate_backward(primitive(grad), primitive(x), None, activation))
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
        let dims = Dims::new(query.dims(), key.dims());
        let [query, key, value] = [query, key, value].map(|x| Heads::from_tensor(primitive(x)));
        let (output, log_sum_exp) =
            attention::cubecl::attention_forward([&query, &key, &value], dims, &cube_mask(mask), options);
        AttentionOutput { output: float(output), log_sum_exp: float(log_sum_exp) }
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
        let dims = Dims::new(query.dims(), key.dims());
        let inputs = [query, key, value].map(|x| Heads::from_tensor(primitive(x)));
        let gradients = inputs.each_ref().map(|heads| heads.empty_like());
        attention::cubecl::attention_backward(
            primitive(grad),
            inputs.each_ref(),
            [primitive(saved.output), primitive(saved.log_sum_exp)],
            dims,
            &cube_mask(mask),
            options,
            gradients.each_ref(),
        );
        let [query, key, value] = gradients.map(|heads| float::<Self, 4>(heads.tensor).swap_dims(1, 2));
        AttentionGradients { query, key, value }
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
        let (dims, qkv) = (packed_dims(&qkv, heads), primitive(qkv));
        let inputs = packed(&qkv, heads);
        let (output, log_sum_exp) =
            attention::cubecl::attention_forward(inputs.each_ref(), dims, &cube_mask(mask), options);
        AttentionOutput { output: float(output), log_sum_exp: float(log_sum_exp) }
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
        let (shape, dims, qkv) = (qkv.dims(), packed_dims(&qkv, heads), primitive(qkv));
        let gradient = empty(&qkv, shape, qkv.dtype);
        attention::cubecl::attention_backward(
            primitive(grad),
            packed(&qkv, heads).each_ref(),
            [primitive(saved.output), primitive(saved.log_sum_exp)],
            dims,
            &cube_mask(mask),
            options,
            packed(&gradient, heads).each_ref(),
        );
        float(gradient)
    }

    fn embed_forward(table: Tensor<Self, 2>, tokens: Tensor<Self, 2, Int>, dtype: FloatDType) -> Tensor<Self, 3> {
        if reference_only() {
            return embed::reference::embed(table, tokens, dtype);
        }
        float(embed::cubecl::embed_forward(primitive(table), tokens.into_primitive(), dtype.into(), None))
    }

    fn embed_add(table: Tensor<Self, 2>, tokens: Tensor<Self, 2, Int>, x: Tensor<Self, 3>) -> Tensor<Self, 3> {
        if reference_only() {
            return embed::reference::embed_add(table, tokens, x);
        }
        let dtype = x.dtype();
        float(embed::cubecl::embed_forward(primitive(table), tokens.into_primitive(), dtype, Some(primitive(x))))
    }

    fn embed_backward(grad: Tensor<Self, 2>, tokens: Tensor<Self, 1, Int>, vocabulary: usize) -> Tensor<Self, 2> {
        if reference_only() {
            return embed::reference::embed_backward(grad, tokens, vocabulary);
        }
        float(embed::cubecl::embed_backward(primitive(grad), tokens.into_primitive(), vocabulary))
    }

    fn next_positions(positions: Tensor<Self, 2, Int>, last: usize) -> Tensor<Self, 2, Int> {
        if reference_only() {
            return positions.add_scalar(1).clamp_max(last as i32);
        }
        Tensor::from_primitive(rotary::cubecl::next_positions(positions.into_primitive(), last))
    }

    fn cached_attention(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        placement: Placement<Self>,
        at: &CachedTokens<Self>,
        cache: &mut LayerCache<Self>,
    ) -> Tensor<Self, 4> {
        // Elsewhere the queries go to the same attention as without a cache.
        if reference_only() || heads.head_dim > MOST_COLUMNS {
            return cached_attention::reference::cached_attention(qkv, heads, placement, at, cache);
        }
        let [batch_size, seq_length, _] = qkv.dims();
        let (placement, qkv) = (cube_placement(placement), primitive(qkv));
        let held = [&cache.keys, &cache.values].map(|held| primitive(held.clone()));
        let places = cube_at(at);
        if seq_length == 1 {
            return float(cached_attention::cubecl::decode(qkv, heads, placement, &places, held.each_ref()));
        }
        let query = cached_attention::cubecl::rotary_append(qkv, heads, placement, &places, held.each_ref());
        let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
        let dims = Dims { batch_size, n_heads, n_kv_heads, seq_length, keys: at.keys, head_dim };
        let [keys, values] = held.map(Heads::from_tensor);
        let inputs = [&Heads::from_rows(query), &keys, &values];
        let options = AttentionOptions::new(head_dim);
        float(attention::cubecl::attention_forward(inputs, dims, &cube_mask(&at.mask()), options).0)
    }

    fn rotary_append(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        placement: Placement<Self>,
        at: &CachedTokens<Self>,
        cache: &mut LayerCache<Self>,
    ) -> Tensor<Self, 4> {
        if reference_only() {
            return cached_attention::reference::rotary_append(qkv, heads, placement, at, cache);
        }
        let held = [&cache.keys, &cache.values].map(|held| primitive(held.clone()));
        let placement = cube_placement(placement);
        let query =
            cached_attention::cubecl::rotary_append(primitive(qkv), heads, placement, &cube_at(at), held.each_ref());
        float::<Self, 4>(query).swap_dims(1, 2)
    }

    fn logits(hidden: Tensor<Self, 2>, weight: &Weight<Self>) -> Tensor<Self, 2> {
        if reference_only() {
            return head_sample::reference::logits(hidden, weight);
        }
        if is_few(&hidden) {
            return float(project_few(primitive(hidden), cube_weight(weight), Ending::none(DType::F32)));
        }
        let dtype = hidden.dtype();
        let weight = primitive(weight.clone().into_float(FloatDType::from(dtype)));
        float(product(primitive(hidden), transposed(weight), dtype, DType::F32))
    }

    fn draw(logits: Tensor<Self, 2>, sampling: &Sampling, rows: &mut SampledRows<Self>) -> Tensor<Self, 1, Int> {
        if reference_only() {
            return head_sample::reference::draw(logits, sampling, rows);
        }
        let counts = rows.counts.as_mut().map(|counts| {
            // Those written are counted where they lie, unless something else holds them or there are gaps between rows.
            counts.written.inplace(|written| {
                let written = primitive(written);
                let own = written.can_mut() && written.is_contiguous();
                float(if own { written } else { contiguous(written.copy()) })
            });
            [contiguous(primitive(counts.prompt.clone())), primitive(counts.written.clone())]
        });
        let streams = rows.streams.clone().into_primitive();
        Tensor::from_primitive(head_sample::cubecl::draw(primitive(logits), sampling, streams, counts))
    }

    fn int8_to_float(weight: &Int8Weight<Self>, dtype: FloatDType) -> Tensor<Self, 2> {
        if reference_only() {
            return weight::reference::int8_to_float(weight, dtype);
        }
        float(weight::cubecl::int8_to_float(cube_int8(weight), dtype.into()))
    }

    fn int8_embed(table: &Int8Weight<Self>, tokens: Tensor<Self, 2, Int>, dtype: FloatDType) -> Tensor<Self, 3> {
        if reference_only() {
            return weight::reference::int8_embed(table, tokens, dtype);
        }
        float(weight::cubecl::embed(cube_int8(table), tokens.into_primitive(), dtype.into()))
    }

    fn int8_linear(
        x: Tensor<Self, 2>,
        norm: Option<&Norm<Self>>,
        weight: &Int8Weight<Self>,
        bias: Option<Tensor<Self, 1>>,
        activation: Option<Activation>,
        residual: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        if reference_only() || !is_few(&x) {
            return weight::reference::int8_linear(x, norm, weight, bias, activation, residual);
        }
        let (bias, residual) = (bias.map(primitive), residual.map(primitive));
        let ending = Ending { bias, activation, residual, dtype: x.dtype() };
        let weight = CubeWeight::Int8(cube_int8(weight));
        match norm {
            Some(norm) if on_matrix_units(&primitive(x.clone()), &weight) => {
                float(norm_project_few(primitive(x), cube_norm(norm), weight, ending))
            }
            Some(norm) => float(project_few(primitive(Self::norm(x, norm)), weight, ending)),
            None => float(project_few(primitive(x), weight, ending)),
        }
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
        float(rotary::cubecl::rotary(primitive(x), Turn::new(table, positions, inverse)))
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
        float(rotary::cubecl::qkv_rotary(primitive(qkv), heads, Turn::new(table, positions, inverse)))
    }

    fn optimizer_step(
        parameters: Vec<AdamWParameter<Self>>,
        adamw: &AdamW,
    ) -> (Vec<AdamWParameter<Self>>, Tensor<Self, 1>) {
        if reference_only() {
            return optimizer::reference::optimizer_step(parameters, adamw);
        }
        optimizer::cubecl::optimizer_step(parameters, adamw)
    }
}

/// The widest heads that the kernels of cached attention take.
const MOST_COLUMNS: usize = 256;

/// Whether `x` has few enough rows for the kernels that read a weight once.
fn is_few<B: Backend>(x: &Tensor<B, 2>) -> bool {
    x.dims()[0] <= FEW_ROWS
}

/// A weight's tensors as the kernels take them.
fn cube_weight<R, F, I, BT>(weight: &Weight<CubeBackend<R, F, I, BT>>) -> CubeWeight<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    match weight {
        Weight::Float(weight) => CubeWeight::Float(primitive(weight.clone())),
        Weight::Int8(weight) => CubeWeight::Int8(cube_int8(weight)),
    }
}

/// Bytes and scales as the kernels take them.
fn cube_int8<R, F, I, BT>(weight: &Int8Weight<CubeBackend<R, F, I, BT>>) -> CubeInt8<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    CubeInt8 { packed: weight.packed.clone().into_primitive(), scales: primitive(weight.scales.clone()) }
}

/// The placement's tensors as the kernels take them. Both norms are there, or none.
fn cube_placement<R, F, I, BT>(placement: Placement<CubeBackend<R, F, I, BT>>) -> CubePlacement<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let norms = placement.query_norm.zip(placement.key_norm);
    CubePlacement {
        norms: norms.map(|(query, key)| ([query.gamma, key.gamma].map(primitive), query.epsilon)),
        rotary: placement.rotary.map(|table| [table.cos, table.sin].map(primitive)),
    }
}

/// Positions and window as the kernels take them.
fn cube_at<R, F, I, BT>(at: &CachedTokens<CubeBackend<R, F, I, BT>>) -> At<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    At { positions: at.positions.clone().into_primitive(), keys: at.keys, window: at.window }
}

/// The sizes of an attention over packed heads.
fn packed_dims<B: Backend>(qkv: &Tensor<B, 3>, heads: PackedHeads) -> Dims {
    let [batch_size, seq_length, _] = qkv.dims();
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    Dims { batch_size, n_heads, n_kv_heads, seq_length, keys: seq_length, head_dim }
}

/// Queries, keys and values in a packed tensor.
fn packed<R: CubeRuntime>(qkv: &CubeTensor<R>, heads: PackedHeads) -> [Heads<R>; 3] {
    [0, heads.n_heads, heads.n_heads + heads.n_kv_heads].map(|first| Heads::packed(qkv, first, heads.head_dim))
}

/// The mask's tensors as the kernels take them.
fn cube_mask<R, F, I, BT>(mask: &AttentionMask<CubeBackend<R, F, I, BT>>) -> CubeMask<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    match mask.clone() {
        AttentionMask::None => CubeMask::None,
        AttentionMask::Causal { window } => CubeMask::Causal { window },
        AttentionMask::Positions { positions, window } => {
            CubeMask::Positions { positions: positions.into_primitive(), window }
        }
        AttentionMask::Lengths(lengths) => CubeMask::Lengths(lengths.into_primitive()),
    }
}

/// The norm's weights as primitives.
fn cube_norm<R, F, I, BT>(norm: &Norm<CubeBackend<R, F, I, BT>>) -> CubeNorm<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    CubeNorm {
        layer: norm.kind == NormKind::Layer,
        gamma: primitive(norm.gamma.clone()),
        beta: norm.beta.clone().map(primitive),
        epsilon: norm.epsilon,
    }
}
