//! Which bodies run: the fused kernels, or the references everywhere.

use std::sync::atomic::{AtomicBool, Ordering};

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

/// Whether the references are asked for. Only [`dispatch`] asks.
pub(crate) fn reference_only() -> bool {
    REFERENCE.load(Ordering::Relaxed)
}

/// Calls the backend's body of an operation, or the reference's, which stands in the module `reference` under the same
/// name, where [`use_kernels`] asked for it.
macro_rules! dispatch {
    ($backend:ident: $ops:ident::$method:ident($operands:expr)) => {{
        let operands: $crate::checked::Checked<_> = $operands;
        match $crate::selection::reference_only() {
            true => {
                $crate::recorder::asked_for_reference();
                reference::$method::<$backend>(operands.into_inner())
            }
            false => <$backend as $ops>::$method(operands),
        }
    }};
}
pub(crate) use dispatch;
