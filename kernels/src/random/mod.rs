//! Random bits as a pure function of a key and a position, without state to keep or save.

#[cfg(feature = "cubecl")]
pub(crate) mod cubecl;
pub(crate) mod reference;

/// Random bits are integers below this: 24 bits, exact in f32.
pub(crate) const RANGE: u32 = 1 << 24;

pub(crate) const ROUNDS: usize = 5;
const MULTIPLIERS: [u32; ROUNDS] = [0x6b43, 0x5a2d, 0x72e5, 0x4f1b, 0x6e4b];

/// The key of a random stream: a seed, with further words folded in (step, layer, site).
///
/// ```
/// use fireclay_kernels::RandomKey;
/// let key = RandomKey::new(7).fold(100).fold(3);
/// assert_eq!(key.bits(5, 9), RandomKey::new(7).fold(100).fold(3).bits(5, 9));
/// assert_ne!(key.bits(5, 9), key.bits(9, 5));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomKey {
    key: u64,
    /// Added to the number of a row.
    first_row: u32,
}

impl RandomKey {
    /// The key of a seed.
    pub fn new(seed: u64) -> Self {
        Self { key: mix(seed ^ 0x243f_6a88_85a3_08d3), first_row: 0 }
    }

    /// A new key that depends on this one and on `word`.
    pub fn fold(self, word: u64) -> Self {
        let key = mix(self.key.rotate_left(23) ^ mix(word.wrapping_add(0x1319_8a2e_0370_7344)));
        Self { key, ..self }
    }

    /// The same bits, with rows counted from `first_row`: row 0 of the new key has the bits of
    /// `first_row` of this one. For a process that has only some of the rows.
    pub fn from_row(self, first_row: usize) -> Self {
        Self { first_row: self.first_row.wrapping_add(first_row as u32), ..self }
    }

    /// The 24 random bits at (`row`, `column`): the definition that every kernel reproduces.
    ///
    /// Two Feistel ciphers of five rounds on 16-bit halves, the first over the row, the second over
    /// the column and the first one's output. A product of two 16- and 15-bit numbers fits 31 bits,
    /// so that signed 32-bit integers, all that some devices have, never overflow.
    pub fn bits(self, row: u32, column: u32) -> u32 {
        self.row(row).bits(column)
    }

    /// The state shared by a row's bits.
    pub(crate) fn row(self, row: u32) -> RowBits {
        let (row_keys, keys) = self.round_keys();
        let row = row.wrapping_add(self.first_row);
        let (left, right) = feistel(row & 0xffff, row >> 16, row_keys);
        RowBits { left, right, keys }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn first_row(self) -> u32 {
        self.first_row
    }

    /// 32 bits of the key itself.
    pub(crate) fn word(self) -> u32 {
        self.key as u32
    }

    /// The encrypted row index, two halves in one word: a permutation of all rows.
    pub(crate) fn row_word(self, row: u32) -> u32 {
        let RowBits { left, right, .. } = self.row(row);
        left | (right << 16)
    }

    /// A uniform number in (0, 1) at (`row`, `column`).
    pub fn uniform(self, row: u32, column: u32) -> f64 {
        (f64::from(self.bits(row, column)) + 0.5) / f64::from(RANGE)
    }

    /// 16-bit round keys for rows and for columns.
    pub(crate) fn round_keys(self) -> ([u32; ROUNDS], [u32; ROUNDS]) {
        let expand = |word: u64| {
            let more = mix(word);
            std::array::from_fn(|at| ((if at < 4 { word >> (16 * at) } else { more }) & 0xffff) as u32)
        };
        (expand(self.key), expand(mix(self.key ^ 0xa409_3822_299f_31d0)))
    }
}

/// The random bits of a row: the second cipher, in a vectorisable loop over columns.
#[derive(Clone, Copy)]
pub(crate) struct RowBits {
    left: u32,
    right: u32,
    keys: [u32; ROUNDS],
}

impl RowBits {
    /// The 24 random bits at `column`.
    #[inline(always)]
    pub(crate) fn bits(&self, column: u32) -> u32 {
        let (left, right) = self.halves(column);
        (left << 8) | (right >> 8)
    }

    /// Two 16-bit values at `column`.
    #[inline(always)]
    fn halves(&self, column: u32) -> (u32, u32) {
        feistel((column & 0xffff) ^ self.left, (column >> 16) ^ self.right, self.keys)
    }

