//! What each backend can record.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

use super::{Memory, Probe, RecorderOps};

impl<B: RecorderOps, C: CheckpointStrategy> RecorderOps for Autodiff<B, C> {
    fn is_synchronous() -> bool {
        B::is_synchronous()
    }

    fn memory(device: &Self::Device) -> Option<Memory> {
        B::memory(device)
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
    fn memory(device: &Self::Device) -> Option<Memory> {
        let usage = R::client(device).memory_usage().ok()?;
        Some(Memory { in_use: usage.bytes_in_use, reserved: usage.bytes_reserved })
    }

    #[cfg(feature = "cuda")]
    fn probe(device: &Self::Device) -> Option<Box<dyn Probe>> {
        let cuda = R::name(&R::client(device)) == "cuda";
        cuda.then(|| Box::new(super::cupti::CuptiProbe::<R>::new(device)) as _)
    }
}
