//! Attention of one token per row (flash decoding) on devices with planes.
//!
//! ```text
//! a cube: one to eight query heads of a row that share a KV head, and some keys (split-KV)
//!
//! a plane's lanes    | key 0      | key 1     | key 2  ..   `across` lanes per key, each with some
//!                    |l0 l1 .. l7 |l8 .. l15  |            of its vectors; a lane loads `run` keys
//!                                                           together
//! each group of `across` lanes: its own running maximum, sum and output (online softmax)
//! -> combined over lanes, planes and, in a second launch, pieces
//! ```
//!
//! The first keys and values are loaded before anything else is known, so that a short row costs
//! little more than one memory latency.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    Bound, CubeKvStorage, MOST_HEADS, Magnitude, Pass, Pieces, Run, Sizes, UNITS, Variant, bind, cell, numbers,
    placed_dtype, scale_of, sizes, stored, vector,
};
use crate::cubecl::reduce::{RowUnits, lanes_max, lanes_sum, row_sum};
use crate::cubecl::{array, clamp_index, grid, launch, optional};
use crate::masked::MASKED;
use crate::ops::attention::cubecl::capped;
use crate::packed_heads::PackedHeads;
use crate::quant::int8::PACKED;

/// Vectors of keys, and of values, that a lane loads together: fewer with many cubes, so that more
/// of them run concurrently.
const RUN: usize = 8;
const SHORT_RUN: usize = 4;
/// Minimum rounds of such loads per piece: fewer are not worth the launch that combines pieces.
const ROUNDS: usize = 4;
/// Assumed number of concurrent cubes if the device does not report its multiprocessors.
const CUBES: usize = 128;

/// How lanes share a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lanes {
    /// Units of a cube, whole planes.
    units: u32,
    plane: u32,
    /// Lanes per key, a power of two.
    across: u32,
    /// Its vectors per lane.
    each: usize,
    /// Keys that a lane loads together.
    run: usize,
}

impl Lanes {
    fn new(units: u32, plane: u32, columns: usize, run: usize) -> Self {
        let across = plane.min(columns.next_power_of_two() as u32);
        let each = columns.div_ceil(across as usize);
        // Each unit writes a column of the result.
        let units = units.max(plane).max(columns.next_power_of_two() as u32);
        Self { units, plane, across, each, run: (run / each).max(1) }
    }

    /// Keys per round of a cube.
    fn round(&self) -> usize {
        (self.units / self.across) as usize * self.run
    }

    fn planes(&self) -> u32 {
        self.units / self.plane
    }

    /// The units of a plane, on one row.
    fn row_units(&self, variant: Variant) -> RowUnits {
        RowUnits { units: self.plane, ..variant.row_units }
    }
}

/// Distance of the two elements of a rotated pair; without rotation, the head size.
fn pair_distance<R: CubeRuntime>(bound: &Bound<R>) -> usize {
    let Variant { head_dim, rotated, .. } = bound.variant;
    if rotated { head_dim / 2 } else { head_dim }
}

/// Whether the kernel supports an INT8 cache here: a vector must be whole words.
pub(super) fn take_int8<R: CubeRuntime>(pass: &Pass<R>, held: [&CubeKvStorage<R>; 2]) -> bool {
    let bound = bind(pass, 1, true);
    bound.variant.row_units.plane > 1 && vector(&bound, pass, held, pair_distance(&bound)).is_multiple_of(PACKED)
}

