//! Attention of one token per row without planes: each unit computes the score of a key.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{Bound, CubeKvStorage, MOST_HEADS, Pass, Pieces, Run, Sizes, Source, UNITS, Variant, cell, place, sizes};
use crate::cubecl::reduce::{row_max, row_sum};
use crate::cubecl::{array, clamp_index, grid, vector_width};
use crate::masked::MASKED;
use crate::ops::attention::cubecl::capped;
use crate::packed_heads::PackedHeads;

/// Keys per piece.
const PIECE: u32 = UNITS;
/// Vectors that a unit loads together.
const RUN: u32 = 8;

/// Writes the result, or its pieces.
pub(super) fn attend<R: CubeRuntime>(
    mut bound: Bound<R>,
    pass: &Pass<R>,
    run: &Run,
    [keys, values]: [&CubeKvStorage<R>; 2],
    out: &CubeTensor<R>,
) -> Option<Pieces<R>> {
    let Pass { qkv, heads, positions, table, .. } = pass;
    assert!(!keys.is_int8(), "cached_attention: a kernel for floats");
    let batch_size = run.tokens;
    let PackedHeads { n_heads, n_kv_heads, head_dim } = *heads;
    let group = n_heads / n_kv_heads;
    let together = (1..=MOST_HEADS.min(group)).rev().find(|count| group.is_multiple_of(*count)).unwrap_or(1);
    let count = run.keys.div_ceil(PIECE as usize);
    let pieces = Pieces::new(out, pass, run, count);
    (bound.variant.heads, bound.variant.cut) = (together, pieces.is_some());
    let [partial, statistics] = Pieces::or(&pieces, out);
    let vector = vector_width(&[qkv, &keys.stored, &values.stored, partial], &[head_dim]);
    // SAFETY: each cube writes the heads of its own row and piece, and its row's new key and value,
    // which other cubes do not read. Positions are clamped to table and cache. The tensor that
    // replaces missing statistics is not written.
    unsafe {
        units_kernel::launch_unchecked(
            &qkv.client,
            grid(batch_size * (n_heads / together) * count),
            CubeDim::new_1d(UNITS),
            vector,
            array(qkv),
            array(&bound.gammas[0]),
            array(&bound.gammas[1]),
            array(&bound.table[0]),
            array(&bound.table[1]),
            array(positions),
            array(table),
            array(&keys.stored),
            array(&values.stored),
            array(partial),
            array(statistics),
            sizes(&bound, pass, run, keys, [count, PIECE as usize]),
            bound.variant,
            qkv.dtype.into(),
            bound.gammas[0].dtype.into(),
            bound.table[0].dtype.into(),
            positions.dtype.into(),
            partial.dtype.into(),
        );
    }
    pieces
}

