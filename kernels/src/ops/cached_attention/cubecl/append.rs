//! Appends the new tokens of rows that have several: normalizes and rotates queries and keys, and
//! writes keys and values to their pages. Several lanes of a plane share a head ([`lines_kernel`]),
//! or cubes process heads if there are no planes or heads do not divide evenly
//! ([`heads_kernel`]).
//!
//! ```text
//! a row of qkv, one head:   | first half     | second half    |
//!                           |l0 l1 l2 ..     |l0 l1 l2 ..     |  a lane has a vector of each half,
//!                                                                so whole pairs to rotate
//! ```

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    Bound, CubeKvStorage, MOST_HEADS, Magnitude, Pass, Run, SUMMERS, Sizes, Source, UNITS, Variant, bind, cell, place,
    placed_dtype, scale_of, sizes, stored, vector,
};
use crate::cubecl::reduce::{lanes_max, lanes_sum};
use crate::cubecl::{array, clamp_index, empty, grid, launch, optional};
use crate::quant::int8::PACKED;

/// Writes keys and values of a run to their pages and returns the placed queries, `[tokens,
/// n_heads, head_dim]`, at their positions in the pass. `rows` has the row of each token.
pub(super) fn rotary_append<R: CubeRuntime>(
    pass: &Pass<R>,
    run: &Run,
    rows: CubeTensor<R>,
    held: [&CubeKvStorage<R>; 2],
) -> CubeTensor<R> {
    let Pass { qkv, heads, positions, .. } = pass;
    let bound = bind(pass, MOST_HEADS, held[0].is_int8());
    let query = empty(qkv, [qkv.meta.shape()[0], heads.n_heads, heads.head_dim], qkv.dtype);
    assert_eq!(rows.dtype, positions.dtype, "cached_attention: integers of one dtype");
    let append = Append { bound, pass, run, rows, held, query };
    match append.lanes() {
        Some(lanes) => append.by_lines(lanes),
        None => append.by_heads(),
    }
    append.query
}

/// Sources and destinations of an append.
struct Append<'a, R: CubeRuntime> {
    bound: Bound<R>,
    pass: &'a Pass<R>,
    run: &'a Run,
    rows: CubeTensor<R>,
    /// Keys and values.
    held: [&'a CubeKvStorage<R>; 2],
    query: CubeTensor<R>,
}

/// How lanes share a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lanes {
    /// Lanes per head, a power of two.
    across: u32,
    /// Elements per vector.
    width: usize,
}

impl<R: CubeRuntime> Append<'_, R> {
    /// If a plane has lanes for all vectors of half a head.
    fn lanes(&self) -> Option<Lanes> {
        let Self { bound, pass, held: [keys, _], .. } = self;
        let plane = bound.variant.row_units.plane;
        let head_dim = pass.heads.head_dim;
        if plane == 1 || !UNITS.is_multiple_of(plane) || !head_dim.is_multiple_of(2) {
            return None;
        }
        let width = vector(bound, pass, self.held, head_dim / 2);
        let across = (head_dim / 2 / width).next_power_of_two() as u32;
        // A vector of bytes is one or two words, which limits the alignment.
        let fits = across <= plane && (!keys.is_int8() || [PACKED, 2 * PACKED].contains(&width));
        fits.then_some(Lanes { across, width })
    }

    fn by_lines(&self, lanes: Lanes) {
        let Self { bound, pass, run, rows, held: [keys, values], query } = self;
        let Pass { qkv, heads, positions, table, .. } = pass;
        let lines = run.tokens * (heads.n_heads + 2 * heads.n_kv_heads);
        // SAFETY: lanes read vectors of the run's `lines`, which are in `qkv`. They write queries
        // to their own places, and keys and values to the cells of their tokens, which are distinct
        // in a pass. Every token has its row. Positions are clamped to the rotary table, pages to
        // the cache. Tensors are aligned to vectors.
        unsafe {
            launch!(
                lines_kernel::LinesKernel,
                &qkv.client,
                grid(lines.div_ceil((UNITS / lanes.across) as usize)),
                CubeDim::new_1d(UNITS),
                [N = lanes.width, M = keys.width(lanes.width)],
                [
                    F = qkv.dtype,
                    P = placed_dtype(qkv, keys),
                    K = keys.dtype(),
                    G = bound.gammas[0].dtype,
                    T = bound.table[0].dtype,
                    I = positions.dtype,
                ],
                [
                    qkv: Array<Vector<lines_kernel::F, lines_kernel::N>> = array(qkv),
                    query_gamma: Array<Vector<lines_kernel::G, lines_kernel::N>> = array(&bound.gammas[0]),
                    key_gamma: Array<Vector<lines_kernel::G, lines_kernel::N>> = array(&bound.gammas[1]),
                    cos: Array<Vector<lines_kernel::T, lines_kernel::N>> = array(&bound.table[0]),
                    sin: Array<Vector<lines_kernel::T, lines_kernel::N>> = array(&bound.table[1]),
                    positions: Array<lines_kernel::I> = array(positions),
                    rows: Array<lines_kernel::I> = array(rows),
                    table: Array<lines_kernel::I> = array(table),
                    query: Array<Vector<lines_kernel::F, lines_kernel::N>> = array(query),
                    keys: Array<Vector<lines_kernel::K, lines_kernel::M>> = array(&keys.stored),
                    values: Array<Vector<lines_kernel::K, lines_kernel::M>> = array(&values.stored),
                    key_scales: ComptimeOption<Array<f32>> = optional(&keys.scales),
                    value_scales: ComptimeOption<Array<f32>> = optional(&values.scales),
                    sizes: Sizes = sizes(bound, pass, run, keys, [1, 0]),
                ],
                [variant: Variant = bound.variant, lanes: Lanes = lanes]
            );
        }
    }

    fn by_heads(&self) {
        let Self { bound, pass, run, rows, held: [keys, values], query } = self;
        let Pass { qkv, heads, positions, table, .. } = pass;
        let cubes = (heads.n_heads + heads.n_kv_heads).div_ceil(MOST_HEADS);
        // SAFETY: each cube places heads of its own token, below the number of heads. Every token
        // has its row. Positions are clamped to the rotary table, pages to the cache.
        unsafe {
            heads_kernel::launch_unchecked(
                &qkv.client,
                grid(run.tokens * cubes),
                CubeDim::new_1d(UNITS),
                array(qkv),
                array(&bound.gammas[0]),
                array(&bound.gammas[1]),
                array(&bound.table[0]),
                array(&bound.table[1]),
                array(positions),
                array(rows),
                array(table),
                array(query),
                array(&keys.stored),
                array(&values.stored),
                optional(&keys.scales),
                optional(&values.scales),
                sizes(bound, pass, run, keys, [cubes, 0]),
                bound.variant,
                qkv.dtype.into(),
                placed_dtype(qkv, keys),
                keys.dtype(),
                bound.gammas[0].dtype.into(),
                bound.table[0].dtype.into(),
                positions.dtype.into(),
            );
        }
    }
}

