//! compressed-tensors' `pack-quantized`: integers of 2 to 8 bits.
//!
//! ```text
//! weight_packed       [d_output, d_input * bits / 32]   words that pack codes along a row
//! weight_scale        [d_output, groups]
//! weight_zero_point   [d_output * bits / 32, groups]    words that pack zeros along a column
//! weight_g_idx        [d_input]                         the group of each input, or -1
//! weight              = scale * (code - zero); the default zero is the middle code
//! ```

use super::{CodedMatrix, Coding, field};

/// The tensors of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Compressed<'a> {
    /// `[d_output, d_input]`.
    pub dims: [usize; 2],
    /// Bits per code.
    pub bits: usize,
    /// Inputs per group.
    pub group: usize,
    /// Little-endian words.
    pub packed: &'a [u8],
    /// `[d_output, groups]`.
    pub scales: &'a [f32],
    /// Little-endian words.
    pub zeros: Option<&'a [u8]>,
    /// The group of each input.
    pub groups: Option<&'a [u32]>,
}

impl Compressed<'_> {
    /// Unpacks the matrix.
    pub fn unpack(&self) -> CodedMatrix {
        let Self { dims: [outputs, inputs], bits, group, .. } = *self;
        let words = (inputs * bits).div_ceil(32);
        let mut codes = Vec::with_capacity(outputs * inputs);
        for output in 0..outputs {
            codes.extend((0..inputs).map(|input| field(self.packed, output * words, 1, bits, input)));
        }
        let groups = self.scales.len() / outputs.max(1);
        let zero = |at: usize| match self.zeros {
            Some(zeros) => f32::from(field(zeros, at % groups, groups, bits, at / groups)),
            None => (1u32 << (bits - 1)) as f32,
        };
        let plain = |groups: &&[u32]| groups.iter().enumerate().all(|(input, of)| *of as usize == input / group);
        CodedMatrix {
            dims: self.dims,
            coding: Coding::Unsigned,
            codes,
            group,
            groups: self.groups.filter(|groups| !plain(groups)).map(<[u32]>::to_vec),
            scales: self.scales.to_vec(),
            zeros: (0..outputs * groups).map(zero).collect(),
        }
    }
}