/// Writes the result, or its pieces.
pub(super) fn attend<R: CubeRuntime>(
    mut bound: Bound<R>,
    pass: &Pass<R>,
    run: &Run,
    [keys, values]: [&CubeKvStorage<R>; 2],
    out: &CubeTensor<R>,
) -> Option<Pieces<R>> {
    let Pass { qkv, heads, positions, table, .. } = pass;
    let batch_size = run.tokens;
    let PackedHeads { n_heads, n_kv_heads, head_dim } = *heads;
    let group = n_heads / n_kv_heads;
    let hardware = &qkv.client.properties().hardware;
    let busy = hardware.num_streaming_multiprocessors.map_or(CUBES, |count| count as usize);
    // Heads that share a key are processed together, if there are enough cubes anyway.
    let possible = |count: &usize| group.is_multiple_of(*count) && batch_size * (n_heads / count) >= busy;
    let together = (1..=MOST_HEADS.min(group)).rev().find(possible).unwrap_or(1);
    let cubes = batch_size * (n_heads / together);
    let [[query_gamma, key_gamma], [cos, sin]] = [&bound.gammas, &bound.table].map(|pair| pair.each_ref());
    let vector = vector(&bound, pass, [keys, values], pair_distance(&bound));
    assert!(!keys.is_int8() || vector.is_multiple_of(PACKED), "cached_attention: vectors of whole words");
    // Many small cubes run concurrently; a few have a multiprocessor each.
    let (units, reads) = if cubes <= busy { (UNITS, RUN) } else { (UNITS / 2, SHORT_RUN) };
    let lanes = Lanes::new(units, bound.variant.row_units.plane, head_dim / vector, reads);
    let rounds = run.keys.div_ceil(lanes.round());
    let most = rounds.div_ceil(ROUNDS).min((2 * busy).div_ceil(cubes)).max(1);
    let piece = rounds.div_ceil(most) * lanes.round();
    let count = run.keys.div_ceil(piece);
    let pieces = Pieces::new(out, pass, run, count);
    (bound.variant.heads, bound.variant.cut) = (together, pieces.is_some());
    let [partial, statistics] = Pieces::or(&pieces, out);
    // SAFETY: words of bytes are aligned to vectors. Each cube writes the heads of its own row and
    // piece, and its row's new key and value, which other cubes do not use. Positions are clamped
    // to table and cache. The tensor that replaces missing statistics is not written.
    unsafe {
        launch!(
            planes_kernel::PlanesKernel,
            &qkv.client,
            grid(cubes * count),
            CubeDim::new_1d(lanes.units),
            [N = vector, M = keys.width(vector)],
            [
                F = qkv.dtype,
                P = placed_dtype(qkv, keys),
                K = keys.dtype(),
                G = bound.gammas[0].dtype,
                T = bound.table[0].dtype,
                I = positions.dtype,
                O = partial.dtype,
            ],
            [
                qkv: Array<Vector<planes_kernel::F, planes_kernel::N>> = array(qkv),
                query_gamma: Array<Vector<planes_kernel::G, planes_kernel::N>> = array(query_gamma),
                key_gamma: Array<Vector<planes_kernel::G, planes_kernel::N>> = array(key_gamma),
                cos: Array<Vector<planes_kernel::T, planes_kernel::N>> = array(cos),
                sin: Array<Vector<planes_kernel::T, planes_kernel::N>> = array(sin),
                positions: Array<planes_kernel::I> = array(positions),
                table: Array<planes_kernel::I> = array(table),
                keys: Array<Vector<planes_kernel::K, planes_kernel::M>> = array(&keys.stored),
                values: Array<Vector<planes_kernel::K, planes_kernel::M>> = array(&values.stored),
                key_scales: ComptimeOption<Array<f32>> = optional(&keys.scales),
                value_scales: ComptimeOption<Array<f32>> = optional(&values.scales),
                partial: Array<Vector<planes_kernel::O, planes_kernel::N>> = array(partial),
                statistics: Array<f32> = array(statistics),
                sizes: Sizes = sizes(&bound, pass, run, keys, [count, piece]),
            ],
            [variant: Variant = bound.variant, lanes: Lanes = lanes]
        );
    }
    pieces
}

