//! Attention for rows with several new tokens, after appending: over pages with one kernel for all
//! rows, if available. Otherwise a row's pages are copied contiguously before attention, row by
//! row.

use burn::tensor::backend::Backend;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{CubeKvStorage, Pass, Run, Sizes, UNITS, bind, cell, numbers, sizes};
use crate::cubecl::{array, empty, grid, optional, vector_width};
#[cfg(feature = "cuda")]
use crate::ops::attention::PagedHopper;
use crate::ops::attention::cubecl::{CubeMask, Dims, Heads, attention_forward};
use crate::ops::cached_attention::CachedTokens;
use crate::packed_heads::PackedHeads;
use crate::quant::int8::PACKED;

/// Attends to the keys of all rows with several new tokens in one launch, if a kernel supports
/// paged attention: `[tokens, n_heads, head_dim]`, without rows of one new token.
#[cfg(feature = "cuda")]
pub(super) fn over_pages<R: CubeRuntime, B: Backend<IntTensorPrimitive = CubeTensor<R>>>(
    pass: &Pass<R>,
    at: &CachedTokens<B>,
    longer: &Run,
    query: &CubeTensor<R>,
    [keys, values]: [&CubeKvStorage<R>; 2],
) -> Option<CubeTensor<R>> {
    // No sinks in this kernel, nor the log-sum-exp to add them by.
    if keys.is_int8() || pass.sinks.is_some() {
        return None;
    }
    let cached = [&keys.stored, &values.stored];
    let paged = PagedHopper::new(query, cached, &pass.table, longer.keys, (pass.window, pass.options))?;
    let out = empty(query, [query.meta.shape()[0], pass.heads.n_heads, pass.heads.head_dim], query.dtype);
    // SAFETY: the tiles are those of the pass: tokens that it has, in rows that the table has, and
    // keys that the row's pages have room for.
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
    _: [&CubeKvStorage<R>; 2],
) -> Option<CubeTensor<R>> {
    None
}

/// Attends to the keys of one row, whose tokens are appended, without sinks: `[1, tokens, n_heads,
/// head_dim]`, and the log-sum-exp of each row of scores.
pub(super) fn prefill<R: CubeRuntime>(
    pass: &Pass<R>,
    run: &Run,
    query: &CubeTensor<R>,
    held: [&CubeKvStorage<R>; 2],
) -> (CubeTensor<R>, CubeTensor<R>) {
    let PackedHeads { n_heads, n_kv_heads, head_dim } = pass.heads;
    let dims = Dims { batch_size: 1, n_heads, n_kv_heads, seq_length: run.tokens, keys: run.keys, head_dim };
    let query = Heads {
        tensor: query.clone(),
        offset: run.first_token * n_heads * head_dim,
        strides: [0, head_dim, n_heads * head_dim],
    };
    let [keys, values] = side_by_side(pass, run, held).map(Heads::from_tensor);
    let mask = CubeMask::Causal { window: pass.window };
    attention_forward([&query, &keys, &values], dims, &mask, pass.options)
}

/// All keys and values of a run's row as floats, `[1, n_kv_heads, keys, head_dim]` each.
fn side_by_side<R: CubeRuntime>(
    pass: &Pass<R>,
    run: &Run,
    [keys, values]: [&CubeKvStorage<R>; 2],
) -> [CubeTensor<R>; 2] {
    let PackedHeads { n_kv_heads, head_dim, .. } = pass.heads;
    let out = [(); 2].map(|()| empty(&pass.qkv, [1, n_kv_heads, run.keys, head_dim], pass.qkv.dtype));
    let mut read = vec![&out[0], &out[1]];
    // Words of bytes are aligned to two.
    read.extend([keys, values].into_iter().filter(|held| !held.is_int8()).map(|held| &held.stored));
    let vector = vector_width(&read, &[head_dim]);
    // Bytes come in words, and a vector is at least one word.
    let vector = if keys.is_int8() { vector.max(PACKED) } else { vector };
    let vectors = n_kv_heads * run.keys * head_dim / vector;
    // SAFETY: a unit copies one vector of keys and of values, below `vectors`; pages are
    // clamped to the cache.
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

/// A unit copies one vector of a row's keys and values from its page to contiguous memory.
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
