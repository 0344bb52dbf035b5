//! [`Backend`] for CubeCL's runtimes, CUDA and WGPU: kernels written once. The bodies stand beside their operations,
//! in `cube.rs`.

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::activation::{self, Activation};
use crate::attention::cube::{CubeMask, Dims, Heads};
use crate::attention::{self, AttentionGradients, AttentionMask, AttentionOptions, AttentionOutput};
use crate::autodiff::{float, primitive};
use crate::cube::{contiguous, empty};
use crate::dropout::{self, Dropout};
use crate::embed;
use crate::linear::{self, LinearActivateOutput, LinearGradients};
use crate::optimizer::{self, AdamW, AdamWParameter};
use crate::random;
use crate::rotary::cube::Turn;
use crate::rotary::{self, PackedHeads, RotaryTable};
use crate::selection::reference_only;
use crate::{Backend, RandomKey};

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

    fn random_bits(rows: usize, columns: usize, key: RandomKey, device: &Self::Device) -> Tensor<Self, 2, Int> {
        if reference_only() {
            return random::reference::random_bits(rows, columns, key, device);
        }
        let bits = Tensor::<Self, 2, Int>::empty([rows, columns], (device, DType::I32)).into_primitive();
        Tensor::from_primitive(dropout::cube::random_bits(contiguous(bits), key))
    }

    fn dropout(x: Tensor<Self, 2>, dropout: Dropout) -> Tensor<Self, 2> {
        if reference_only() {
            return dropout::reference::dropout(x, dropout);
        }
        float(dropout::cube::dropout(primitive(x), dropout))
    }

    fn linear_forward(x: Tensor<Self, 2>, weight: Tensor<Self, 2>, bias: Option<Tensor<Self, 1>>) -> Tensor<Self, 2> {
        if reference_only() {
            return linear::reference::linear_forward(x, weight, bias);
        }
        let product = float(linear::cube::project(primitive(x), primitive(weight)));
        match bias {
            Some(bias) => {
                let dtype = product.dtype();
                product + bias.cast(dtype).unsqueeze()
            }
            None => product,
        }
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
        let bias = has_bias.then(|| grad.clone().cast(DType::F32).sum_dim(0).squeeze_dim::<1>(0));
        let (x, weight) = linear::cube::project_backward(primitive(grad), primitive(x), primitive(weight));
        LinearGradients { x: float(x), weight: float(weight), bias }
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
        let product = linear::cube::project(primitive(x), primitive(weight));
        let output = activation::cube::activate(product.clone(), bias.map(primitive), activation);
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
        let grad = activation::cube::activate_backward(primitive(grad), primitive(saved), bias, activation);
        Self::linear_backward(float(grad), x, weight, has_bias)
    }

    fn activate_forward(x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        if reference_only() {
            return activation::reference::activate(x, activation);
        }
        float(activation::cube::activate(primitive(x), None, activation))
    }

    fn activate_backward(grad: Tensor<Self, 2>, x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        if reference_only() {
            return activation::reference::activate_backward(grad, x, activation);
        }
        float(activation::cube::activate_backward(primitive(grad), primitive(x), None, activation))
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
            attention::cube::attention_forward([&query, &key, &value], dims, &cube_mask(mask), options);
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
        attention::cube::attention_backward(
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
            let [query, key, value] = heads.split(qkv);
            return attention::reference::attention_forward(query, key, value, mask, options);
        }
        let (dims, qkv) = (packed_dims(&qkv, heads), primitive(qkv));
        let inputs = packed(&qkv, heads);
        let (output, log_sum_exp) =
            attention::cube::attention_forward(inputs.each_ref(), dims, &cube_mask(mask), options);
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
        attention::cube::attention_backward(
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
        float(embed::cube::embed_forward(primitive(table), tokens.into_primitive(), dtype.into()))
    }

    fn embed_backward(
        grad: Tensor<Self, 2>,
        tokens: Tensor<Self, 1, Int>,
        vocabulary: usize,
        dtype: FloatDType,
    ) -> Tensor<Self, 2> {
        float(embed::cube::embed_backward(primitive(grad), tokens.into_primitive(), vocabulary, dtype.into()))
    }

    fn rotary(
        x: Tensor<Self, 4>,
        table: &RotaryTable<Self>,
        positions: Tensor<Self, 2, Int>,
        inverse: bool,
    ) -> Tensor<Self, 4> {
        float(rotary::cube::rotary(primitive(x), Turn::new(table, positions, inverse)))
    }

    fn qkv_rotary(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        table: &RotaryTable<Self>,
        positions: Tensor<Self, 2, Int>,
        inverse: bool,
    ) -> Tensor<Self, 3> {
        float(rotary::cube::qkv_rotary(primitive(qkv), heads, Turn::new(table, positions, inverse)))
    }

    fn optimizer_step(
        parameters: Vec<AdamWParameter<Self>>,
        adamw: &AdamW,
    ) -> (Vec<AdamWParameter<Self>>, Tensor<Self, 1>) {
        optimizer::cube::optimizer_step(parameters, adamw)
    }
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
