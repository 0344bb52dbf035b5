//! What stands for a score or logit that a softmax leaves out.

/// Its exponential is zero beside any real score. It is not negative infinity, so that a row in which everything is masked
/// gives no NaN.
pub(crate) const MASKED: f32 = -1e30;