/// A cube attends with query heads that share a key head, over one piece of the keys.
#[cube(launch_unchecked)]
fn planes_kernel<F: Float, P: Float, K: Numeric, G: Float, T: Float, I: Int, O: Float, N: Size, M: Size>(
    qkv: &Array<Vector<F, N>>,
    query_gamma: &Array<Vector<G, N>>,
    key_gamma: &Array<Vector<G, N>>,
    cos: &Array<Vector<T, N>>,
    sin: &Array<Vector<T, N>>,
    positions: &Array<I>,
    table: &Array<I>,
    keys: &mut Array<Vector<K, M>>,
    values: &mut Array<Vector<K, M>>,
    key_scales: &mut ComptimeOption<Array<f32>>,
    value_scales: &mut ComptimeOption<Array<f32>>,
    out: &mut Array<Vector<O, N>>,
    statistics: &mut Array<f32>,
    sizes: &Sizes,
    #[comptime] variant: Variant,
    #[comptime] lanes: Lanes,
    #[define(F)] _dtype: StorageType,
    #[define(P)] _placed_dtype: StorageType,
    #[define(K)] _cache_dtype: StorageType,
    #[define(G)] _gamma_dtype: StorageType,
    #[define(T)] _table_dtype: StorageType,
    #[define(I)] _position_dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let width = N::value();
    let columns = comptime!((variant.head_dim / width) as u32);
    let each = comptime!(lanes.each);
    let run = comptime!(lanes.run);
    let across = comptime!(lanes.across);
    let heads = comptime!(variant.heads as u32);
    let slots = comptime!(lanes.units / lanes.across);
    let piece = CUBE_POS as u32 % sizes.pieces;
    let groups = sizes.n_heads / heads;
    let head = CUBE_POS as u32 / sizes.pieces % groups * heads;
    let batch = CUBE_POS as u32 / sizes.pieces / groups;
    if batch >= sizes.tokens {
        terminate!();
    }
    let token = sizes.first_token + batch;
    let cached_row = sizes.first_row + batch;
    let kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    let first = piece * sizes.piece;
    let slot = UNIT_POS / across;
    let lane = UNIT_POS % across;

    let int8 = comptime!(variant.int8);
    let mut key = Array::<Vector<K, M>>::new(comptime!(run * each));
    let mut value = Array::<Vector<K, M>>::new(comptime!(run * each));
    // INT8 scales: those of the keys, then those of the values.
    let mut scales = Array::<f32>::new(comptime!(if variant.int8 { 2 * lanes.run } else { 1 }));
    let in_row = (cached_row, kv_head, first + slot);
    read::<K, I, M>(
        keys,
        values,
        key_scales,
        value_scales,
        table,
        &mut key,
        &mut value,
        &mut scales,
        in_row,
        lane,
        columns,
        sizes,
        lanes,
        int8,
    );
    let row = token * (sizes.n_heads + 2 * sizes.n_kv_heads);
    let mut own_value = Array::<Vector<F, N>>::new(each);
    #[unroll]
    for e in 0..each {
        let column = min(lane + comptime!(e as u32 * lanes.across), columns - 1);
        let line = row + sizes.n_heads + sizes.n_kv_heads + kv_head;
        own_value[e] = qkv[(line * columns + column) as usize];
    }
    let position = clamp_index::<I>(positions[token as usize], sizes.keys - 1);

    // Queries, then the new key.
    let mut placed = SharedMemory::<Vector<P, N>>::new(comptime!((variant.heads + 1) * variant.head_dim / width));
    #[unroll]
    for turn in 0..comptime!((variant.heads as u32 + 1).div_ceil(lanes.planes())) {
        let own = comptime!(turn * lanes.planes()) + UNIT_POS / comptime!(lanes.plane);
        if own <= heads {
            let mut from = row + head + own;
            if own == heads {
                from = row + sizes.n_heads + kv_head;
            }
            place::<F, P, G, T, N>(
                qkv,
                query_gamma,
                key_gamma,
                cos,
                sin,
                &mut placed,
                from,
                own,
                min(position, sizes.last),
                sizes,
                variant,
                lanes,
            );
        }
    }
    sync_cube();

    let mut own_key = Array::<Vector<P, N>>::new(each);
    let mut query = Array::<Vector<f32, N>>::new(comptime!(variant.heads * lanes.each));
    #[unroll]
    for e in 0..each {
        let own = lane + comptime!(e as u32 * lanes.across);
        let column = min(own, columns - 1);
        own_key[e] = placed[(heads * columns + column) as usize];
        #[unroll]
        for i in 0..variant.heads {
            let vector = placed[(comptime!(i as u32) * columns + column) as usize];
            // Lanes beyond the head's columns contribute nothing.
            let there = f32::cast_from(own < columns);
            query[comptime!(i * each + e)] = Vector::<f32, N>::cast_from(vector) * Vector::<f32, N>::new(there);
        }
    }
    // Rounded as in the cache.
    let mut key_scale = 1.0f32;
    let mut value_scale = 1.0f32;
    if int8 {
        key_scale = lanes_scale::<P, N>(&own_key, lanes);
        value_scale = lanes_scale::<F, N>(&own_value, lanes);
    }
    let mut new_key = Array::<Vector<K, M>>::new(each);
    let mut new_value = Array::<Vector<K, M>>::new(each);
    #[unroll]
    for e in 0..each {
        new_key[e] = stored::<K, M, N>(Vector::cast_from(own_key[e]), key_scale, int8);
        new_value[e] = stored::<K, M, N>(Vector::cast_from(own_value[e]), value_scale, int8);
    }
    let shares = sizes.n_heads / sizes.n_kv_heads;
    if position >= first && position < first + sizes.piece && head == kv_head * shares && slot == 0 {
        let line = cell::<I>(table, cached_row, kv_head, position, sizes);
        #[unroll]
        for e in 0..each {
            let column = lane + comptime!(e as u32 * lanes.across);
            if column < columns {
                let to = (line * columns + column) as usize;
                keys[to] = new_key[e];
                values[to] = new_value[e];
            }
        }
        if int8 {
            let first = lane == 0;
            if first {
                key_scales.as_mut().unwrap()[line as usize] = key_scale;
                value_scales.as_mut().unwrap()[line as usize] = value_scale;
            }
        }
    }

    // A softmax per slot, relative to its maximum so far.
    let mut maxima = Array::<f32>::new(variant.heads);
    let mut totals = Array::<f32>::new(variant.heads);
    let mut results = Array::<Vector<f32, N>>::new(comptime!(variant.heads * lanes.each));
    #[unroll]
    for i in 0..variant.heads {
        maxima[i] = MASKED;
        totals[i] = 0.0f32;
        #[unroll]
        for e in 0..each {
            results[comptime!(i * each + e)] = Vector::<f32, N>::new(0.0);
        }
    }
    let end = min(first + sizes.piece, position + 1);
    let round = comptime!(slots * lanes.run as u32);
    for start in range_stepped(first, end, round) {
        if start > first {
            let in_row = (cached_row, kv_head, start + slot);
            read::<K, I, M>(
                keys,
                values,
                key_scales,
                value_scales,
                table,
                &mut key,
                &mut value,
                &mut scales,
                in_row,
                lane,
                columns,
                sizes,
                lanes,
                int8,
            );
        }
        let mut scores = Array::<f32>::new(comptime!(variant.heads * lanes.run));
        #[unroll]
        for j in 0..run {
            let at = start + slot + comptime!(j as u32 * slots);
            let seen = at < end && i32::cast_from(at) > i32::cast_from(position) - sizes.window;
            // The new key and value may not be visible in the cache yet.
            if at == position {
                #[unroll]
                for e in 0..each {
                    key[comptime!(j * each + e)] = new_key[e];
                    value[comptime!(j * each + e)] = new_value[e];
                }
                if int8 {
                    scales[j] = key_scale;
                    scales[comptime!(lanes.run + j)] = value_scale;
                }
            }
            #[unroll]
            for i in 0..variant.heads {
                let mut products = Vector::<f32, N>::new(0.0);
                #[unroll]
                for e in 0..each {
                    products += numbers::<K, M, N>(key[comptime!(j * each + e)], int8) * query[comptime!(i * each + e)];
                }
                let mut score = lanes_sum::<N>(products);
                if int8 {
                    score *= scales[j];
                }
                #[unroll]
                for step in 0..comptime!(lanes.across.trailing_zeros()) {
                    score += plane_shuffle_xor(score, 1u32 << step);
                }
                scores[comptime!(i * run + j)] = select(seen, capped(score * sizes.scale, sizes.softcap), MASKED);
            }
        }
        #[unroll]
        for i in 0..variant.heads {
            let mut highest = maxima[i];
            #[unroll]
            for j in 0..run {
                highest = max(highest, scores[comptime!(i * run + j)]);
            }
            let factor = (maxima[i] - highest).exp();
            maxima[i] = highest;
            totals[i] *= factor;
            #[unroll]
            for e in 0..each {
                results[comptime!(i * each + e)] *= Vector::<f32, N>::new(factor);
            }
            #[unroll]
            for j in 0..run {
                let score = scores[comptime!(i * run + j)];
                let share = select(score > MASKED, (score - highest).exp(), 0.0f32);
                totals[i] += share;
                let mut factor = share;
                if int8 {
                    factor *= scales[comptime!(lanes.run + j)];
                }
                // Cache lines past the row's end may hold anything, NaN included.
                let at = start + slot + comptime!(j as u32 * slots);
                if at < end {
                    #[unroll]
                    for e in 0..each {
                        results[comptime!(i * each + e)] +=
                            numbers::<K, M, N>(value[comptime!(j * each + e)], int8) * Vector::<f32, N>::new(factor);
                    }
                }
            }
        }
    }

    // Combine the slots of a plane, then the planes. Their output may overwrite the queries.
    sync_cube();
    let planes = comptime!(lanes.planes());
    let plane = UNIT_POS / comptime!(lanes.plane);
    let in_plane = UNIT_POS % comptime!(lanes.plane);
    let mut shared = SharedMemory::<Vector<f32, N>>::new(comptime!(lanes.planes() as usize * variant.head_dim / width));
    let mut shares = SharedMemory::<f32>::new(comptime!(2 * lanes.planes() as usize));
    #[unroll]
    for i in 0..variant.heads {
        let mut highest = maxima[i];
        #[unroll]
        for step in comptime!(lanes.across.trailing_zeros())..comptime!(lanes.plane.trailing_zeros()) {
            highest = max(highest, plane_shuffle_xor(highest, 1u32 << step));
        }
        let factor = (maxima[i] - highest).exp();
        let mut total = totals[i] * factor;
        #[unroll]
        for step in comptime!(lanes.across.trailing_zeros())..comptime!(lanes.plane.trailing_zeros()) {
            total += plane_shuffle_xor(total, 1u32 << step);
        }
        #[unroll]
        for e in 0..each {
            let mut result = results[comptime!(i * each + e)] * Vector::<f32, N>::new(factor);
            #[unroll]
            for step in comptime!(lanes.across.trailing_zeros())..comptime!(lanes.plane.trailing_zeros()) {
                #[unroll]
                for j in 0..width {
                    result[j] += plane_shuffle_xor(result[j], 1u32 << step);
                }
            }
            let column = lane + comptime!(e as u32 * lanes.across);
            if in_plane < across && column < columns {
                shared[(plane * columns + column) as usize] = result;
            }
        }
        if in_plane == 0 {
            shares[(2 * plane) as usize] = highest;
            shares[(2 * plane + 1) as usize] = total;
        }
        sync_cube();
        if UNIT_POS < columns {
            let mut highest = MASKED.runtime();
            #[unroll]
            for other in 0..planes {
                highest = max(highest, shares[comptime!(2 * other as usize)]);
            }
            let mut total = 0.0f32;
            let mut result = Vector::<f32, N>::new(0.0);
            #[unroll]
            for other in 0..planes {
                let factor = (shares[comptime!(2 * other as usize)] - highest).exp();
                total += shares[comptime!(2 * other as usize + 1)] * factor;
                result += shared[(other * columns + UNIT_POS) as usize] * Vector::<f32, N>::new(factor);
            }
            let line = batch * sizes.n_heads + head + comptime!(i as u32);
            if comptime!(variant.cut) {
                let to = line * sizes.pieces + piece;
                out[(to * columns + UNIT_POS) as usize] = Vector::cast_from(result);
                if UNIT_POS == 0 {
                    statistics[(2 * to) as usize] = highest;
                    statistics[(2 * to + 1) as usize] = total;
                }
            } else {
                result *= Vector::<f32, N>::new(1.0f32 / total);
                let line = sizes.first_token * sizes.n_heads + line;
                out[(line * columns + UNIT_POS) as usize] = Vector::cast_from(result);
            }
        }
        if comptime!(i + 1 < variant.heads) {
            sync_cube();
        }
    }
}

