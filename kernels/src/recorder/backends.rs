//! What each backend can show of its work.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use super::{Probe, RecorderOps};

impl<B: RecorderOps, C: CheckpointStrategy> RecorderOps for Autodiff<B, C> {
    fn is_synchronous() -> bool {
        B::is_synchronous()
    }

    fn probe(device: &Self::Device) -> Option<Box<dyn Probe>> {
        B::probe(device)
    }
}

#[cfg(feature = "ndarray")]
impl RecorderOps for burn_ndarray::NdArray {
    fn is_synchronous() -> bool {
        true
    }
}

#[cfg(feature = "cubecl")]
impl<R, F, I, BT> RecorderOps for burn_cubecl::CubeBackend<R, F, I, BT>
where
    R: burn_cubecl::CubeRuntime,
    F: burn_cubecl::FloatElement,
    I: burn_cubecl::IntElement,
    BT: burn_cubecl::element::BoolElement,
{
    #[cfg(feature = "cuda")]
    fn probe(device: &Self::Device) -> Option<Box<dyn Probe>> {
        let cuda = R::name(&R::client(device)) == "cuda";
        cuda.then(|| Box::new(super::cupti::CuptiProbe::<R>::new(device)) as _)
    }
}
