//! Soft-capping of scores.

use cubecl::prelude::*;

/// Beyond it, tanh is one in f32; some devices overflow.
const LARGEST: f32 = 15.0;

/// `cap * tanh(score / cap)`, or the score if `cap` is zero.
#[cube]
pub(crate) fn capped(score: f32, cap: f32) -> f32 {
    let mut capped = score;
    if cap > 0.0f32 {
        capped = cap * min(max(score / cap, -LARGEST), LARGEST).tanh();
    }
    capped
}

/// The derivative of [`capped`], from its result.
#[cube]
pub(super) fn slope(capped: f32, cap: f32) -> f32 {
    let mut slope = 1.0f32;
    if cap > 0.0f32 {
        let tanh = capped / cap;
        slope = 1.0f32 - tanh * tanh;
    }
    slope
}