/// Lanes place a head: a query where attention reads it, a key or a value in its page.
#[cube(launch_unchecked)]
fn lines_kernel<F: Float, P: Float, K: Numeric, G: Float, T: Float, I: Int, N: Size, M: Size>(
    qkv: &Array<Vector<F, N>>,
    query_gamma: &Array<Vector<G, N>>,
    key_gamma: &Array<Vector<G, N>>,
    cos: &Array<Vector<T, N>>,
    sin: &Array<Vector<T, N>>,
    positions: &Array<I>,
    rows: &Array<I>,
    table: &Array<I>,
    query: &mut Array<Vector<F, N>>,
    keys: &mut Array<Vector<K, M>>,
    values: &mut Array<Vector<K, M>>,
    key_scales: &mut ComptimeOption<Array<f32>>,
    value_scales: &mut ComptimeOption<Array<f32>>,
    sizes: &Sizes,
    #[comptime] variant: Variant,
    #[comptime] lanes: Lanes,
    #[define(F)] _dtype: StorageType,
    #[define(P)] _placed_dtype: StorageType,
    #[define(K)] _cache_dtype: StorageType,
    #[define(G)] _gamma_dtype: StorageType,
    #[define(T)] _table_dtype: StorageType,
    #[define(I)] _position_dtype: StorageType,
) {
    let columns = comptime!((variant.head_dim / lanes.width) as u32);
    let half = comptime!(columns / 2);
    let int8 = comptime!(variant.int8);
    let heads = sizes.n_heads + 2 * sizes.n_kv_heads;
    let index = ABSOLUTE_POS as u32 / lanes.across;
    let lane = UNIT_POS % lanes.across;
    // All lanes of a plane take part in exchanges; lanes without data write nothing.
    let there = index < sizes.tokens * heads && lane < half;
    let line = min(index, sizes.tokens * heads - 1);
    let token = sizes.first_token + line / heads;
    let head = line % heads;
    let column = min(lane, half - 1);
    let from = (token * heads + head) * columns + column;
    let mut first = Vector::<f32, N>::cast_from(qkv[from as usize]);
    let mut second = Vector::<f32, N>::cast_from(qkv[(from + half) as usize]);
    let position = clamp_index::<I>(positions[token as usize], sizes.keys - 1);
    let is_value = head >= sizes.n_heads + sizes.n_kv_heads;
    if comptime!(variant.normed) {
        let mut sum = lanes_sum::<N>(first * first) + lanes_sum::<N>(second * second);
        sum = select(lane < half, sum, 0.0f32);
        #[unroll]
        for step in 0..comptime!(lanes.across.trailing_zeros()) {
            sum += plane_shuffle_xor(sum, 1u32 << step);
        }
        if !is_value {
            let mut gamma = Vector::<f32, N>::cast_from(query_gamma[column as usize]);
            let mut other_gamma = Vector::<f32, N>::cast_from(query_gamma[(column + half) as usize]);
            if head >= sizes.n_heads {
                gamma = Vector::<f32, N>::cast_from(key_gamma[column as usize]);
                other_gamma = Vector::<f32, N>::cast_from(key_gamma[(column + half) as usize]);
            }
            let share = comptime!(1.0 / variant.head_dim as f32);
            let inverse = Vector::<f32, N>::new(1.0f32 / (sum * share + sizes.epsilon).sqrt());
            first = Vector::<f32, N>::cast_from(Vector::<P, N>::cast_from(first * inverse * gamma));
            second = Vector::<f32, N>::cast_from(Vector::<P, N>::cast_from(second * inverse * other_gamma));
        }
    }
    if comptime!(variant.rotated) {
        let rotates = !is_value;
        if rotates {
            let angle = (min(position, sizes.last) * half + column) as usize;
            let cos = Vector::<f32, N>::cast_from(cos[angle]);
            let sin = Vector::<f32, N>::cast_from(sin[angle]);
            let turned = first * cos - second * sin;
            second = second * cos + first * sin;
            first = turned;
        }
    }
    let first = Vector::<P, N>::cast_from(first);
    let second = Vector::<P, N>::cast_from(second);
    let mut scale = 1.0f32;
    if int8 {
        let mut of = Magnitude { largest: 0.0f32, sum: 0.0f32 };
        let magnitudes = (Vector::<f32, N>::cast_from(first).abs(), Vector::<f32, N>::cast_from(second).abs());
        if lane < half {
            of.largest = max(lanes_max::<N>(magnitudes.0), lanes_max::<N>(magnitudes.1));
            of.sum = lanes_sum::<N>(magnitudes.0) + lanes_sum::<N>(magnitudes.1);
        }
        #[unroll]
        for step in 0..comptime!(lanes.across.trailing_zeros()) {
            of.largest = max(of.largest, plane_shuffle_xor(of.largest, 1u32 << step));
            of.sum += plane_shuffle_xor(of.sum, 1u32 << step);
        }
        scale = scale_of(of);
    }
    if there {
        if head < sizes.n_heads {
            let to = (token * sizes.n_heads + head) * columns + column;
            query[to as usize] = Vector::cast_from(first);
            query[(to + half) as usize] = Vector::cast_from(second);
        } else {
            let kv_head = (head - sizes.n_heads) % sizes.n_kv_heads;
            let line = cell::<I>(table, u32::cast_from(rows[token as usize]), kv_head, position, sizes);
            let to = line * columns + column;
            let first = stored::<K, M, N>(Vector::cast_from(first), scale, int8);
            let second = stored::<K, M, N>(Vector::cast_from(second), scale, int8);
            if is_value {
                values[to as usize] = first;
                values[(to + half) as usize] = second;
            } else {
                keys[to as usize] = first;
                keys[(to + half) as usize] = second;
            }
            if int8 {
                let is_first = lane == 0;
                if is_first {
                    if is_value {
                        value_scales.as_mut().unwrap()[line as usize] = scale;
                    } else {
                        key_scales.as_mut().unwrap()[line as usize] = scale;
                    }
                }
            }
        }
    }
}

