//! Fused decode steps on CubeCL devices: those of CUDA with a kernel.

use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::DecodeStepOps;
#[cfg(feature = "cuda")]
use super::{Declined, DecodeBody, DecodePlanned, DecodeStep, Decoded};
#[cfg(feature = "cuda")]
use crate::checked::Checked;

impl<R, F, I, BT> DecodeStepOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    #[cfg(feature = "cuda")]
    fn decode_plan(planned: Checked<DecodePlanned<'_, Self>>) -> Result<DecodeBody, Declined> {
        super::cuda::plan(planned)
    }

    #[cfg(feature = "cuda")]
    fn decode_step(operands: Checked<DecodeStep<'_, Self>>) -> Result<Decoded<Self>, Declined> {
        super::cuda::decode_step(operands)
    }
}
