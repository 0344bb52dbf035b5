//! Operands of a pass over a chunk of logits, for any kernel.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

/// Targets, losses and options of a chunk of logits, with rows from `start` on.
pub(crate) struct TargetRows<'a, R: CubeRuntime> {
    /// `[rows]`, integers.
    pub(crate) targets: &'a CubeTensor<R>,
    /// Output losses, `[rows]`, f32.
    pub(crate) nats: &'a CubeTensor<R>,
    /// One over the number of targets that count, `[1]`, f32, if gradients are requested.
    pub(crate) share: Option<&'a CubeTensor<R>>,
    pub(crate) start: usize,
    pub(crate) vocabulary: usize,
    pub(crate) smoothing: f64,
}

impl<R: CubeRuntime> TargetRows<'_, R> {
    /// Weights of the target's logit, and of every logit.
    pub(crate) fn weights(&self) -> [f32; 2] {
        [(1.0 - self.smoothing) as f32, (self.smoothing / self.vocabulary as f64) as f32]
    }
}
