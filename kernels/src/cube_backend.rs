//! [`Backend`] for CubeCL's runtimes, CUDA and WGPU: kernels written once. The bodies stand beside their operations,
//! in `cube.rs`.

use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::activation::{self, Activation};
use crate::attention::cube::{CubeMask, Dims, Heads};
use crate::attention::{self, AttentionGradients, AttentionMask, AttentionOptions, AttentionOutput};
use crate::autodiff::{float, primitive};
use crate::cube::contiguous;
use crate::dropout::{self, Dropout};
use crate::{Backend, RandomKey};

impl<R, F, I, BT> Backend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn random_bits(rows: usize, columns: usize, key: RandomKey, device: &Self::Device) -> Tensor<Self, 2, Int> {
        let bits = Tensor::<Self, 2, Int>::empty([rows, columns], (device, DType::I32)).into_primitive();
        Tensor::from_primitive(dropout::cube::random_bits(contiguous(bits), key))
    }

    fn dropout(x: Tensor<Self, 2>, dropout: Dropout) -> Tensor<Self, 2> {
        float(dropout::cube::dropout(primitive(x), dropout))
    }

    fn activate_forward(x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        float(activation::cube::activate(primitive(x), None, activation))
    }

    fn activate_backward(grad: Tensor<Self, 2>, x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        float(activation::cube::activate_backward(primitive(grad), primitive(x), None, activation))
    }

    fn attention_forward(
        query: Tensor<Self, 4>,
        key: Tensor<Self, 4>,
        value: Tensor<Self, 4>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
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
