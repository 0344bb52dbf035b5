//! Number of targets in a batch.

/// Targets: tokens or tags, intents, and preference pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TargetCounts {
    pub(crate) tokens: usize,
    pub(crate) intents: usize,
    pub(crate) pairs: usize,
}

impl TargetCounts {
    /// Their shares of `whole`.
    pub(crate) fn shares(self, whole: Self) -> (f64, f64) {
        let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
        (share(self.tokens, whole.tokens), share(self.intents, whole.intents))
    }
}

impl std::ops::Add for TargetCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            intents: self.intents + other.intents,
            pairs: self.pairs + other.pairs,
        }
    }
}
