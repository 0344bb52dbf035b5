//! bitsandbytes: NF4 and FP4 (Dettmers et al., 2023), and LLM.int8 (Dettmers et al., 2022).
//!
//! ```text
//! weight           nibbles, the first of two weights in the high one, row after row
//! absmax           a scale for each block of 64 weights, which run on from row to row: f32, or
//!                  bytes that stand for entries of nested_quant_map
//! nested_absmax    a scale for 256 of these, to which nested_offset is added
//! quant_map        what nibbles stand for
//! ```

use super::{CodedMatrix, Coding};

/// What the tensors of a 4-bit matrix hold.
#[derive(Clone, Copy, Debug)]
pub struct Bnb4<'a> {
    /// `[d_output, d_input]`.
    pub dims: [usize; 2],
    /// Two weights a byte.
    pub weight: &'a [u8],
    /// What nibbles stand for.
    pub table: [f32; 16],
    /// Weights of a block.
    pub block: usize,
    /// Scales of blocks.
    pub scales: Bnb4Scales<'a>,
}

/// The scales of blocks of 4-bit weights.
#[derive(Clone, Copy, Debug)]
pub enum Bnb4Scales<'a> {
    /// As they are.
    Floats(&'a [f32]),
    /// Quantized: `table[code] * scales[block / size] + offset`.
    Nested {
        /// A byte for each block.
        codes: &'a [u8],
        /// What bytes stand for.
        table: &'a [f32],
        /// A scale for each `size` of them.
        scales: &'a [f32],
        /// Scales that have a scale together.
        size: usize,
        /// What is added to each.
        offset: f32,
    },
}

impl Bnb4<'_> {
    /// The matrix, of as many weights and blocks as its tensors have.
    pub fn unpack(&self) -> CodedMatrix {
        let codes = self.weight.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        let scales = match self.scales {
            Bnb4Scales::Floats(scales) => scales.to_vec(),
            Bnb4Scales::Nested { codes, table, scales, size, offset } => codes
                .iter()
                .enumerate()
                .map(|(at, code)| table[usize::from(*code)] * scales[at / size] + offset)
                .collect(),
        };
        CodedMatrix {
            dims: self.dims,
            coding: Coding::Table(self.table),
            codes: codes.take(self.dims[0] * self.dims[1]).collect(),
            group: self.block,
            groups: None,
            scales,
            zeros: Vec::new(),
        }
    }
}

/// Bytes with a scale for each row, its largest magnitude: `byte * scale / 127`.
pub fn int8(dims: [usize; 2], weight: &[u8], largest: &[f32]) -> CodedMatrix {
    CodedMatrix {
        dims,
        coding: Coding::Signed127,
        codes: weight.to_vec(),
        group: dims[1],
        groups: None,
        scales: largest.to_vec(),
        zeros: Vec::new(),
    }
}
