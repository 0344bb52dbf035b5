//! Each operation against its reference, on the backend that `FIRECLAY_TEST_BACKEND` names (`cpu`
//! if unset).
//!
//! A backend that is not built in or not present fails the tests. A test that needs more than the
//! device has, such as a dtype, is skipped, counted and printed; with `FIRECLAY_TEST_STRICT=1` it
//! fails.

mod added_gradients;
mod compare;
mod formats;
mod harness;
#[cfg(feature = "mutation")]
mod mutation;
mod ops;
mod plain;
mod recorder;
mod refusals;
mod skip;
mod threads;

use std::sync::{Mutex, PoisonError};

use fireclay_kernels::Backend;

/// A claim about every backend.
pub(crate) trait Claim {
    fn check<B: Backend>(device: B::Device);
}

/// Which of the two test binaries of the mutation run this is.
#[cfg(feature = "mutation")]
pub(crate) const IS_THE_SUITE: bool = false;

/// Set in a process whose threads have separate streams.
pub(crate) const OWN_STREAMS: &str = "FIRECLAY_TEST_OWN_STREAMS";

/// The backend under test.
pub(crate) fn backend_name() -> String {
    std::env::var("FIRECLAY_TEST_BACKEND").unwrap_or_else(|_| "cpu".into())
}

/// Checks a claim on the backend under test, one claim at a time: each may need the device's whole
/// memory.
pub(crate) fn check<C: Claim>() {
    static DEVICE: Mutex<()> = Mutex::new(());
    let _guard = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if std::env::var_os(OWN_STREAMS).is_none() {
        fireclay_kernels::devices::configure(None);
    }
    match backend_name().as_str() {
        #[cfg(feature = "ndarray")]
        "cpu" => check_on::<burn::backend::NdArray, C>(),
        #[cfg(feature = "wgpu")]
        "wgpu" | "vulkan" => check_on::<burn::backend::Wgpu, C>(),
        #[cfg(feature = "cuda")]
        "cuda" => check_on::<burn::backend::Cuda, C>(),
        name => panic!("backend {name} is not built into this test"),
    }
}

/// Checks a claim, and that the device has no unread errors.
fn check_on<B: Backend, C: Claim>() {
    let device = B::Device::default();
    C::check::<B>(device.clone());
    B::sync(&device).expect("all launches succeed");
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
