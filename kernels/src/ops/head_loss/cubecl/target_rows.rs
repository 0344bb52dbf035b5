//! What the pass over a chunk of logits needs besides them, whichever kernel makes it.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

/// Targets, losses and options of a chunk of logits, whose rows are those from `start` on.
pub(crate) struct TargetRows<'a, R: CubeRuntime> {
    /// `[rows]`, integers.
    pub(crate) targets: &'a CubeTensor<R>,
    /// `[rows]`, f32: where losses go.
    pub(crate) nats: &'a CubeTensor<R>,
    /// One over the number of targets that count, `[1]`, f32, where gradients are wanted.
    pub(crate) share: Option<&'a CubeTensor<R>>,
    pub(crate) start: usize,
    pub(crate) vocabulary: usize,
    pub(crate) smoothing: f64,
}

impl<R: CubeRuntime> TargetRows<'_, R> {
    /// What the loss takes off for the target's logit, and for each.
    pub(crate) fn weights(&self) -> [f32; 2] {
        [(1.0 - self.smoothing) as f32, (self.smoothing / self.vocabulary as f64) as f32]
    }
}
