//! Tiles: the order in which the CPU's kernels read the rows of some formats.
//!
//! Sixteen rows make a tile, so that a vector holds as much of each of them and a sum stays in its
//! lane. A tile has its rows' first blocks, then their second ones. Of these, field after field, it
//! has the first unit of all rows, then their second one:
//!
//! ```text
//! rows   d quants | d quants | ..                a block of Q8_0: a scale, and 8 units of 4 bytes
//! tile   d d .. d | first units | second units | .. | d d .. d | ..        16 of each
//! ```
//!
//! Rows behind the last whole tile stay as they are. What a row fills its last word with follows
//! its tile's blocks.

use super::{Format, RowFormat, with_format};

/// Rows of a tile.
pub(crate) const TILE: usize = 16;

/// A part of a block: `count` units of `unit` bytes each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) unit: usize,
    pub(crate) count: usize,
}

/// A format's blocks as tiles have them.
pub(crate) type Fields = &'static [Field];

fn block_bytes(fields: Fields) -> usize {
    fields.iter().map(|field| field.unit * field.count).sum()
}

/// Calls `copy` with the place of each unit in a row, its row, its place in the tile, and its bytes.
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

/// The fields of a format that has tiles.
pub(crate) fn fields(format: Format) -> Option<Fields> {
    with_format!(format, F => F::TILES)
}

fn bytes_mut(words: &mut [i32]) -> &mut [u8] {
    // SAFETY: a word is four bytes, any of which make one, and bytes are aligned anywhere.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), std::mem::size_of_val(words)) }
}

/// Sixteen rows, `[16, words of a row]`, as a tile.
pub(crate) fn tile_rows(fields: Fields, words: &mut [i32], scratch: &mut Vec<i32>) {
    reorder(fields, words, scratch, |stored, tile, in_row, in_tile, unit| {
        tile[in_tile..in_tile + unit].copy_from_slice(&stored[in_row..in_row + unit]);
    });
}

/// The rows of a matrix again, row after row.
pub(crate) fn untile(format: Format, words: &mut [i32], [rows, words_each]: [usize; 2]) {
    let Some(fields) = fields(format) else { return };
    let mut scratch = Vec::new();
    for tile in words[..rows / TILE * TILE * words_each].chunks_exact_mut(TILE * words_each) {
        reorder(fields, tile, &mut scratch, |stored, rows, in_row, in_tile, unit| {
            rows[in_row..in_row + unit].copy_from_slice(&stored[in_tile..in_tile + unit]);
        });
    }
}

/// Copies what is in `words`, and puts it back as `copy` has it of each unit: from, to, its place in the rows and in the tile.
#[inline(always)]
fn reorder(
    fields: Fields,
    words: &mut [i32],
    scratch: &mut Vec<i32>,
    copy: impl Fn(&[u8], &mut [u8], usize, usize, usize),
) {
    scratch.clear();
    scratch.extend_from_slice(words);
    let (stored, own) = (super::blocks::bytes_of(scratch), bytes_mut(words));
    let row_bytes = own.len() / TILE;
    units(fields, row_bytes / block_bytes(fields), |in_row, row, in_tile, unit| {
        copy(stored, own, row * row_bytes + in_row, in_tile, unit);
    });
}

/// One row of a tile into `out`, as it was.
#[cfg(feature = "ndarray")]
pub(crate) fn row_of_tile(fields: Fields, tile: &[i32], row: usize, out: &mut [i32]) {
    let (stored, own) = (super::blocks::bytes_of(tile), bytes_mut(out));
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

#[cfg(all(test, feature = "ndarray"))]
mod tests {
    use super::*;

    #[test]
    fn tiles_hold_their_rows_and_give_them_back() {
        for format in Format::ALL {
            let Some(fields) = fields(format) else { continue };
            let words_each = format.layout(768).expect("rows of any format").words;
            let rows: Vec<i32> =
                (0..TILE * words_each).map(|at| (at as i32).wrapping_mul(0x9e37_79b9u32 as i32)).collect();
            let mut tile = rows.clone();
            tile_rows(fields, &mut tile, &mut Vec::new());
            assert_ne!(tile, rows, "{format:?}");
            let blocks = words_each * 4 / block_bytes(fields) * block_bytes(fields);
            for (at, row) in rows.chunks_exact(words_each).enumerate() {
                let mut own = vec![0; words_each];
                row_of_tile(fields, &tile, at, &mut own);
                let [own, row] = [&own, row].map(|words| &super::super::blocks::bytes_of(words)[..blocks]);
                assert_eq!(own, row, "{format:?}, row {at}");
            }
            untile(format, &mut tile, [TILE, words_each]);
            for (own, row) in tile.chunks_exact(words_each).zip(rows.chunks_exact(words_each)) {
                let [own, row] = [own, row].map(|words| &super::super::blocks::bytes_of(words)[..blocks]);
                assert_eq!(own, row, "{format:?}");
            }
        }
    }
}
