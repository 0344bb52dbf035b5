//! A small seeded generator with stable output across versions.

/// SplitMix64 (Steele, Lea and Flood, 2014), which gives a good stream for every seed.
pub(crate) struct Generator(u64);

impl Generator {
    /// The stream of a seed and two further words.
    pub(crate) fn new(seed: u64, first: u64, second: u64) -> Self {
        let mut generator = Self(seed);
        for word in [first, second] {
            generator.0 = generator.next() ^ word;
        }
        generator
    }

    /// 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which must not be zero.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// True with this probability.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        ((self.next() >> 11) as f64 / (1u64 << 53) as f64) < probability
    }

    /// Samples an index by its probability, and returns both.
    pub(crate) fn pick(&mut self, odds: impl Iterator<Item = (usize, f64)>) -> (usize, f64) {
        let mut point = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        let mut picked = (0, 1.0);
        for (index, probability) in odds {
            picked = (index, probability);
            if point < probability {
                break;
            }
            point -= probability;
        }
        picked
    }
}
