//! Lookup and its gradient in CubeCL.
//!
//! The gradient sorts rows by token, stably, without atomics: each pass over some bits of the tokens ranks the rows
//! within tiles and counts each tile's digits, then puts every row in its place. One more kernel adds up each token's
//! rows, in their order, and writes zeros where there are none.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::cube::{array, contiguous, empty, grid, rows, vector_width};

const UNITS: u32 = 256;
/// Rows that a cube ranks among themselves, two a unit.
const TILE: u32 = 2 * UNITS;
/// The most bits of a token that one pass sorts by: a unit sees to two digits.
const MAX_DIGIT_BITS: u32 = TILE.trailing_zeros();
/// Rows of one token that are left to the units of one set of columns.
const FEW_ROWS: u32 = 16;
/// Tokens, the rows of each of which are left to cubes of its own.
const FEW_TOKENS: usize = 1024;
/// Rows that a unit loads at once.
const LOADS: u32 = 8;
/// Vectors that a unit looks up, all of them before it writes the first.
const LOOKUPS: u32 = 4;

/// Rows of `table` as `tokens` `[batch_size, seq_length]` name them, added to `x` where there is one, which must be of
/// `dtype`, too: `[batch_size, seq_length, d_model]` of `dtype`.
pub(crate) fn embed_forward<R: CubeRuntime>(
    table: CubeTensor<R>,
    tokens: CubeTensor<R>,
    dtype: DType,
    x: Option<CubeTensor<R>>,
) -> CubeTensor<R> {
    let (table, stride) = rows(table);
    let [vocabulary, d_model] = [table.meta.shape()[0], table.meta.shape()[1]];
    let [batch_size, seq_length] = [tokens.meta.shape()[0], tokens.meta.shape()[1]];
    let out = empty(&table, [batch_size, seq_length, d_model], dtype);
    let adds = x.is_some();
    let x = x.map_or_else(|| out.clone(), contiguous);
    let vector = vector_width(&[&table, &out, &x], &[d_model, stride]);
    let units = batch_size * seq_length * d_model / vector;
    // SAFETY: each unit writes its own vectors below `units`; tokens are held within the table.
    unsafe {
        embed_kernel::launch_unchecked(
            &table.client,
            grid(units.div_ceil((UNITS * LOOKUPS) as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            array(&table),
            array(&tokens),
            array(&x),
            array(&out),
            units as u32,
            (d_model / vector) as u32,
            (stride / vector) as u32,
            seq_length as u32,
            tokens.meta.strides()[0] as u32,
            tokens.meta.strides()[1] as u32,
            vocabulary as u32 - 1,
            adds,
            table.dtype.into(),
            dtype.into(),
            tokens.dtype.into(),
        );
    }
    out
}

/// The gradient of the table, `[vocabulary, d_model]` of `dtype`, from `grad` `[rows, d_model]` and `tokens` `[rows]`.
pub(crate) fn embed_backward<R: CubeRuntime>(
    grad: CubeTensor<R>,
    tokens: CubeTensor<R>,
    vocabulary: usize,
    dtype: DType,
) -> CubeTensor<R> {
    let (grad, stride) = rows(grad);
    let [n_rows, d_model] = [grad.meta.shape()[0], grad.meta.shape()[1]];
    if n_rows == 0 {
        return zeros_client(grad.client.clone(), grad.device.clone(), [vocabulary, d_model].into(), dtype);
    }
    let (sorted, order) = sort(contiguous(tokens), vocabulary);
    let few_tokens = vocabulary <= FEW_TOKENS;
    let starts = if few_tokens { sorted } else { starts_of(sorted, vocabulary) };
    let out = empty(&grad, [vocabulary, d_model], dtype);
    let vector = vector_width(&[&grad, &out], &[d_model, stride]);
    let columns = d_model / vector;
    // Few tokens have many rows each: then a cube sees to one token and few columns, with many units along the rows, and
    // looks for its rows itself.
    let (tokens_each, most_across) = if few_tokens { (1, 16) } else { (32, 64) };
    let across = columns.next_power_of_two().min(most_across);
    let column_blocks = columns.div_ceil(across);
    let cubes = vocabulary.div_ceil(tokens_each as usize) * column_blocks;
    // SAFETY: a cube writes rows of its own tokens only, in its own columns; `order` holds numbers of rows.
    unsafe {
        sum_kernel::launch_unchecked(
            &grad.client,
            grid(cubes),
            CubeDim::new_1d(UNITS),
            vector,
            array(&grad),
            array(&starts),
            array(&order),
            array(&out),
            n_rows as u32,
            vocabulary as u32,
            columns as u32,
            (stride / vector) as u32,
            column_blocks as u32,
            tokens_each,
            across as u32,
            grad.dtype.into(),
            dtype.into(),
        );
    }
    out
}

/// Where each token's rows begin among the `sorted` ones, and behind them their end.
fn starts_of<R: CubeRuntime>(sorted: CubeTensor<R>, vocabulary: usize) -> CubeTensor<R> {
    let starts = empty(&sorted, [vocabulary + 1], DType::U32);
    // SAFETY: each unit up to `vocabulary` writes its own element.
    unsafe {
        starts_kernel::launch_unchecked(
            &sorted.client,
            grid((vocabulary + 1).div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            array(&sorted),
            array(&starts),
            sorted.meta.num_elements() as u32,
            vocabulary as u32,
        );
    }
    starts
}

/// The tokens in order, and the rows they stand in, which stay in order under each token.
fn sort<R: CubeRuntime>(tokens: CubeTensor<R>, vocabulary: usize) -> (CubeTensor<R>, CubeTensor<R>) {
    let n_rows = tokens.meta.shape()[0];
    let bits = usize::BITS - (vocabulary - 1).max(1).leading_zeros();
    let passes = bits.div_ceil(MAX_DIGIT_BITS);
    let digit_bits = bits.div_ceil(passes);
    let radix = 1usize << digit_bits;
    let tiles = n_rows.div_ceil(TILE as usize);
    let ranks = empty(&tokens, [n_rows], DType::U32);
    let counts = empty(&tokens, [tiles * radix], DType::U32);
    // The first pass takes a row's place for its number, and does not look at `order`.
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
        // SAFETY: the places of rows are a permutation of them, as the counts are those of the same keys.
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
#[allow(clippy::too_many_arguments)]
fn embed_kernel<F: Float, O: Float, I: Int, N: Size>(
    table: &Array<Vector<F, N>>,
    tokens: &Array<I>,
    x: &Array<Vector<O, N>>,
    out: &mut Array<Vector<O, N>>,
    units: u32,
    columns: u32,
    stride: u32,
    seq_length: u32,
    batch_step: u32,
    token_step: u32,
    last: u32,
    #[comptime] adds: bool,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
    #[define(I)] _token_dtype: StorageType,
) {
    let first = CUBE_POS as u32 * comptime!(UNITS * LOOKUPS) + UNIT_POS;
    if first >= units {
        terminate!();
    }
    let mut tokens_held = Array::<u32>::new(LOOKUPS as usize);
    #[unroll]
    for i in 0..LOOKUPS {
        let row = min(first + i * UNITS, units - 1) / columns;
        let at = row / seq_length * batch_step + row % seq_length * token_step;
        tokens_held[i as usize] = min(u32::cast_from(tokens[at as usize]), last);
    }
    let mut vectors = Array::<Vector<f32, N>>::new(LOOKUPS as usize);
    #[unroll]
    for i in 0..LOOKUPS {
        let column = min(first + i * UNITS, units - 1) % columns;
        vectors[i as usize] = Vector::cast_from(table[(tokens_held[i as usize] * stride + column) as usize]);
    }
    #[unroll]
    for i in 0..LOOKUPS {
        let at = first + i * UNITS;
        if at < units {
            let mut vector = vectors[i as usize];
            if adds {
                vector += Vector::cast_from(x[at as usize]);
            }
            out[at as usize] = Vector::cast_from(vector);
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
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
        // No digit is as large: what lies behind the rows counts for nothing.
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

/// A row's token, held within the vocabulary as the lookup holds it.
#[cube]
fn key<I: Int>(keys: &Array<I>, row: u32, last: u32) -> u32 {
    min(u32::cast_from(keys[row as usize]), last)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
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
    // A unit sees to two neighbouring digits: how many rows have them, and how many of these are in earlier tiles.
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
    let mut sum = total + next_total;
    sums[UNIT_POS as usize] = sum;
    sync_cube();
    #[unroll]
    for doubling in 0..comptime!(UNITS.trailing_zeros()) {
        let step = comptime!(1u32 << doubling);
        if UNIT_POS >= step {
            sum += sums[(UNIT_POS - step) as usize];
        }
        sync_cube();
        sums[UNIT_POS as usize] = sum;
        sync_cube();
    }
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

/// A cube sees to `tokens_each` tokens and `across` vectors of columns, its units `across` columns wide and as many
/// deep as there are left. With one token a cube, `starts` are the sorted tokens.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn sum_kernel<F: Float, O: Float, N: Size>(
    grad: &Array<Vector<F, N>>,
    starts: &Array<u32>,
    order: &Array<u32>,
    out: &mut Array<Vector<O, N>>,
    rows: u32,
    vocabulary: u32,
    columns: u32,
    stride: u32,
    column_blocks: u32,
    #[comptime] tokens_each: u32,
    #[comptime] across: u32,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let lanes = comptime!(UNITS / across);
    // A token that a cube has for itself is for all of its units.
    let few = comptime!(if tokens_each == 1 { 0 } else { FEW_ROWS });
    let cube = CUBE_POS as u32;
    let first = cube / column_blocks * tokens_each;
    let column = cube % column_blocks * across + UNIT_POS % across;
    let lane = UNIT_POS / across;
    // Units beyond the columns read the last one, and write nothing.
    let writes = column < columns;
    let column = min(column, columns - 1);

    let mut ends = SharedMemory::<u32>::new(comptime!(tokens_each as usize + 1));
    if UNIT_POS <= tokens_each {
        let token = min(first + UNIT_POS, vocabulary);
        if comptime!(tokens_each == 1) {
            ends[UNIT_POS as usize] = rows_below(starts, token, rows);
        } else {
            ends[UNIT_POS as usize] = starts[token as usize];
        }
    }
    sync_cube();

    // Tokens of few rows, or none. The first rows of all that a lane has are read at once; not many have a second.
    let each = comptime!(tokens_each.div_ceil(lanes) as usize);
    let mut firsts = Array::<u32>::new(each);
    #[unroll]
    for i in 0..each {
        let at = min(lane + comptime!(i as u32 * lanes), comptime!(tokens_each - 1));
        firsts[i] = order[min(ends[at as usize], rows - 1) as usize];
    }
    let mut totals = Array::<Vector<f32, N>>::new(each);
    #[unroll]
    for i in 0..each {
        let at = min(lane + comptime!(i as u32 * lanes), comptime!(tokens_each - 1));
        let count = ends[(at + 1) as usize] - ends[at as usize];
        totals[i] = Vector::new(0.0);
        if count > 0 && count <= few {
            totals[i] = Vector::cast_from(grad[(firsts[i] * stride + column) as usize]);
        }
    }
    #[unroll]
    for i in 0..each {
        let at = lane + comptime!(i as u32 * lanes);
        let token = first + at;
        if at < tokens_each && token < vocabulary && writes {
            let start = ends[at as usize];
            let end = ends[(at + 1) as usize];
            if end - start <= few {
                let mut sum = totals[i];
                for place in start + 1..end {
                    sum += Vector::cast_from(grad[(order[place as usize] * stride + column) as usize]);
                }
                out[(token * columns + column) as usize] = Vector::cast_from(sum);
            }
        }
    }

    let mut sums = SharedMemory::<Vector<f32, N>>::new(UNITS as usize);
    for at in 0..tokens_each {
        let start = ends[at as usize];
        let end = ends[(at + 1) as usize];
        let token = first + at;
        if end - start > few && token < vocabulary {
            let mut sum = Vector::<f32, N>::new(0.0);
            let mut place = start + lane;
            while place + comptime!((LOADS - 1) * lanes) < end {
                #[unroll]
                for load in 0..LOADS {
                    let row = order[(place + load * lanes) as usize];
                    sum += Vector::cast_from(grad[(row * stride + column) as usize]);
                }
                place += comptime!(LOADS * lanes);
            }
            while place < end {
                sum += Vector::cast_from(grad[(order[place as usize] * stride + column) as usize]);
                place += lanes;
            }
            sums[UNIT_POS as usize] = sum;
            sync_cube();
            #[unroll]
            for halving in 0..comptime!(lanes.trailing_zeros()) {
                let half = comptime!(UNITS >> (halving + 1));
                if UNIT_POS < half {
                    sums[UNIT_POS as usize] = sums[UNIT_POS as usize] + sums[(UNIT_POS + half) as usize];
                }
                sync_cube();
            }
            if lane == 0 && writes {
                out[(token * columns + column) as usize] = Vector::cast_from(sums[UNIT_POS as usize]);
            }
            sync_cube();
        }
    }
}

/// Where each token's rows begin, and behind them their end.
#[cube(launch_unchecked)]
fn starts_kernel(sorted: &Array<u32>, starts: &mut Array<u32>, rows: u32, vocabulary: u32) {
    let token = ABSOLUTE_POS as u32;
    if token <= vocabulary {
        starts[token as usize] = rows_below(sorted, token, rows);
    }
}

/// How many rows have a token below this one.
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