/// A cube places some of one token's heads.
#[cube(launch_unchecked)]
fn heads_kernel<F: Float, P: Float, K: Numeric, G: Float, T: Float, I: Int>(
    qkv: &Array<F>,
    query_gamma: &Array<G>,
    key_gamma: &Array<G>,
    cos: &Array<T>,
    sin: &Array<T>,
    positions: &Array<I>,
    rows: &Array<I>,
    table: &Array<I>,
    query: &mut Array<F>,
    keys: &mut Array<K>,
    values: &mut Array<K>,
    key_scales: &mut ComptimeOption<Array<f32>>,
    value_scales: &mut ComptimeOption<Array<f32>>,
    sizes: &Sizes,
    #[comptime] variant: Variant,
    #[define(F)] _dtype: StorageType,
    #[define(P)] _placed_dtype: StorageType,
    #[define(K)] _cache_dtype: StorageType,
    #[define(G)] _gamma_dtype: StorageType,
    #[define(T)] _table_dtype: StorageType,
    #[define(I)] _position_dtype: StorageType,
) {
    let head_dim = comptime!(variant.head_dim as u32);
    let most = comptime!(variant.heads as u32);
    let mut token = CUBE_POS as u32 / sizes.pieces;
    if token >= sizes.tokens {
        terminate!();
    }
    token += sizes.first_token;
    let position = clamp_index::<I>(positions[token as usize], sizes.keys - 1);
    let table_row = u32::cast_from(rows[token as usize]);
    let placed_heads = sizes.n_heads + sizes.n_kv_heads;
    let row = token * (placed_heads + sizes.n_kv_heads) * head_dim;
    let first = CUBE_POS as u32 % sizes.pieces * most;
    // These may include queries, then keys, which are adjacent.
    let end = min(first + most, placed_heads);
    let middle = min(max(sizes.n_heads, first), end);
    let queries = middle - first;
    let keys_at = row + middle * head_dim;
    let source = Source { start: row + first * head_dim, queries, keys: keys_at, heads: end - first, position };
    let mut placed = SharedMemory::<f32>::new(comptime!(variant.heads * variant.head_dim));
    place::<F, P, G, T>(qkv, query_gamma, key_gamma, cos, sin, &mut placed, &source, sizes, variant);
    for i in range_stepped(UNIT_POS, queries * head_dim, UNITS) {
        query[((token * sizes.n_heads + first) * head_dim + i) as usize] = F::cast_from(placed[i as usize]);
    }
    // Elements written at once: a word of bytes has four.
    let each = comptime!(if variant.int8 { PACKED as u32 } else { 1 });
    let words = head_dim / each;
    // The maximum and the sum of each head's keys, then of its values, from each of its units.
    let mut magnitudes = SharedMemory::<f32>::new(comptime!(if variant.int8 { 4 * UNITS as usize } else { 4 }));
    if comptime!(variant.int8) {
        let own = UNIT_POS / SUMMERS;
        let mut key = Magnitude { largest: 0.0f32, sum: 0.0f32 };
        let mut value = Magnitude { largest: 0.0f32, sum: 0.0f32 };
        if own < end - middle {
            let value_at = row + (placed_heads + middle - sizes.n_heads + own) * head_dim;
            for column in range_stepped(UNIT_POS % SUMMERS, head_dim, SUMMERS) {
                let one = placed[((queries + own) * head_dim + column) as usize].abs();
                key.largest = max(key.largest, one);
                key.sum += one;
                let one = f32::cast_from(qkv[(value_at + column) as usize]).abs();
                value.largest = max(value.largest, one);
                value.sum += one;
            }
        }
        magnitudes[UNIT_POS as usize] = key.largest;
        magnitudes[(UNITS + UNIT_POS) as usize] = key.sum;
        magnitudes[(2 * UNITS + UNIT_POS) as usize] = value.largest;
        magnitudes[(3 * UNITS + UNIT_POS) as usize] = value.sum;
        sync_cube();
    }
    for i in range_stepped(UNIT_POS, (end - middle) * words, UNITS) {
        let own = i / words;
        let head = middle - sizes.n_heads + own;
        let word = i % words;
        let line = cell::<I>(table, table_row, head, position, sizes);
        let to = (line * words + word) as usize;
        let key_at = (queries + own) * head_dim + word * each;
        let value_at = row + (placed_heads + head) * head_dim + word * each;
        if comptime!(variant.int8) {
            let mut of_key = Magnitude { largest: 0.0f32, sum: 0.0f32 };
            let mut of_value = Magnitude { largest: 0.0f32, sum: 0.0f32 };
            #[unroll]
            for part in 0..SUMMERS {
                let at = own * SUMMERS + part;
                of_key.largest = max(of_key.largest, magnitudes[at as usize]);
                of_key.sum += magnitudes[(UNITS + at) as usize];
                of_value.largest = max(of_value.largest, magnitudes[(2 * UNITS + at) as usize]);
                of_value.sum += magnitudes[(3 * UNITS + at) as usize];
            }
            let key_scale = scale_of(of_key);
            let value_scale = scale_of(of_value);
            let mut key = Vector::<f32, Const<4>>::new(0.0);
            let mut value = Vector::<f32, Const<4>>::new(0.0);
            #[unroll]
            for j in 0..PACKED {
                key[j] = placed[(key_at + comptime!(j as u32)) as usize];
                value[j] = f32::cast_from(qkv[(value_at + comptime!(j as u32)) as usize]);
            }
            keys[to] = K::cast_from(stored::<K, Const<1>, Const<4>>(key, key_scale, true)[0usize]);
            values[to] = K::cast_from(stored::<K, Const<1>, Const<4>>(value, value_scale, true)[0usize]);
            if word == 0 {
                key_scales.as_mut().unwrap()[line as usize] = key_scale;
                value_scales.as_mut().unwrap()[line as usize] = value_scale;
            }
        } else {
            keys[to] = K::cast_from(placed[key_at as usize]);
            values[to] = K::cast_from(qkv[value_at as usize]);
        }
    }
}
