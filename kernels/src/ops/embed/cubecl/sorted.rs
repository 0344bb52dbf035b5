//! The gradient of a table with few tokens, or with many rows per token: a stable radix sort of the
//! rows by token, without atomics.
//!
//! ```text
//! for each digit of the tokens:
//!   rank_kernel     a cube: TILE rows; each row's rank among those of its digit in the tile, and the tile's counts
//!   place_kernel    a row's place = rows of smaller digits + rows of its digit in earlier tiles + its rank
//! sum_sorted_kernel a cube: one token's run of rows, added up
//! ```

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{LOADS, Sizes, SizesLaunch, UNITS, across_lanes, key, listed, sum_up_to};
use crate::cubecl::{array, empty, grid};

/// Rows that a cube ranks, two per unit.
const TILE: u32 = 2 * UNITS;
/// Maximum bits per pass: a unit handles two digits.
const MAX_DIGIT_BITS: u32 = TILE.trailing_zeros();

/// Sums the rows of `grad` `[rows, d_model]` by `tokens` `[rows]` into `out` `[vocabulary,
/// d_model]`, or adds to it. A cube handles one token and few columns, with many units along the
/// rows.
pub(super) fn sum_sorted<R: CubeRuntime>(
    grad: CubeTensor<R>,
    tokens: CubeTensor<R>,
    out: &CubeTensor<R>,
    vector: usize,
    sizes: SizesLaunch<R>,
    adds: bool,
) {
    let [vocabulary, d_model] = [out.meta.shape()[0], out.meta.shape()[1]];
    let (sorted, order) = sort(tokens, vocabulary);
    let columns = d_model / vector;
    let across = columns.next_power_of_two().min(16);
    // SAFETY: a cube writes the row of its own token only, in its own columns; `order` holds
    // numbers of rows.
    unsafe {
        sum_sorted_kernel::launch_unchecked(
            &grad.client,
            grid(vocabulary * columns.div_ceil(across)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&grad),
            array(&sorted),
            array(&order),
            array(out),
            sizes,
            across as u32,
            adds,
            grad.dtype.into(),
            out.dtype.into(),
        );
    }
}

/// The sorted tokens with their rows, in stable order.
fn sort<R: CubeRuntime>(tokens: CubeTensor<R>, vocabulary: usize) -> (CubeTensor<R>, CubeTensor<R>) {
    let n_rows = tokens.meta.shape()[0];
    let bits = usize::BITS - (vocabulary - 1).max(1).leading_zeros();
    let passes = bits.div_ceil(MAX_DIGIT_BITS);
    let digit_bits = bits.div_ceil(passes);
    let radix = 1usize << digit_bits;
    let tiles = n_rows.div_ceil(TILE as usize);
    let ranks = empty(&tokens, [n_rows], DType::U32);
    let counts = empty(&tokens, [tiles * radix], DType::U32);
    // The first pass uses row indices and does not read `order`.
    let (mut keys, mut order) = (tokens, ranks.clone());
    for pass in 0..passes {
        let (placed_keys, placed_order) = (empty(&ranks, [n_rows], DType::U32), empty(&ranks, [n_rows], DType::U32));
        // SAFETY: a cube ranks its own tile and counts its own digits, of which there are `radix`.
        unsafe {
            rank_kernel::launch_unchecked(
                &ranks.client,
                grid(tiles),
                CubeDim::new_1d(UNITS),
                array(&keys),
                array(&ranks),
                array(&counts),
                n_rows as u32,
                vocabulary as u32 - 1,
                pass * digit_bits,
                radix as u32,
                keys.dtype.into(),
            );
        }
        // SAFETY: the places of rows are a permutation of them, as the counts are those of the same
        // keys.
        unsafe {
            place_kernel::launch_unchecked(
                &ranks.client,
                grid(tiles),
                CubeDim::new_1d(UNITS),
                array(&keys),
                array(&order),
                array(&ranks),
                array(&counts),
                array(&placed_keys),
                array(&placed_order),
                n_rows as u32,
                vocabulary as u32 - 1,
                pass * digit_bits,
                radix as u32,
                tiles as u32,
                pass == 0,
                keys.dtype.into(),
            );
        }
        (keys, order) = (placed_keys, placed_order);
    }
    (keys, order)
}

#[cube(launch_unchecked)]
fn rank_kernel<I: Int>(
    keys: &Array<I>,
    ranks: &mut Array<u32>,
    counts: &mut Array<u32>,
    rows: u32,
    last: u32,
    shift: u32,
    radix: u32,
    #[define(I)] _dtype: StorageType,
) {
    let tile = CUBE_POS as u32;
    if tile * TILE >= rows {
        terminate!();
    }
    let mut digits = SharedMemory::<u32>::new(TILE as usize);
    let mut totals = SharedMemory::<u32>::new(TILE as usize);
    #[unroll]
    for half in 0..2u32 {
        let at = half * UNITS + UNIT_POS;
        let row = tile * TILE + at;
        // No digit is this large: padding past the rows is ignored.
        let mut digit = TILE.runtime();
        if row < rows {
            digit = (key::<I>(keys, row, last) >> shift) & (radix - 1);
        }
        digits[at as usize] = digit;
        totals[at as usize] = 0;
    }
    sync_cube();
    #[unroll]
    for half in 0..2u32 {
        let at = half * UNITS + UNIT_POS;
        let digit = digits[at as usize];
        let own = at / LOADS;
        let mut before = same(&digits, digit, 0u32, own);
        let mut after = same(&digits, digit, own + 1, comptime!(TILE / LOADS).runtime());
        #[unroll]
        for i in 0..LOADS {
            let other = own * LOADS + i;
            let one = select(digits[other as usize] == digit, 1u32, 0u32);
            before += select(other < at, one, 0u32);
            after += select(other > at, one, 0u32);
        }
        let row = tile * TILE + at;
        if row < rows {
            ranks[row as usize] = before;
            if after == 0 {
                totals[digit as usize] = before + 1;
            }
        }
    }
    sync_cube();
    #[unroll]
    for half in 0..2u32 {
        let digit = half * UNITS + UNIT_POS;
        if digit < radix {
            counts[(tile * radix + digit) as usize] = totals[digit as usize];
        }
    }
}

