//! MXFP4 (Open Compute Project, 2023): E2M1 floats with a power of two per 32, in gpt-oss's layout.
//!
//! ```text
//! blocks   [.., 16]   two weights per byte, the first in the low nibble
//! scales   [..]       exponents of two, with a bias of 127
//! ```

use super::{CodedMatrix, Coding};

/// The values of E2M1: a sign, two exponent bits and one fraction bit.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// Weights per block.
const BLOCK: usize = 32;

/// Unpacks a matrix.
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
