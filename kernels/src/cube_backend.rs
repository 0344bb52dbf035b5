//! [`Backend`] for CubeCL's runtimes, CUDA and WGPU: kernels written once. The bodies stand beside their operations,
//! in `cube.rs`.

use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::activation::{self, Activation};
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
    #[cfg(feature = "cuda")]
    fn probe(device: &Self::Device) -> Option<Box<dyn crate::recorder::Probe>> {
        let cuda = R::name(&R::client(device)) == "cuda";
        cuda.then(|| Box::new(crate::recorder::cupti::CuptiProbe::<R>::new(device)) as _)
    }

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
}
