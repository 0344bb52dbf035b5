//! AWQ (Lin et al., 2023), in the layout of AutoAWQ's `gemm` version, 4 bits.
//!
//! ```text
//! qweight   [d_input, d_output / 8]   words, whose nibbles are of outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight
//! qzeros    [groups, d_output / 8]    the same
//! scales    [groups, d_output]
//! weight    = scale * (code - zero)
//! ```

use super::{CodedMatrix, Coding, word};

/// Outputs per word.
const PACKED: usize = 8;
/// The nibble of each output.
const PLACES: [usize; PACKED] = [0, 4, 1, 5, 2, 6, 3, 7];
/// Words unpacked together.
const TILE: usize = 16;

/// The tensors of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Awq<'a> {
    /// `[d_output, d_input]`.
    pub dims: [usize; 2],
    /// Inputs per group.
    pub group: usize,
    /// Little-endian words.
    pub qweight: &'a [u8],
    /// Little-endian words; None for zeros of 8.
    pub qzeros: Option<&'a [u8]>,
    /// `[groups, d_output]`.
    pub scales: &'a [f32],
}

fn nibble(word: u32, output: usize) -> u8 {
    (word >> (4 * PLACES[output % PACKED]) & 15) as u8
}

impl Awq<'_> {
    /// Unpacks the matrix.
    pub fn unpack(&self) -> CodedMatrix {
        let Self { dims: [outputs, inputs], group, .. } = *self;
        let words = outputs / PACKED;
        let mut codes = vec![0; outputs * inputs];
        for first in (0..words).step_by(TILE) {
            for input in 0..inputs {
                for at in first..words.min(first + TILE) {
                    let packed = word(self.qweight, input * words + at);
                    for output in PACKED * at..PACKED * (at + 1) {
                        codes[output * inputs + input] = nibble(packed, output);
                    }
                }
            }
        }
        let groups = self.scales.len() / outputs.max(1);
        let each = |output: usize| (0..groups).map(move |of| (of, output));
        let all = || (0..outputs).flat_map(each);
        let zero = |(of, output): (usize, usize)| match self.qzeros {
            Some(zeros) => f32::from(nibble(word(zeros, of * words + output / PACKED), output)),
            None => 8.0,
        };
        let scales = all().map(|(of, output)| self.scales[of * outputs + output]).collect();
        let zeros = all().map(zero).collect();
        CodedMatrix { dims: self.dims, coding: Coding::Unsigned, codes, group, groups: None, scales, zeros }
    }
}
