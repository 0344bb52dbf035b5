//! Process-wide choices: fused kernels or references, and the time limit of waits within kernels.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Implementations of the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// Each backend's fused kernels.
    Fused,
    /// The references, on every backend, for comparison.
    Reference,
}

static REFERENCE: AtomicBool = AtomicBool::new(false);

/// Chooses the implementations for the whole process. Choose before building a graph: forward and
/// backward must be of the same kind.
pub fn use_kernels(kernels: Kernels) {
    REFERENCE.store(kernels == Kernels::Reference, Ordering::Relaxed);
}

static WAIT_SECONDS: AtomicU32 = AtomicU32::new(1);

/// Sets the time limit in seconds, 1 to 3,600, after which blocks of a fused decode step
/// ([`DecodePlan`](crate::DecodePlan)) stop waiting for each other, for plans made from now on; 1
/// by default. A kernel that exceeds it ends with NaN logits. Raise it for devices that pause
/// kernels: those shared with other processes, or under a debugger.
///
/// # Panics
/// If it is outside of this range.
pub fn use_wait_seconds(seconds: u32) {
    assert!((1..=3600).contains(&seconds), "use_wait_seconds: {seconds}, which is not from 1 to 3600");
    WAIT_SECONDS.store(seconds, Ordering::Relaxed);
}

/// The limit set by [`use_wait_seconds`].
#[cfg(feature = "cuda")]
pub(crate) fn wait_seconds() -> u32 {
    WAIT_SECONDS.load(Ordering::Relaxed)
}

/// Whether kernels=reference is set.
pub(crate) fn reference_only() -> bool {
    REFERENCE.load(Ordering::Relaxed)
}

/// Calls the backend's implementation of an operation, or the function of the same name in the
/// module `reference` if [`use_kernels`] asks for it.
macro_rules! dispatch {
    ($backend:ident: $ops:ident::$method:ident($operands:expr)) => {{
        let operands: $crate::checked::Checked<_> = $operands;
        let _products = operands.products().enter();
        let result = match $crate::selection::reference_only() {
            true => {
                $crate::recorder::asked_for_reference();
                reference::$method::<$backend>(operands.into_inner())
            }
            false => <$backend as $ops>::$method(operands),
        };
        $crate::mutation::result(stringify!($method), result)
    }};
}
pub(crate) use dispatch;
