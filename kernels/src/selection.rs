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

/// Whether the references are asked for.
pub(crate) fn reference_only() -> bool {
    REFERENCE.load(Ordering::Relaxed)
}
