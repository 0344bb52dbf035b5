//! Log-probabilities of tokens in CubeCL, from basic operations.

use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::HeadLogProbsOps;

impl<R, F, I, BT> HeadLogProbsOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
}
