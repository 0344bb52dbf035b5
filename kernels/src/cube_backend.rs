//! [`Backend`] for CubeCL's runtimes, CUDA and WGPU: kernels written once. The bodies stand beside their operations,
//! in `cube.rs`.

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::activation::{self, Activation};
use crate::autodiff::{float, primitive};
use crate::cube::contiguous;
use crate::dropout::{self, Dropout};
use crate::embed;
use crate::optimizer::{self, AdamW, AdamWParameter};
use crate::rotary::cube::Turn;
use crate::rotary::{self, PackedHeads, RotaryTable};
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