/// Loads a lane's vectors of a run of keys and values of a row and key head, the first one at index
/// `in_row`; repeats the last ones past the end.
#[cube]
fn read<K: Numeric, I: Int, M: Size>(
    keys: &Array<Vector<K, M>>,
    values: &Array<Vector<K, M>>,
    key_scales: &ComptimeOption<Array<f32>>,
    value_scales: &ComptimeOption<Array<f32>>,
    table: &Array<I>,
    key: &mut Array<Vector<K, M>>,
    value: &mut Array<Vector<K, M>>,
    scales: &mut Array<f32>,
    in_row: (u32, u32, u32),
    lane: u32,
    columns: u32,
    sizes: &Sizes,
    #[comptime] lanes: Lanes,
    #[comptime] int8: bool,
) {
    let (row, kv_head, first) = in_row;
    // All addresses before the first load.
    let mut lines = Array::<u32>::new(lanes.run);
    #[unroll]
    for j in 0..lanes.run {
        let at = min(first + comptime!(j as u32 * lanes.units / lanes.across), sizes.keys - 1);
        let line = cell::<I>(table, row, kv_head, at, sizes);
        lines[j] = line * columns;
        if int8 {
            scales[j] = key_scales.as_ref().unwrap()[line as usize];
            scales[comptime!(lanes.run + j)] = value_scales.as_ref().unwrap()[line as usize];
        }
    }
    #[unroll]
    for j in 0..lanes.run {
        #[unroll]
        for e in 0..lanes.each {
            let column = min(lane + comptime!(e as u32 * lanes.across), columns - 1);
            key[comptime!(j * lanes.each + e)] = keys[(lines[j] + column) as usize];
        }
    }
    #[unroll]
    for j in 0..lanes.run {
        #[unroll]
        for e in 0..lanes.each {
            let column = min(lane + comptime!(e as u32 * lanes.across), columns - 1);
            value[comptime!(j * lanes.each + e)] = values[(lines[j] + column) as usize];
        }
    }
}

