//! bitsandbytes: NF4 and FP4 (Dettmers et al., 2023), and LLM.int8 (Dettmers et al., 2022).
//!
//! ```text
//! weight           nibbles, row-major, the first of two weights in the high half
//! absmax           a scale per block of 64 weights; blocks cross the ends of rows: f32, or
//!                  indices into nested_quant_map
//! nested_absmax    a scale per 256 of these; nested_offset is added to the product
//! quant_map        the values of nibbles
//! ```

use super::{CodedMatrix, Coding};

/// The tensors of a 4-bit matrix.
#[derive(Clone, Copy, Debug)]
pub struct Bnb4<'a> {
    /// `[d_output, d_input]`.
    pub dims: [usize; 2],
    /// Two weights per byte.
    pub weight: &'a [u8],
    /// The values of nibbles.
    pub table: [f32; 16],
    /// Weights per block.
    pub block: usize,
    /// Scales of blocks.
    pub scales: Bnb4Scales<'a>,
}

/// The scales of blocks of 4-bit weights.
#[derive(Clone, Copy, Debug)]
pub enum Bnb4Scales<'a> {
    /// Unquantized.
    Floats(&'a [f32]),
    /// Quantized: `table[code] * scales[block / size] + offset`.
    Nested {
        /// One byte per block.
        codes: &'a [u8],
        /// The values of bytes.
        table: &'a [f32],
        /// One scale per `size` blocks.
        scales: &'a [f32],
        /// Blocks per scale.
        size: usize,
        /// Added to every scale.
        offset: f32,
    },
}

impl Bnb4<'_> {
    /// Unpacks the matrix.
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

/// Signed bytes with the largest magnitude of each row: `byte * scale / 127`.
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
