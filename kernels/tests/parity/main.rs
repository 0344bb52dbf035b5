//! Each operation against its reference, on the backend that `FIRECLAY_TEST_BACKEND` names (`cpu` if unset).
//!
//! A backend that is not built in or not present fails the tests: nothing is skipped.

mod compare;
mod decoding;
mod operations;
mod plain;
mod recorder;
mod refusals;

use std::sync::{Mutex, PoisonError};

use fireclay_kernels::Backend;

/// Something that holds on every backend.
pub(crate) trait Claim {
    fn check<B: Backend>(device: B::Device);
}

/// Checks a claim on the backend under test, one claim at a time: Burn's autodiff keeps the graphs of all threads in
/// one place, and CubeCL has a stream for each thread, so that two at once disturb each other.
pub(crate) fn check<C: Claim>() {
    static DEVICE: Mutex<()> = Mutex::new(());
    let _guard = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    let name = std::env::var("FIRECLAY_TEST_BACKEND").unwrap_or_else(|_| "cpu".into());
    match name.as_str() {
        #[cfg(feature = "ndarray")]
        "cpu" => C::check::<burn::backend::NdArray>(Default::default()),
        #[cfg(feature = "wgpu")]
        "wgpu" | "vulkan" => C::check::<burn::backend::Wgpu>(Default::default()),
        #[cfg(feature = "cuda")]
        "cuda" => C::check::<burn::backend::Cuda>(Default::default()),
        name => panic!("backend {name} is not built into this test"),
    }
}

/// A test that is generic over the backend: `backend_test!(its_claim::<B>(device) { .. });`
#[macro_export]
macro_rules! backend_test {
    ($name:ident::<$backend:ident>($device:ident) $body:block) => {
        #[test]
        fn $name() {
            struct Holds;
            impl $crate::Claim for Holds {
                fn check<$backend: fireclay_kernels::Backend>($device: $backend::Device) $body
            }
            $crate::check::<Holds>();
        }
    };
}