/// The INT8 scale of a head whose vectors are spread over lanes.
#[cube]
fn lanes_scale<F: Float, N: Size>(own: &Array<Vector<F, N>>, #[comptime] lanes: Lanes) -> f32 {
    let mut of = Magnitude { largest: 0.0f32, sum: 0.0f32 };
    #[unroll]
    for e in 0..lanes.each {
        let magnitudes = Vector::<f32, N>::cast_from(own[e]).abs();
        of.largest = max(of.largest, lanes_max::<N>(magnitudes));
        of.sum += lanes_sum::<N>(magnitudes);
    }
    #[unroll]
    for step in 0..comptime!(lanes.across.trailing_zeros()) {
        of.largest = max(of.largest, plane_shuffle_xor(of.largest, 1u32 << step));
        of.sum += plane_shuffle_xor(of.sum, 1u32 << step);
    }
    scale_of(of)
}

/// A plane writes a head to shared memory, normalized and rotated: row `line` of `qkv` in heads, as
/// head `own`. A lane has vectors of the first half, and the matching ones of the second.
#[cube]
fn place<F: Float, P: Float, G: Float, T: Float, N: Size>(
    qkv: &Array<Vector<F, N>>,
    query_gamma: &Array<Vector<G, N>>,
    key_gamma: &Array<Vector<G, N>>,
    cos: &Array<Vector<T, N>>,
    sin: &Array<Vector<T, N>>,
    placed: &mut SharedMemory<Vector<P, N>>,
    line: u32,
    own: u32,
    position: u32,
    sizes: &Sizes,
    #[comptime] variant: Variant,
    #[comptime] lanes: Lanes,
) {
    let width = N::value();
    let columns = comptime!((variant.head_dim / width) as u32);
    let half = comptime!(columns.div_ceil(2));
    let turns = comptime!(half.div_ceil(lanes.plane) as usize);
    let mut upper = Array::<Vector<f32, N>>::new(turns);
    let mut lower = Array::<Vector<f32, N>>::new(turns);
    let mut gammas = Array::<Vector<f32, N>>::new(comptime!(2 * turns));
    let mut angles = Array::<Vector<f32, N>>::new(comptime!(2 * turns));
    let mut squares = 0.0f32;
    // All loads before their first use.
    #[unroll]
    for turn in 0..turns {
        let column = min(comptime!(turn as u32 * lanes.plane) + UNIT_POS % comptime!(lanes.plane), half - 1);
        // With an odd number of vectors, the middle one has no partner.
        let other = min(column + half, columns - 1);
        upper[turn] = Vector::<f32, N>::cast_from(qkv[(line * columns + column) as usize]);
        lower[turn] = Vector::<f32, N>::cast_from(qkv[(line * columns + other) as usize]);
        if comptime!(variant.normed) {
            if own == comptime!(variant.heads as u32) {
                gammas[comptime!(2 * turn)] = Vector::<f32, N>::cast_from(key_gamma[column as usize]);
                gammas[comptime!(2 * turn + 1)] = Vector::<f32, N>::cast_from(key_gamma[other as usize]);
            } else {
                gammas[comptime!(2 * turn)] = Vector::<f32, N>::cast_from(query_gamma[column as usize]);
                gammas[comptime!(2 * turn + 1)] = Vector::<f32, N>::cast_from(query_gamma[other as usize]);
            }
        }
        if comptime!(variant.rotated) {
            let angle = (position * half + column) as usize;
            angles[comptime!(2 * turn)] = Vector::<f32, N>::cast_from(cos[angle]);
            angles[comptime!(2 * turn + 1)] = Vector::<f32, N>::cast_from(sin[angle]);
        }
    }
    if comptime!(variant.normed) {
        #[unroll]
        for turn in 0..turns {
            let column = comptime!(turn as u32 * lanes.plane) + UNIT_POS % comptime!(lanes.plane);
            if column < half {
                squares += lanes_sum::<N>(upper[turn] * upper[turn]);
                if column + half < columns {
                    squares += lanes_sum::<N>(lower[turn] * lower[turn]);
                }
            }
        }
        let sum = row_sum(squares, lanes.row_units(variant));
        let share = comptime!(1.0 / variant.head_dim as f32);
        let inverse = Vector::<f32, N>::new(1.0f32 / (sum * share + sizes.epsilon).sqrt());
        #[unroll]
        for turn in 0..turns {
            let first = Vector::<P, N>::cast_from(upper[turn] * inverse * gammas[comptime!(2 * turn)]);
            let second = Vector::<P, N>::cast_from(lower[turn] * inverse * gammas[comptime!(2 * turn + 1)]);
            upper[turn] = Vector::<f32, N>::cast_from(first);
            lower[turn] = Vector::<f32, N>::cast_from(second);
        }
    }
    #[unroll]
    for turn in 0..turns {
        let mut first = upper[turn];
        let mut second = lower[turn];
        if comptime!(variant.rotated) {
            let cos = angles[comptime!(2 * turn)];
            let sin = angles[comptime!(2 * turn + 1)];
            first = upper[turn] * cos - lower[turn] * sin;
            second = lower[turn] * cos + upper[turn] * sin;
        }
        let column = comptime!(turn as u32 * lanes.plane) + UNIT_POS % comptime!(lanes.plane);
        if column < half {
            placed[(own * columns + column) as usize] = Vector::cast_from(first);
            if column + half < columns {
                placed[(own * columns + column + half) as usize] = Vector::cast_from(second);
            }
        }
    }
}
