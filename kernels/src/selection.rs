//! What is chosen for the whole process: which bodies run, the fused kernels or the references everywhere; and how long
//! kernels wait.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The bodies of the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// Each backend's fused kernels.
    Fused,
    /// The references, on every backend: for comparison.
    Reference,
}

static REFERENCE: AtomicBool = AtomicBool::new(false);

/// Chooses the bodies for the whole process. Choose before a graph is built: a forward pass of one kind must not meet
/// the other's backward.
pub fn use_kernels(kernels: Kernels) {
    REFERENCE.store(kernels == Kernels::Reference, Ordering::Relaxed);
}

static WAIT_SECONDS: AtomicU32 = AtomicU32::new(1);

/// How many seconds, from 1 to 3,600, behind its start the blocks of a kernel for whole decode steps ([`DecodePlan`](crate::DecodePlan)) still wait for each other, for plans that are
/// made from now on: 1 unless this says otherwise. A kernel that would wait for longer ends, and its logits are no numbers. More is for devices that stop kernels in
/// between: those that others compute on, too, or a debugger.
///
/// # Panics
/// If it is none of these numbers.
pub fn use_wait_seconds(seconds: u32) {
    assert!((1..=3600).contains(&seconds), "use_wait_seconds: {seconds}, which is not from 1 to 3600");
    WAIT_SECONDS.store(seconds, Ordering::Relaxed);
}

/// What [`use_wait_seconds`] chose.
#[cfg(feature = "cuda")]
pub(crate) fn wait_seconds() -> u32 {
    WAIT_SECONDS.load(Ordering::Relaxed)
}

/// Whether kernels=reference is set.
pub(crate) fn reference_only() -> bool {
    REFERENCE.load(Ordering::Relaxed)
}

/// Calls the backend's body of an operation, or the reference's, which is in the module `reference` under the same name,
/// where [`use_kernels`] asked for it.
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