    /// Applies [`Dropout`](crate::Dropout) to a row's `values` from column `first` on, two columns
    /// per cipher output.
    #[cfg(feature = "ndarray")]
    #[inline(always)]
    pub(crate) fn drop(&self, first: u32, values: &mut [f32], threshold: u32, scale: f32) {
        let kept = |value: f32, half: u32| if half < threshold { 0.0 } else { value * scale };
        let odd = usize::from(first % 2 == 1 && !values.is_empty());
        let last = (first + values.len() as u32).saturating_sub(1);
        let (head, values) = values.split_at_mut(odd);
        if let [value] = head {
            *value = kept(*value, self.halves(first / 2).1);
        }
        let mut pairs = values.chunks_exact_mut(2);
        let pair = first.div_ceil(2);
        for (pair, values) in (pair..).zip(&mut pairs) {
            let (even, odd) = self.halves(pair);
            values[0] = kept(values[0], even);
            values[1] = kept(values[1], odd);
        }
        if let [value] = pairs.into_remainder() {
            *value = kept(*value, self.halves(last / 2).0);
        }
    }
}

/// SplitMix64's finalizer (Steele, Lea and Flood, 2014).
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[inline(always)]
fn feistel(mut left: u32, mut right: u32, keys: [u32; ROUNDS]) -> (u32, u32) {
    for (key, multiplier) in keys.into_iter().zip(MULTIPLIERS) {
        let product = (right ^ key) * multiplier;
        (left, right) = (right, left ^ ((product ^ (product >> 15)) & 0xffff));
    }
    (left, right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_uniform_and_uncorrelated() {
        let key = RandomKey::new(1);
        let (rows, columns) = (500u32, 400u32);
        let n = f64::from(rows * columns);
        let mut ones = [0u32; 24];
        let (mut sum, mut next_column, mut next_row, mut next_key) = (0.0, 0.0, 0.0, 0.0);
        for row in 0..rows {
            for column in 0..columns {
                let bits = key.bits(row, column);
                for (bit, count) in ones.iter_mut().enumerate() {
                    *count += (bits >> bit) & 1;
                }
                let centred = |bits: u32| f64::from(bits) / f64::from(RANGE) - 0.5;
                sum += centred(bits);
                next_column += centred(bits) * centred(key.bits(row, column + 1));
                next_row += centred(bits) * centred(key.bits(row + 1, column));
                next_key += centred(bits) * centred(key.fold(1).bits(row, column));
            }
        }
        // Five standard deviations of each statistic.
        let bound = 5.0 / n.sqrt();
        assert!((sum / n).abs() < bound * 0.289, "mean {}", sum / n);
        for correlation in [next_column, next_row, next_key] {
            assert!((correlation / n * 12.0).abs() < bound, "correlation {}", correlation / n * 12.0);
        }
        for (bit, count) in ones.into_iter().enumerate() {
            assert!((f64::from(count) / n - 0.5).abs() < bound * 0.5, "bit {bit}: {count}");
        }
    }

    #[test]
    #[cfg(feature = "ndarray")]
    fn a_part_of_a_row_is_dropped_as_in_the_whole() {
        let bits = RandomKey::new(5).row(17);
        let threshold = 1 << 14;
        let mut whole = [1.0f32; 41];
        bits.drop(0, &mut whole, threshold, 2.0);
        for (column, value) in whole.into_iter().enumerate() {
            let (even, odd) = bits.halves(column as u32 / 2);
            let half = if column % 2 == 0 { even } else { odd };
            assert_eq!(value, if half < threshold { 0.0 } else { 2.0 }, "column {column}");
        }
        assert!(whole.contains(&0.0) && whole.contains(&2.0));
        for (first, end) in [(0, 0), (1, 1), (1, 2), (2, 3), (3, 8), (4, 9), (5, 41), (40, 41)] {
            let mut part = vec![1.0f32; end - first];
            bits.drop(first as u32, &mut part, threshold, 2.0);
            assert_eq!(part, whole[first..end], "{first}..{end}");
        }
    }

    #[test]
    fn no_two_places_of_a_row_collide_more_than_chance() {
        let key = RandomKey::new(3).fold(9);
        let mut seen: Vec<u32> = (0..20_000).map(|column| key.bits(70_000, column)).collect();
        seen.sort_unstable();
        seen.dedup();
        // 20,000 draws of 2^24 values: 12 collisions expected.
        assert!(seen.len() > 20_000 - 60, "{}", seen.len());
    }
}