/// How many rows of some runs of [`LOADS`] have a digit.
#[cube]
fn same(digits: &SharedMemory<u32>, digit: u32, first: u32, end: u32) -> u32 {
    let mut count = 0u32;
    for run in first..end {
        #[unroll]
        for i in 0..LOADS {
            count += select(digits[(run * LOADS + i) as usize] == digit, 1u32, 0u32);
        }
    }
    count
}

#[cube(launch_unchecked)]
fn place_kernel<I: Int>(
    keys: &Array<I>,
    order: &Array<u32>,
    ranks: &Array<u32>,
    counts: &Array<u32>,
    placed_keys: &mut Array<u32>,
    placed_order: &mut Array<u32>,
    rows: u32,
    last: u32,
    shift: u32,
    radix: u32,
    tiles: u32,
    #[comptime] first: bool,
    #[define(I)] _dtype: StorageType,
) {
    let tile = CUBE_POS as u32;
    if tile * TILE >= rows {
        terminate!();
    }
    // A unit handles two neighbouring digits: how many rows have them, and how many of these are in
    // earlier tiles.
    let digit = 2 * UNIT_POS;
    let mut total = 0u32;
    let mut next_total = 0u32;
    let mut before = 0u32;
    let mut next_before = 0u32;
    if digit < radix {
        for first in range_stepped(0u32, tiles, LOADS) {
            let mut pairs = Array::<u32>::new(comptime!(2 * LOADS as usize));
            #[unroll]
            for i in 0..LOADS {
                let at = min(first + i, tiles - 1) * radix + digit;
                pairs[comptime!(2 * i as usize)] = counts[at as usize];
                pairs[comptime!(2 * i as usize + 1)] = counts[(at + 1) as usize];
            }
            #[unroll]
            for i in 0..LOADS {
                let other = first + i;
                let count = select(other < tiles, pairs[comptime!(2 * i as usize)], 0u32);
                let next_count = select(other < tiles, pairs[comptime!(2 * i as usize + 1)], 0u32);
                total += count;
                next_total += next_count;
                before += select(other < tile, count, 0u32);
                next_before += select(other < tile, next_count, 0u32);
            }
        }
    }
    let mut sums = SharedMemory::<u32>::new(UNITS as usize);
    let sum = sum_up_to(&mut sums, total + next_total);
    let mut starts = SharedMemory::<u32>::new(TILE as usize);
    starts[digit as usize] = sum - total - next_total + before;
    starts[(digit + 1) as usize] = sum - next_total + next_before;
    sync_cube();
    #[unroll]
    for half in 0..2u32 {
        let row = tile * TILE + half * UNITS + UNIT_POS;
        if row < rows {
            let key = key::<I>(keys, row, last);
            let place = starts[((key >> shift) & (radix - 1)) as usize] + ranks[row as usize];
            placed_keys[place as usize] = key;
            placed_order[place as usize] = if comptime!(first) { row } else { order[row as usize] };
        }
    }
}

/// A cube handles one token and `across` vectors of columns, with its units `across` wide and the
/// rest along the rows.
#[cube(launch_unchecked)]
fn sum_sorted_kernel<F: Float, O: Float, N: Size>(
    grad: &Array<Vector<F, N>>,
    sorted: &Array<u32>,
    order: &Array<u32>,
    out: &mut Array<Vector<O, N>>,
    sizes: &Sizes,
    #[comptime] across: u32,
    #[comptime] adds: bool,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let lanes = comptime!(UNITS / across);
    let blocks = sizes.columns.div_ceil(across);
    let token = CUBE_POS as u32 / blocks;
    if token >= sizes.vocabulary {
        terminate!();
    }
    let column = CUBE_POS as u32 % blocks * across + UNIT_POS % across;
    let lane = UNIT_POS / across;
    let writes = column < sizes.columns;
    let column = min(column, sizes.columns - 1);
    let mut ends = SharedMemory::<u32>::new(2usize);
    if UNIT_POS < 2 {
        ends[UNIT_POS as usize] = rows_below(sorted, token + UNIT_POS, sizes.rows);
    }
    sync_cube();
    let sum = listed::<F, N>(grad, &order.to_slice(), ends[0usize] + lane, ends[1usize], column, lanes, sizes);
    let mut sum = across_lanes::<N>(sum, lanes);
    if lane == 0 && writes {
        let place = (token * sizes.columns + column) as usize;
        if comptime!(adds) {
            sum += Vector::cast_from(out[place]);
        }
        out[place] = Vector::cast_from(sum);
    }
}

/// How many rows have a smaller token.
#[cube]
fn rows_below(sorted: &Array<u32>, token: u32, rows: u32) -> u32 {
    let mut low = 0u32;
    let mut high = rows;
    while low < high {
        let middle = (low + high) / 2;
        if sorted[middle as usize] < token {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}
