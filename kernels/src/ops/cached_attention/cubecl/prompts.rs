//! Rows of several new tokens: one kernel places and appends those of all rows, and then one attends to them over pages, where there is one. Elsewhere
//! a row's pages are put side by side before attention, row by row.

use burn::tensor::backend::Backend;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    CubeHeld, MOST_HEADS, Magnitude, Pass, Run, SUMMERS, Sizes, Source, UNITS, Variant, bind, cell, numbers, place,
    scale_of, sizes, stored,
};
use crate::cubecl::{array, clamp_index, empty, grid, optional, vector_width};
use crate::ops::attention::AttentionOptions;
#[cfg(feature = "cuda")]
use crate::ops::attention::PagedHopper;
use crate::ops::attention::cubecl::{CubeMask, Dims, Heads, attention_forward};
use crate::ops::cached_attention::CachedTokens;
use crate::ops::weight::PACKED;
use crate::packed_heads::PackedHeads;

/// Attends to the keys of all rows of several new tokens in one launch, where there is a kernel that reads pages: `[tokens, n_heads,
/// head_dim]`, in which rows of one new token are left out.
#[cfg(feature = "cuda")]
pub(super) fn over_pages<R: CubeRuntime, B: Backend<IntTensorPrimitive = CubeTensor<R>>>(
    pass: &Pass<R>,
    at: &CachedTokens<B>,
    longer: &Run,
    query: &CubeTensor<R>,
    [keys, values]: [&CubeHeld<R>; 2],
) -> Option<CubeTensor<R>> {
    if keys.is_int8() {
        return None;
    }
    let cached = [&keys.stored, &values.stored];
    let paged = PagedHopper::new(query, cached, &pass.table, longer.keys, pass.window)?;
    let out = empty(query, [query.meta.shape()[0], pass.heads.n_heads, pass.heads.head_dim], query.dtype);
    // SAFETY: the tiles are those of the pass: tokens that it has, in rows that the table has, and keys that the row's pages have room for.
    unsafe {
        paged.forward(query, cached, &pass.table, &crate::cubecl::contiguous(at.tiles().clone().into_primitive()), &out)
    };
    Some(out)
}

#[cfg(not(feature = "cuda"))]
pub(super) fn over_pages<R: CubeRuntime, B: Backend<IntTensorPrimitive = CubeTensor<R>>>(
    _: &Pass<R>,
    _: &CachedTokens<B>,
    _: &Run,
    _: &CubeTensor<R>,
    _: [&CubeHeld<R>; 2],
) -> Option<CubeTensor<R>> {
    None
}

/// Attends to the keys of one row, whose tokens are appended: `[1, tokens, n_heads, head_dim]`.
pub(super) fn prefill<R: CubeRuntime>(
    pass: &Pass<R>,
    run: &Run,
    query: &CubeTensor<R>,
    held: [&CubeHeld<R>; 2],
) -> CubeTensor<R> {
    let PackedHeads { n_heads, n_kv_heads, head_dim } = pass.heads;
    let dims = Dims { batch_size: 1, n_heads, n_kv_heads, seq_length: run.tokens, keys: run.keys, head_dim };
    let query = Heads {
        tensor: query.clone(),
        offset: run.first_token * n_heads * head_dim,
        strides: [0, head_dim, n_heads * head_dim],
    };
    let [keys, values] = side_by_side(pass, run, held).map(Heads::from_tensor);
    let mask = CubeMask::Causal { window: pass.window };
    attention_forward([&query, &keys, &values], dims, &mask, AttentionOptions::new(head_dim)).0
}

/// Places the queries and keys of a run, and writes keys and values into their pages: the queries, `[tokens, n_heads, head_dim]`, in
/// their places among all of the pass. `rows` has the row of each token.
pub(super) fn rotary_append<R: CubeRuntime>(
    pass: &Pass<R>,
    run: &Run,
    rows: CubeTensor<R>,
    [keys, values]: [&CubeHeld<R>; 2],
) -> CubeTensor<R> {
    let Pass { qkv, heads, positions, table, .. } = pass;
    let bound = bind(pass, MOST_HEADS, keys.is_int8());
    let query = empty(qkv, [qkv.meta.shape()[0], heads.n_heads, heads.head_dim], qkv.dtype);
    assert_eq!(rows.dtype, positions.dtype, "cached_attention: integers of one dtype");
    let turns = (heads.n_heads + heads.n_kv_heads).div_ceil(MOST_HEADS);
    // SAFETY: each cube places heads of its own token, below all heads; rows are those of the tokens, positions are held within the rotary
    // table, pages within the cache.
    unsafe {
        append_kernel::launch_unchecked(
            &qkv.client,
            grid(run.tokens * turns),
            CubeDim::new_1d(UNITS),
            array(qkv),
            array(&bound.gammas[0]),
            array(&bound.gammas[1]),
            array(&bound.table[0]),
            array(&bound.table[1]),
            array(positions),
            array(&rows),
            array(table),
            array(&query),
            array(&keys.stored),
            array(&values.stored),
            optional(&keys.scales),
            optional(&values.scales),
            sizes(&bound, pass, run, keys, [turns, 0]),
            bound.variant,
            qkv.dtype.into(),
            keys.dtype(),
            bound.gammas[0].dtype.into(),
            bound.table[0].dtype.into(),
            positions.dtype.into(),
        );
    }
    query
}

