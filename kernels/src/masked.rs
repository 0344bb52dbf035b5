//! The value of masked scores and logits.

/// Its exponential is zero relative to any real score. It is finite, so that a fully masked row
/// gives no NaN.
pub(crate) const MASKED: f32 = -1e30;
