//! Fused attention in CubeCL (Dao et al., 2022; Dao, 2023): tiles of scores stay on chip.
//!
//! The forward pass keeps a running maximum and sum per row, and saves the row's log-sum-exp. The
//! backward pass recomputes the probabilities from it, once with a cube per tile of keys for the
//! gradients of keys and values, and once with a cube per tile of queries: no two cubes write to
//! one location.

pub(super) mod heads;
mod mask;
mod parts;
mod simt;
mod softcap;
mod tensor_cores;

use burn::tensor::{DType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

pub(crate) use self::heads::{CubeMask, Dims, Heads, cube_mask};
use self::mask::SizesLaunch;
pub(crate) use self::softcap::capped;
#[cfg(feature = "cuda")]
use super::cuda::Fused;
use super::{
    AttentionBackward, AttentionForward, AttentionGradients, AttentionOps, AttentionOptions, AttentionOutput,
    QkvAttentionBackward, QkvAttentionForward,
};
use crate::checked::Checked;
use crate::cubecl::{contiguous, empty, vector_width};
use crate::packed_heads::PackedHeads;
use crate::random::RandomKey;
use crate::random::cubecl::RoundsLaunch;
use crate::recorder::fell_back;
use crate::tensor::{float, primitive};

impl<R, F, I, BT> AttentionOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn attention_forward(operands: Checked<AttentionForward<Self>>) -> AttentionOutput<Self> {
        let AttentionForward { query, key, value, mask, options } = operands.into_inner();
        let dims = Dims::new(query.dims(), key.dims());
        let [query, key, value] = [query, key, value].map(|x| Heads::from_tensor(primitive(x)));
        let (output, log_sum_exp) = attention_forward([&query, &key, &value], dims, &cube_mask(mask), options);
        AttentionOutput { output: float(output), log_sum_exp: float(log_sum_exp) }
    }

    fn attention_backward(operands: Checked<AttentionBackward<Self>>) -> AttentionGradients<Self> {
        let AttentionBackward { grad, query, key, value, saved, mask, options } = operands.into_inner();
        let dims = Dims::new(query.dims(), key.dims());
        let inputs = [query, key, value].map(|x| Heads::from_tensor(primitive(x)));
        let gradients = inputs.each_ref().map(|heads| heads.empty_like());
        attention_backward(
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

    fn qkv_attention_forward(operands: Checked<QkvAttentionForward<Self>>) -> AttentionOutput<Self> {
        let QkvAttentionForward { qkv, heads, mask, options } = operands.into_inner();
        let (dims, qkv) = (Dims::packed(qkv.dims(), heads), primitive(qkv));
        let inputs = packed(&qkv, heads);
        let (output, log_sum_exp) = attention_forward(inputs.each_ref(), dims, &cube_mask(mask), options);
        AttentionOutput { output: float(output), log_sum_exp: float(log_sum_exp) }
    }

    fn qkv_attention_backward(operands: Checked<QkvAttentionBackward<Self>>) -> Tensor<Self, 3> {
        let QkvAttentionBackward { grad, qkv, heads, saved, mask, options } = operands.into_inner();
        let (shape, dims, qkv) = (qkv.dims(), Dims::packed(qkv.dims(), heads), primitive(qkv));
        let gradient = empty(&qkv, shape, qkv.dtype);
        attention_backward(
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
}

/// Queries, keys and values in a packed tensor.
fn packed<R: CubeRuntime>(qkv: &CubeTensor<R>, heads: PackedHeads) -> [Heads<R>; 3] {
    [0, heads.n_heads, heads.n_heads + heads.n_kv_heads].map(|first| Heads::packed(qkv, first, heads.head_dim))
}

/// Attention of query, key and value: output `[batch_size, seq_length, n_heads, head_dim]` in the
/// query's dtype, and log-sum-exp `[batch_size, n_heads, seq_length, 1]` in f32.
pub(crate) fn attention_forward<R: CubeRuntime>(
    inputs: [&Heads<R>; 3],
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let Dims { batch_size, n_heads, seq_length, head_dim, .. } = dims;
    let like = &inputs[0].tensor;
    let output = Heads::from_rows(empty(like, [batch_size, seq_length, n_heads, head_dim], like.dtype));
    let log_sum_exp = empty(like, [batch_size, n_heads, seq_length, 1], DType::F32);
    #[cfg(feature = "cuda")]
    if let [query, key, value] = inputs
        && let Some(fused) = Fused::new(&[query, key, value, &output], dims, mask, options)
        && fused.forward(inputs, &output, &log_sum_exp)
    {
        return (output.tensor, log_sum_exp);
    }
    if takes_tensor_cores(&inputs, head_dim, options) {
        tensor_cores::forward(inputs, &output, &log_sum_exp, dims, mask, options);
    } else {
        simt::forward(inputs, &output, &log_sum_exp, dims, mask, options);
    }
    (output.tensor, log_sum_exp)
}

/// Writes the gradients of query, key and value, possibly into one tensor. `grad` is `[batch_size,
/// seq_length, n_heads, head_dim]`; output and log-sum-exp are from the forward pass.
pub(crate) fn attention_backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    [query, key, value]: [&Heads<R>; 3],
    [output, log_sum_exp]: [CubeTensor<R>; 2],
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
    [d_query, d_key, d_value]: [&Heads<R>; 3],
) {
    let (grad, output) = (Heads::from_rows(grad), Heads::from_rows(output));
    let rows = simt::row_statistics(&grad, &output, contiguous(log_sum_exp), dims);
    let inputs = [query, key, value, &grad];
    let all = [query, key, value, &grad, d_query, d_key, d_value];
    #[cfg(feature = "cuda")]
    if let Some(fused) = Fused::new(&all, dims, mask, options)
        && fused.backward(inputs, &rows, [d_query, d_key, d_value])
    {
        return;
    }
    if takes_tensor_cores(&all, dims.head_dim, options) {
        tensor_cores::backward_kv(inputs, &rows, [d_key, d_value], dims, mask, options);
        tensor_cores::backward_q(inputs, &rows, d_query, dims, mask, options);
    } else {
        simt::backward_kv(inputs, &rows, [d_key, d_value], dims, mask, options);
        simt::backward_q(inputs, &rows, d_query, dims, mask, options);
    }
}

/// Whether the kernels on tensor cores support heads and options.
fn takes_tensor_cores<R: CubeRuntime>(heads: &[&Heads<R>], head_dim: usize, options: AttentionOptions) -> bool {
    let supported = tensor_cores::supported(heads, head_dim);
    if supported && options.softcap.is_some() {
        fell_back("attention", R::name(&heads[0].tensor.client), "soft-capped scores are not for its tensor cores");
        return false;
    }
    supported
}

/// The widest vectors, up to `most`, that suit all heads.
fn width<R: CubeRuntime>(heads: &[&Heads<R>], head_dim: usize, most: usize) -> usize {
    let tensors: Vec<_> = heads.iter().map(|heads| &heads.tensor).collect();
    let lengths: Vec<_> = heads.iter().flat_map(|heads| heads.lengths()).chain([most, head_dim]).collect();
    vector_width(&tensors, &lengths)
}

fn sizes<R: CubeRuntime>(dims: Dims, mask: &CubeMask<R>, options: AttentionOptions) -> SizesLaunch<R> {
    SizesLaunch::new(
        dims.batch_size as u32,
        dims.n_heads as u32,
        dims.n_kv_heads as u32,
        dims.seq_length as u32,
        dims.keys as u32,
        mask.window(),
        options.scale as f32,
        options.softcap.unwrap_or(0.0) as f32,
        options.dropout.map_or(0, |dropout| dropout.threshold()),
        options.dropout.map_or(1.0, |dropout| dropout.scale() as f32),
    )
}

fn rounds<R: CubeRuntime>(options: AttentionOptions) -> RoundsLaunch<R> {
    options.dropout.map_or(RandomKey::new(0), |dropout| dropout.key).rounds()
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use burn::backend::Wgpu;
    use burn::tensor::{Distribution, Tensor};

    use super::*;
    use crate::ops::dropout::Dropout;

    const DIMS: Dims = Dims { batch_size: 2, n_heads: 4, n_kv_heads: 2, seq_length: 37, keys: 37, head_dim: 20 };

    fn assert_equal<const D: usize>(what: &str, a: Tensor<Wgpu, D>, b: Tensor<Wgpu, D>) {
        let difference = (a - b).abs().max().into_scalar();
        assert!(difference < 1e-6, "{what}: {difference:.1e}");
    }

    #[test]
    fn packed_heads_give_what_separate_ones_do_in_one_gradient() {
        let Dims { batch_size, n_heads, n_kv_heads, seq_length, head_dim, .. } = DIMS;
        let device = Default::default();
        let width = (n_heads + 2 * n_kv_heads) * head_dim;
        let random = |shape| Tensor::<Wgpu, 3>::random(shape, Distribution::Normal(0.0, 1.0), &device);
        let packed = random([batch_size, seq_length, width]);
        let grad = random([batch_size, seq_length, n_heads * head_dim]);
        // A gradient with any strides.
        let grad = grad.swap_dims(1, 2).mul_scalar(1.0).swap_dims(1, 2);
        let grad = grad.reshape([batch_size, seq_length, n_heads, head_dim]);
        let dropout = Some(Dropout { probability: 0.2, key: RandomKey::new(3) });
        let options = AttentionOptions::new(head_dim).with_dropout(dropout);
        let mask = CubeMask::Causal { window: Some(20) };

        let places = [0, n_heads, n_heads + n_kv_heads];
        let of = |x: &Tensor<Wgpu, 3>| places.map(|first| Heads::packed(&primitive(x.clone()), first, head_dim));
        let heads = of(&packed);
        let (output, log_sum_exp) = attention_forward(heads.each_ref(), DIMS, &mask, options);
        let d_packed = Tensor::<Wgpu, 3>::full([batch_size, seq_length, width], f32::NAN, &device);
        let saved = [output.clone(), log_sum_exp.clone()];
        let places_of_gradient = of(&d_packed);
        let d_heads = places_of_gradient.each_ref();
        attention_backward(primitive(grad.clone()), heads.each_ref(), saved, DIMS, &mask, options, d_heads);

        let slices = [n_heads, n_kv_heads, n_kv_heads].into_iter().zip(places);
        let slices: Vec<_> = slices.map(|(count, first)| first * head_dim..(first + count) * head_dim).collect();
        let part = |x: &Tensor<Wgpu, 3>, at: usize| {
            let heads = slices[at].len() / head_dim;
            let x = x.clone().slice([0..batch_size, 0..seq_length, slices[at].clone()]);
            x.reshape([batch_size, seq_length, heads, head_dim]).swap_dims(1, 2)
        };
        let separate = [0, 1, 2].map(|at| Heads::from_tensor(primitive(part(&packed, at))));
        let (wanted, wanted_sums) = attention_forward(separate.each_ref(), DIMS, &mask, options);
        let gradients = separate.each_ref().map(|heads| heads.empty_like());
        let saved = [wanted.clone(), wanted_sums.clone()];
        attention_backward(primitive(grad), separate.each_ref(), saved, DIMS, &mask, options, gradients.each_ref());
        assert_equal::<4>("output", float(output), float(wanted));
        assert_equal::<4>("log-sum-exp", float(log_sum_exp), float(wanted_sums));
        for (at, wanted) in gradients.into_iter().enumerate() {
            let wanted = float::<Wgpu, 4>(wanted.tensor).swap_dims(1, 2);
            assert_equal(&format!("gradient {at}"), part(&d_packed, at), wanted);
        }
    }
}