/// All keys and values of a run's row as floats, `[1, n_kv_heads, keys, head_dim]` each.
fn side_by_side<R: CubeRuntime>(pass: &Pass<R>, run: &Run, [keys, values]: [&CubeHeld<R>; 2]) -> [CubeTensor<R>; 2] {
    let PackedHeads { n_kv_heads, head_dim, .. } = pass.heads;
    let out = [(); 2].map(|()| empty(&pass.qkv, [1, n_kv_heads, run.keys, head_dim], pass.qkv.dtype));
    let mut read = vec![&out[0], &out[1]];
    // Words of bytes are aligned for two of them.
    read.extend([keys, values].into_iter().filter(|held| !held.is_int8()).map(|held| &held.stored));
    let vector = vector_width(&read, &[head_dim]);
    // Bytes come in words, of which a vector is not a part.
    let vector = if keys.is_int8() { vector.max(PACKED) } else { vector };
    let vectors = n_kv_heads * run.keys * head_dim / vector;
    // SAFETY: a unit copies one vector of keys and of values, to below `vectors`; pages are held within the cache.
    unsafe {
        side_by_side_kernel::launch_unchecked(
            &pass.qkv.client,
            grid(vectors.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            keys.width(vector),
            array(&keys.stored),
            array(&values.stored),
            optional(&keys.scales),
            optional(&values.scales),
            array(&pass.table),
            array(&out[0]),
            array(&out[1]),
            sizes(&bind(pass, 1, keys.is_int8()), pass, run, keys, [1, 0]),
            vectors as u32,
            (head_dim / vector) as u32,
            keys.is_int8(),
            out[0].dtype.into(),
            keys.dtype(),
            pass.table.dtype.into(),
        );
    }
    out
}

/// A cube places some of one token's heads.
#[cube(launch_unchecked)]
fn append_kernel<F: Float, K: Numeric, G: Float, T: Float, I: Int>(
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
    // Heads of both kinds may be among them: queries first, then keys, which lie behind them.
    let end = min(first + most, placed_heads);
    let middle = min(max(sizes.n_heads, first), end);
    let queries = middle - first;
    let keys_at = row + middle * head_dim;
    let source = Source { start: row + first * head_dim, queries, keys: keys_at, heads: end - first, position };
    let mut placed = SharedMemory::<f32>::new(comptime!(variant.heads * variant.head_dim));
    place::<F, G, T>(qkv, query_gamma, key_gamma, cos, sin, &mut placed, &source, sizes, variant);
    for i in range_stepped(UNIT_POS, queries * head_dim, UNITS) {
        query[((token * sizes.n_heads + first) * head_dim + i) as usize] = F::cast_from(placed[i as usize]);
    }
    // Numbers of a head that are written as one: a word of bytes has four.
    let each = comptime!(if variant.int8 { PACKED as u32 } else { 1 });
    let words = head_dim / each;
    // The largest and the sum of each head's keys, and then of its values, from each of its units.
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

/// A unit copies one vector of the keys and of the values of a row, from its page to where they lie side by side.
#[cube(launch_unchecked)]
fn side_by_side_kernel<F: Float, K: Numeric, I: Int, N: Size, M: Size>(
    keys: &Array<Vector<K, M>>,
    values: &Array<Vector<K, M>>,
    key_scales: &ComptimeOption<Array<f32>>,
    value_scales: &ComptimeOption<Array<f32>>,
    table: &Array<I>,
    keys_out: &mut Array<Vector<F, N>>,
    values_out: &mut Array<Vector<F, N>>,
    sizes: &Sizes,
    vectors: u32,
    columns: u32,
    #[comptime] int8: bool,
    #[define(F)] _dtype: StorageType,
    #[define(K)] _cache_dtype: StorageType,
    #[define(I)] _table_dtype: StorageType,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= vectors {
        terminate!();
    }
    let line = at / columns;
    let held = cell::<I>(table, sizes.first_row, line / sizes.keys, line % sizes.keys, sizes);
    let from = (held * columns + at % columns) as usize;
    let mut key = numbers::<K, M, N>(keys[from], int8);
    let mut value = numbers::<K, M, N>(values[from], int8);
    if comptime!(int8) {
        key *= Vector::<f32, N>::new(key_scales.as_ref().unwrap()[held as usize]);
        value *= Vector::<f32, N>::new(value_scales.as_ref().unwrap()[held as usize]);
    }
    keys_out[at as usize] = Vector::cast_from(key);
    values_out[at as usize] = Vector::cast_from(value);
}
