//! GPTQ (Frantar et al., 2022), as AutoGPTQ and GPTQModel store it.
//!
//! ```text
//! qweight   [d_input * bits / 32, d_output]   words that pack codes along a column
//! qzeros    [groups, d_output * bits / 32]    words that pack zeros along a row; version 1
//!                                             stores each zero minus one
//! scales    [groups, d_output]
//! g_idx     [d_input]                         the group of each input
//! weight    = scale * (code - zero)
//! ```

use super::{CodedMatrix, Coding, field};

/// Outputs unpacked together.
const TILE: usize = 64;

/// The tensors of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Gptq<'a> {
    /// `[d_output, d_input]`.
    pub dims: [usize; 2],
    /// Bits per code: 2, 3, 4 or 8.
    pub bits: usize,
    /// Inputs per group, unless `groups` is given.
    pub group: usize,
    /// Little-endian words.
    pub qweight: &'a [u8],
    /// Little-endian words.
    pub qzeros: &'a [u8],
    /// Added to every zero: 1 for version 1, 0 for version 2.
    pub zero_offset: u8,
    /// `[groups, d_output]`.
    pub scales: &'a [f32],
    /// The group of each input.
    pub groups: Option<&'a [u32]>,
}

impl Gptq<'_> {
    /// Unpacks the matrix.
    pub fn unpack(&self) -> CodedMatrix {
        let Self { dims: [outputs, inputs], bits, group, .. } = *self;
        let mut codes = vec![0; outputs * inputs];
        for first in (0..outputs).step_by(TILE) {
            for input in 0..inputs {
                for output in first..outputs.min(first + TILE) {
                    codes[output * inputs + input] = field(self.qweight, output, outputs, bits, input);
                }
            }
        }
        let groups = self.scales.len() / outputs.max(1);
        let words = (outputs * bits).div_ceil(32);
        let mut zeros = Vec::with_capacity(outputs * groups);
        let mut scales = Vec::with_capacity(outputs * groups);
        for output in 0..outputs {
            for of in 0..groups {
                let zero = u16::from(field(self.qzeros, of * words, 1, bits, output)) + u16::from(self.zero_offset);
                zeros.push(f32::from(zero));
                scales.push(self.scales[of * outputs + output]);
            }
        }
        let plain = |groups: &&[u32]| groups.iter().enumerate().all(|(input, of)| *of as usize == input / group);
        let groups = self.groups.filter(|groups| !plain(groups)).map(<[u32]>::to_vec);
        CodedMatrix { dims: self.dims, coding: Coding::Unsigned, codes, group, groups, scales, zeros }
    }
}