/// A cube attends with query heads that share a key head, over one piece of the keys.
#[cube(launch_unchecked)]
fn units_kernel<F: Float, G: Float, T: Float, I: Int, O: Float, N: Size>(
    qkv: &Array<F>,
    query_gamma: &Array<G>,
    key_gamma: &Array<G>,
    cos: &Array<T>,
    sin: &Array<T>,
    positions: &Array<I>,
    table: &Array<I>,
    keys: &mut Array<Vector<F, N>>,
    values: &mut Array<Vector<F, N>>,
    out: &mut Array<Vector<O, N>>,
    statistics: &mut Array<f32>,
    sizes: &Sizes,
    #[comptime] variant: Variant,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gamma_dtype: StorageType,
    #[define(T)] _table_dtype: StorageType,
    #[define(I)] _position_dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let width = N::value();
    let head_dim = comptime!(variant.head_dim as u32);
    let columns = comptime!((variant.head_dim / width) as u32);
    let heads = comptime!(variant.heads as u32);
    let piece = CUBE_POS as u32 % sizes.pieces;
    let groups = sizes.n_heads / heads;
    let group = CUBE_POS as u32 / sizes.pieces % groups;
    let batch = CUBE_POS as u32 / sizes.pieces / groups;
    if batch >= sizes.tokens {
        terminate!();
    }
    let token = sizes.first_token + batch;
    let cached_row = sizes.first_row + batch;
    let head = group * heads;
    let kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    let position = clamp_index::<I>(positions[token as usize], sizes.keys - 1);
    let row = token * (sizes.n_heads + 2 * sizes.n_kv_heads) * head_dim;
    let first = piece * PIECE;
    let end = min(first + PIECE, position + 1);

    // Queries, then the new key.
    let mut placed = SharedMemory::<f32>::new(comptime!((variant.heads + 1) * variant.head_dim));
    let new_key = comptime!((variant.heads * variant.head_dim) as u32);
    let keys_at = row + (sizes.n_heads + kv_head) * head_dim;
    let source = Source { start: row + head * head_dim, queries: heads, keys: keys_at, heads: heads + 1, position };
    place::<F, F, G, T>(qkv, query_gamma, key_gamma, cos, sin, &mut placed, &source, sizes, variant);
    let new_value = row + (sizes.n_heads + sizes.n_kv_heads + kv_head) * head_dim;
    let writes = position >= first && position < first + PIECE && head == kv_head * (sizes.n_heads / sizes.n_kv_heads);
    if writes && UNIT_POS < columns {
        let to = (cell::<I>(table, cached_row, kv_head, position, sizes) * columns + UNIT_POS) as usize;
        let mut key = Vector::<F, N>::cast_from(0.0f32);
        let mut value = Vector::<F, N>::cast_from(0.0f32);
        #[unroll]
        for i in 0..width {
            let column = UNIT_POS * comptime!(width as u32) + comptime!(i as u32);
            key[i] = F::cast_from(placed[(new_key + column) as usize]);
            value[i] = qkv[(new_value + column) as usize];
        }
        keys[to] = key;
        values[to] = value;
    }

    // The unit's key against all queries.
    let own = first + UNIT_POS;
    let seen = own < end && i32::cast_from(own) > i32::cast_from(position) - sizes.window;
    let mut sums = Array::<f32>::new(comptime!(variant.heads));
    #[unroll]
    for i in 0..variant.heads {
        sums[i] = 0.0f32;
    }
    let width_u32 = comptime!(width as u32);
    let own_line = cell::<I>(table, cached_row, kv_head, min(own, sizes.keys - 1), sizes);
    if seen {
        // Columns in runs: all loads before the first product.
        let run = comptime!(columns.min(RUN));
        for start in range_stepped(0u32, columns, run) {
            let mut key = Array::<Vector<F, N>>::new(comptime!(run as usize));
            #[unroll]
            for i in 0..run {
                let column = min(start + i, columns - 1);
                key[i as usize] = keys[(own_line * columns + column) as usize];
            }
            #[unroll]
            for i in 0..run {
                let column = start + i;
                if column < columns {
                    let key = Vector::<f32, N>::cast_from(key[i as usize]);
                    #[unroll]
                    for head in 0..variant.heads {
                        #[unroll]
                        for j in 0..width {
                            let at = column * width_u32 + comptime!((head * variant.head_dim + j) as u32);
                            sums[head] += key[j] * placed[at as usize];
                        }
                    }
                }
            }
        }
        // The new key may not be visible in the cache yet.
        if own == position {
            #[unroll]
            for head in 0..variant.heads {
                sums[head] = 0.0f32;
                for column in 0..head_dim {
                    let query = placed[(comptime!((head * variant.head_dim) as u32) + column) as usize];
                    sums[head] += query * placed[(new_key + column) as usize];
                }
            }
        }
    }
    let mut maxima = Array::<f32>::new(comptime!(variant.heads));
    let mut totals = Array::<f32>::new(comptime!(variant.heads));
    #[unroll]
    for i in 0..variant.heads {
        let score = select(seen, capped(sums[i] * sizes.scale, sizes.softcap), MASKED);
        maxima[i] = row_max(score, variant.row_units);
        sums[i] = select(seen, (score - maxima[i]).exp(), 0.0f32);
        totals[i] = row_sum(sums[i], variant.row_units);
    }
    sync_cube();
    let mut scores = SharedMemory::<f32>::new(comptime!(variant.heads * PIECE as usize));
    #[unroll]
    for i in 0..variant.heads {
        scores[(comptime!(i as u32 * PIECE) + UNIT_POS) as usize] = sums[i];
    }
    sync_cube();

    // Values: a unit has a vector of columns, and every n-th key.
    let across = comptime!(columns.next_power_of_two());
    let lanes = comptime!(UNITS / across);
    let column = min(UNIT_POS % across, columns - 1);
    let lane = UNIT_POS / across;
    let mut results = Array::<Vector<f32, N>>::new(comptime!(variant.heads));
    #[unroll]
    for i in 0..variant.heads {
        results[i] = Vector::<f32, N>::new(0.0);
    }
    for start in range_stepped(first + lane, end, comptime!(lanes * RUN)) {
        let mut value = Array::<Vector<F, N>>::new(RUN as usize);
        #[unroll]
        for i in 0..RUN {
            let key = min(start + comptime!(i * lanes), end - 1);
            let line = cell::<I>(table, cached_row, kv_head, key, sizes);
            value[i as usize] = values[(line * columns + column) as usize];
        }
        #[unroll]
        for i in 0..RUN {
            let key = start + comptime!(i * lanes);
            // The new value, which may not be visible in the cache yet, comes last.
            if key < end && key != position {
                let value = Vector::<f32, N>::cast_from(value[i as usize]);
                #[unroll]
                for head in 0..variant.heads {
                    let share = scores[(comptime!(head as u32 * PIECE) + key - first) as usize];
                    results[head] += value * Vector::<f32, N>::new(share);
                }
            }
        }
    }
    if lane == 0 && position >= first && position < end {
        let mut value = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..width {
            value[i] = f32::cast_from(qkv[(new_value + column * width_u32 + comptime!(i as u32)) as usize]);
        }
        #[unroll]
        for head in 0..variant.heads {
            let share = scores[(comptime!(head as u32 * PIECE) + position - first) as usize];
            results[head] += value * Vector::<f32, N>::new(share);
        }
    }
    sync_cube();
    let mut shared = SharedMemory::<Vector<f32, N>>::new(UNITS as usize);
    #[unroll]
    for i in 0..variant.heads {
        shared[UNIT_POS as usize] = results[i];
        sync_cube();
        #[unroll]
        for halving in 0..comptime!(lanes.trailing_zeros()) {
            let half = comptime!(UNITS >> (halving + 1));
            if UNIT_POS < half {
                let other = shared[(UNIT_POS + half) as usize];
                shared[UNIT_POS as usize] += other;
            }
            sync_cube();
        }
        let line = batch * sizes.n_heads + head + comptime!(i as u32);
        if UNIT_POS < columns {
            let mut result = shared[UNIT_POS as usize];
            if comptime!(variant.cut) {
                let to = (line * sizes.pieces + piece) * columns + UNIT_POS;
                out[to as usize] = Vector::cast_from(result);
            } else {
                result *= Vector::<f32, N>::new(1.0f32 / totals[i]);
                let line = sizes.first_token * sizes.n_heads + line;
                out[(line * columns + UNIT_POS) as usize] = Vector::cast_from(result);
            }
        }
        if comptime!(variant.cut) && UNIT_POS == 0 {
            let to = (line * sizes.pieces + piece) * 2;
            statistics[to as usize] = maxima[i];
            statistics[(to + 1) as usize] = totals[i];
        }
        sync_cube();
    }
}
