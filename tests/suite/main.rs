//! The whole suite in one binary, on the backend that `FIRECLAY_TEST_BACKEND` names (`cpu` if
//! unset).
//!
//! A backend that is not built in or not present fails the tests. A test that needs more than the
//! machine has, such as a dtype, is skipped, counted and printed; with `FIRECLAY_TEST_STRICT=1` it
//! fails.

mod adapters;
mod chats;
mod classify;
mod cli;
#[path = "../parity/compare.rs"]
#[allow(dead_code, reason = "some comparisons are for operations alone")]
mod compare;
mod configs;
mod data;
mod decoding;
mod experts;
mod export;
mod families;
mod fine_tuning;
mod gguf;
mod golden;
mod gradients;
mod hub;
mod hub_families;
mod learning;
#[cfg(feature = "mutation")]
#[path = "../parity/mutation.rs"]
mod mutation;
mod packed;
mod peft;
mod preferences;
mod profiling;
#[cfg(target_os = "linux")]
mod ranks;
mod resume;
mod runs;
mod scheduling;
#[cfg(feature = "serve")]
mod serving;
#[path = "../parity/skip.rs"]
mod skip;
mod tagger;
mod templates;
mod traffic;
mod utterances;
mod whole_steps;

use std::sync::{Mutex, PoisonError};

use clap::ValueEnum;
use fireclay::backend::{BackendName, OnBackend};

/// Which of the two test binaries of the mutation run this is.
#[cfg(feature = "mutation")]
pub(crate) const IS_THE_SUITE: bool = true;

/// The backend under test, by its name.
#[cfg(feature = "mutation")]
pub(crate) fn backend_name() -> String {
    std::env::var("FIRECLAY_TEST_BACKEND").unwrap_or_else(|_| "cpu".into())
}

/// The backend under test.
pub(crate) fn backend() -> BackendName {
    let name = std::env::var("FIRECLAY_TEST_BACKEND").unwrap_or_else(|_| "cpu".into());
    BackendName::from_str(&name, true).expect("FIRECLAY_TEST_BACKEND names a backend")
}

/// Runs a test's work on the backend under test, one at a time: some tests count device operations,
/// and Burn's autodiff shares its graphs between threads.
pub(crate) fn run(work: impl OnBackend<Output = ()> + Send) {
    static DEVICE: Mutex<()> = Mutex::new(());
    // A failed test must not affect the next one.
    let _guard = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    backend().run(work).expect("the backend under test works");
}

/// A test that is generic over the backend: `backend_test!(its_claim::<B>(device) { .. });`
#[macro_export]
macro_rules! backend_test {
    ($name:ident::<$backend:ident>($device:ident) $body:block) => {
        #[test]
        fn $name() {
            struct Claim;
            impl fireclay::backend::OnBackend for Claim {
                type Output = ();
                fn run<$backend: fireclay_kernels::Backend>(
                    self,
                    context: fireclay::backend::RunContext<$backend>,
                ) -> Result<(), fireclay::Failure> {
                    let $device = context.device;
                    $body
                    Ok(())
                }
            }
            $crate::run(Claim);
        }
    };
}
