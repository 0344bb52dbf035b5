//! FP8: E4M3 floats, or signed bytes, with scales for blocks of rows and columns.

use super::{CodedMatrix, Coding};

/// A matrix of bytes with one scale, a factor, per block of `block` rows and columns: the whole
/// matrix, a row, or 128 of each. `scales` is `[rows / block[0], columns / block[1]]`, rounded up.
pub fn scaled_blocks(dims: [usize; 2], coding: Coding, codes: &[u8], block: [usize; 2], scales: &[f32]) -> CodedMatrix {
    let across = dims[1].div_ceil(block[1]);
    let each = (0..dims[0]).flat_map(|row| scales[row / block[0] * across..][..across].iter().copied());
    CodedMatrix {
        dims,
        coding,
        codes: codes.to_vec(),
        group: block[1].min(dims[1]),
        groups: None,
        scales: each.collect(),
        zeros: Vec::new(),
    }
}
