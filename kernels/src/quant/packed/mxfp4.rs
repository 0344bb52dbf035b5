//! MXFP4 (Open Compute Project, 2023): E2M1 floats with a power of two for 32, as gpt-oss has them.
//!
//! ```text
//! blocks   [.., 16]   two weights a byte, the first in the low nibble
//! scales   [..]       exponents of two, with a bias of 127
//! ```

use super::{CodedMatrix, Coding};

/// What nibbles stand for: a sign, two bits of exponent and one of fraction.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// Weights of a block.
const BLOCK: usize = 32;

/// The matrix of blocks of 32.
pub fn mxfp4(dims: [usize; 2], blocks: &[u8], exponents: &[u8]) -> CodedMatrix {
    CodedMatrix {
        dims,
        coding: Coding::Table(E2M1),
        codes: blocks.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect(),
        group: BLOCK,
        groups: None,
        scales: exponents.iter().map(|exponent| ((f64::from(*exponent) - 127.0).exp2()) as f32).collect(),
        zeros: Vec::new(),
    }
}
