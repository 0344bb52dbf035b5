//! Tiles: the order in which the CPU kernels read the rows of some formats.
//!
//! A tile has sixteen rows, one per vector lane, so that each row's sum stays in its lane. It
//! stores the first blocks of all rows, then the second blocks, and so on. Within these blocks,
//! field after field, it stores the first unit of all rows, then the second unit, and so on:
//!
//! ```text
//! rows   d quants | d quants | ..                a block of Q8_0: a scale, and 8 units of 4 bytes
//! tile   d d .. d | first units | second units | .. | d d .. d | ..        16 of each
//! ```
//!
//! Rows after the last whole tile are not reordered. The padding of the rows' last words follows
//! the tile's blocks.

/// Rows per tile.
pub(crate) const TILE: usize = 16;

/// A part of a block: `count` units of `unit` bytes each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) unit: usize,
    pub(crate) count: usize,
}

/// The fields of a format's block.
pub(crate) type Fields = &'static [Field];

pub(super) fn block_bytes(fields: Fields) -> usize {
    fields.iter().map(|field| field.unit * field.count).sum()
}

/// Calls `copy` for each unit with its offset in its row, the row, its offset in the tile, and its
/// size, all in bytes.
#[inline(always)]
fn units(fields: Fields, blocks: usize, mut copy: impl FnMut(usize, usize, usize, usize)) {
    let bytes = block_bytes(fields);
    for block in 0..blocks {
        let (mut in_row, mut in_tile) = (block * bytes, block * bytes * TILE);
        for Field { unit, count } in fields {
            for _ in 0..*count {
                for row in 0..TILE {
                    copy(in_row, row, in_tile + row * unit, *unit);
                }
                in_row += unit;
                in_tile += unit * TILE;
            }
        }
    }
}

/// The bytes of words, in memory order.
#[inline(always)]
pub(crate) fn bytes_of(words: &[i32]) -> &[u8] {
    // SAFETY: a word is four bytes of any value, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), std::mem::size_of_val(words)) }
}

fn bytes_mut(words: &mut [i32]) -> &mut [u8] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), std::mem::size_of_val(words)) }
}

/// Copies `unit` bytes. Constant sizes compile to moves instead of a call.
#[inline(always)]
fn copy_unit(from: &[u8], to: &mut [u8], unit: usize) {
    match unit {
        1 => to[0] = from[0],
        2 => to[..2].copy_from_slice(&from[..2]),
        4 => to[..4].copy_from_slice(&from[..4]),
        _ => to[..unit].copy_from_slice(&from[..unit]),
    }
}

/// Reorders sixteen rows, `[16, words per row]`, to a tile.
#[cfg(feature = "ndarray")]
pub(crate) fn tile_rows(fields: Fields, words: &mut [i32], scratch: &mut Vec<i32>) {
    reorder(fields, words, scratch, |stored, tile, in_row, in_tile, unit| {
        copy_unit(&stored[in_row..], &mut tile[in_tile..], unit);
    });
}

/// Restores row-major order.
pub(crate) fn untile(fields: Fields, words: &mut [i32], [rows, words_each]: [usize; 2]) {
    let mut scratch = Vec::new();
    for tile in words[..rows / TILE * TILE * words_each].chunks_exact_mut(TILE * words_each) {
        reorder(fields, tile, &mut scratch, |stored, rows, in_row, in_tile, unit| {
            copy_unit(&stored[in_tile..], &mut rows[in_row..], unit);
        });
    }
}

/// Reorders `words` through `scratch`. `copy` gets source, destination, and a unit's offsets in
/// rows and tile, and its size.
#[inline(always)]
fn reorder(
    fields: Fields,
    words: &mut [i32],
    scratch: &mut Vec<i32>,
    copy: impl Fn(&[u8], &mut [u8], usize, usize, usize),
) {
    scratch.clear();
    scratch.extend_from_slice(words);
    let (stored, own) = (bytes_of(scratch), bytes_mut(words));
    let row_bytes = own.len() / TILE;
    units(fields, row_bytes / block_bytes(fields), |in_row, row, in_tile, unit| {
        copy(stored, own, row * row_bytes + in_row, in_tile, unit);
    });
}

/// Copies one row of a tile to `out`, in row order.
#[cfg(feature = "ndarray")]
pub(crate) fn row_of_tile(fields: Fields, tile: &[i32], row: usize, out: &mut [i32]) {
    let (stored, own) = (bytes_of(tile), bytes_mut(out));
    let bytes = block_bytes(fields);
    for block in 0..own.len() / bytes {
        let (mut in_row, mut in_tile) = (block * bytes, block * bytes * TILE);
        for Field { unit, count } in fields {
            for _ in 0..*count {
                own[in_row..in_row + unit].copy_from_slice(&stored[in_tile + row * unit..][..*unit]);
                in_row += unit;
                in_tile += unit * TILE;
            }
        }
    }
}
