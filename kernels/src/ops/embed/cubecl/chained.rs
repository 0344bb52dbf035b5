//! The gradient of a table of many tokens, with a linked list (chain) of rows per token.
//!
//! ```text
//! chain_kernel          first[token] = row + 1, next[row] = the previous first       (one atomic exchange per row)
//! sum_chained_kernel    a cube: CHAINS tokens; follows each chain, sorts it, sums its rows
//! ```
//!
//! A cube's tokens are far apart: tokenizers number frequent tokens, whose chains are long, close
//! to each other.
//!
//! A chain's order depends on timing; after sorting, the sum does not. The rows of a chain that is
//! too long are searched among all rows.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{LOADS, Sizes, SizesLaunch, UNITS, across_lanes, key, listed, sum_up_to};
use crate::cubecl::{array, empty, grid};

/// Tokens per cube.
const CHAINS: u32 = 4;
/// Maximum units along a row: the others share the rows of a long chain.
const ACROSS: usize = 64;
/// Maximum rows of a stored chain; the rows of longer ones are searched.
const CHAINED: u32 = 64;
/// Rows searched at a time, [`LOADS`] per unit.
const SEARCHED: u32 = LOADS * UNITS;

/// Sums the rows of `grad` `[rows, d_model]` by `tokens` `[rows]` into `out` `[vocabulary,
/// d_model]`, or adds to it.
pub(super) fn sum_chained<R: CubeRuntime>(
    grad: CubeTensor<R>,
    tokens: CubeTensor<R>,
    out: &CubeTensor<R>,
    vector: usize,
    sizes: SizesLaunch<R>,
    adds: bool,
) {
    let [vocabulary, d_model] = [out.meta.shape()[0], out.meta.shape()[1]];
    let n_rows = tokens.meta.shape()[0];
    let first = zeros_client(grad.client.clone(), grad.device.clone(), [vocabulary].into(), DType::U32);
    let next = empty(&grad, [n_rows], DType::U32);
    // SAFETY: a unit writes the element of its own row, and tokens are held within the vocabulary.
    unsafe {
        chain_kernel::launch_unchecked(
            &grad.client,
            grid(n_rows.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            array(&tokens),
            array(&first),
            array(&next),
            n_rows as u32,
            vocabulary as u32 - 1,
            tokens.dtype.into(),
        );
    }
    let columns = d_model / vector;
    let across = columns.next_power_of_two().min(ACROSS);
    // SAFETY: a cube writes rows of its own tokens only, in its own columns; chains hold numbers of
    // rows.
    unsafe {
        sum_chained_kernel::launch_unchecked(
            &grad.client,
            grid(vocabulary.div_ceil(CHAINS as usize) * columns.div_ceil(across)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&grad),
            array(&tokens),
            array(&first),
            array(&next),
            array(out),
            sizes,
            across as u32,
            adds,
            grad.dtype.into(),
            out.dtype.into(),
            tokens.dtype.into(),
        );
    }
}

/// Prepends each row to its token's chain. Entries are row numbers plus one; zero ends a chain.
#[cube(launch_unchecked)]
fn chain_kernel<I: Int>(
    tokens: &Array<I>,
    first: &mut Array<Atomic<u32>>,
    next: &mut Array<u32>,
    rows: u32,
    last: u32,
    #[define(I)] _dtype: StorageType,
) {
    let row = ABSOLUTE_POS as u32;
    if row < rows {
        next[row as usize] = first[key::<I>(tokens, row, last) as usize].swap(row + 1);
    }
}

/// A cube processes [`CHAINS`] tokens and `across` vectors of columns, with its units `across` wide
/// and the rest along the rows.
#[cube(launch_unchecked)]
fn sum_chained_kernel<F: Float, O: Float, I: Int, N: Size>(
    grad: &Array<Vector<F, N>>,
    tokens: &Array<I>,
    first: &Array<u32>,
    next: &Array<u32>,
    out: &mut Array<Vector<O, N>>,
    sizes: &Sizes,
    #[comptime] across: u32,
    #[comptime] adds: bool,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
    #[define(I)] _token_dtype: StorageType,
) {
    let lanes = comptime!(UNITS / across);
    let blocks = sizes.columns.div_ceil(across);
    let groups = sizes.vocabulary.div_ceil(CHAINS);
    let group = CUBE_POS as u32 / blocks;
    if group >= groups {
        terminate!();
    }
    let column = CUBE_POS as u32 % blocks * across + UNIT_POS % across;
    let lane = UNIT_POS / across;
    // Units beyond the columns read the last one, and write nothing.
    let writes = column < sizes.columns;
    let column = min(column, sizes.columns - 1);

    let mut chains = SharedMemory::<u32>::new(comptime!((CHAINS * CHAINED) as usize));
    let mut lengths = SharedMemory::<u32>::new(CHAINS as usize);
    if UNIT_POS < CHAINS {
        let token = group + UNIT_POS * groups;
        let mut length = 0u32;
        if token < sizes.vocabulary {
            length = in_order(first[token as usize], next, &mut chains, UNIT_POS * CHAINED);
        }
        lengths[UNIT_POS as usize] = length;
    }
    sync_cube();

    // The first rows of all tokens of a lane are loaded at once, then the second ones; few have a
    // third.
    let each = comptime!(CHAINS.div_ceil(lanes) as usize);
    let mut totals = Array::<Vector<f32, N>>::new(each);
    #[unroll]
    for i in 0..each {
        let at = min(lane + comptime!(i as u32 * lanes), comptime!(CHAINS - 1));
        totals[i] = Vector::new(0.0);
        if lengths[at as usize] > 0 {
            totals[i] = Vector::cast_from(grad[(chains[(at * CHAINED) as usize] * sizes.stride + column) as usize]);
        }
    }
    #[unroll]
    for i in 0..each {
        let at = min(lane + comptime!(i as u32 * lanes), comptime!(CHAINS - 1));
        if lengths[at as usize] > 1 {
            let row = chains[(at * CHAINED + 1) as usize];
            totals[i] += Vector::cast_from(grad[(row * sizes.stride + column) as usize]);
        }
    }
    #[unroll]
    for i in 0..each {
        let at = lane + comptime!(i as u32 * lanes);
        let token = group + at * groups;
        if at < CHAINS && token < sizes.vocabulary && writes {
            let length = lengths[at as usize];
            if length <= CHAINED {
                let mut sum = totals[i];
                for place in 2..length {
                    let row = chains[(at * CHAINED + place) as usize];
                    sum += Vector::cast_from(grad[(row * sizes.stride + column) as usize]);
                }
                let place = (token * sizes.columns + column) as usize;
                if comptime!(adds) {
                    // Tokens without rows keep their gradient.
                    if length > 0 {
                        out[place] = Vector::cast_from(Vector::<f32, N>::cast_from(out[place]) + sum);
                    }
                } else {
                    out[place] = Vector::cast_from(sum);
                }
            }
        }
    }

    let mut found = SharedMemory::<u32>::new(SEARCHED as usize);
    for at in 0..CHAINS {
        let token = group + at * groups;
        if lengths[at as usize] > CHAINED {
            let mut sum = Vector::<f32, N>::new(0.0);
            for start in range_stepped(0u32, sizes.rows, SEARCHED) {
                let count = search::<I>(tokens, token, start, sizes, &mut found);
                sum += listed::<F, N>(grad, &found.to_slice(), lane, count, column, lanes, sizes);
            }
            let mut sum = across_lanes::<N>(sum, lanes);
            if lane == 0 && writes {
                let place = (token * sizes.columns + column) as usize;
                if comptime!(adds) {
                    sum += Vector::cast_from(out[place]);
                }
                out[place] = Vector::cast_from(sum);
            }
        }
    }
}

/// Follows a chain and stores its rows in descending order from `base` on. Returns their number, or
/// more than [`CHAINED`] if there are more.
#[cube]
fn in_order(first: u32, next: &Array<u32>, chains: &mut SharedMemory<u32>, base: u32) -> u32 {
    let mut length = 0u32;
    let mut at = first;
    while at != 0 && length < CHAINED {
        let row = at - 1;
        at = next[row as usize];
        let mut place = base + length;
        // The first comparison is with itself, without a predecessor.
        while place > base && chains[(max(place, base + 1) - 1) as usize] < row {
            chains[place as usize] = chains[(place - 1) as usize];
            place -= 1;
        }
        chains[place as usize] = row;
        length += 1;
    }
    if at != 0 {
        length = CHAINED + 1;
    }
    length
}

/// The rows of a token among [`SEARCHED`] from `start` on, in order; their number is `found`.
#[cube]
fn search<I: Int>(tokens: &Array<I>, token: u32, start: u32, sizes: &Sizes, found: &mut SharedMemory<u32>) -> u32 {
    let first = start + UNIT_POS * LOADS;
    let mut own = Array::<bool>::new(LOADS as usize);
    let mut count = 0u32;
    #[unroll]
    for i in 0..LOADS {
        let row = first + i;
        own[i as usize] = row < sizes.rows && key::<I>(tokens, min(row, sizes.rows - 1), sizes.vocabulary - 1) == token;
        count += select(own[i as usize], 1u32, 0u32);
    }
    let mut ends = SharedMemory::<u32>::new(UNITS as usize);
    let end = sum_up_to(&mut ends, count);
    let mut place = end - count;
    #[unroll]
    for i in 0..LOADS {
        if own[i as usize] {
            found[place as usize] = first + i;
            place += 1;
        }
    }
    let all = ends[comptime!(UNITS as usize - 1)];
    sync_cube();
    all
}
