//! Gradients of a tile of queries.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::mask::{Sizes, first_seen, keys_of, last_key, sees};
use super::super::parts::{Place, cube_place};
use super::super::{CubeMask, Dims, Heads, rounds, sizes, width};
use super::tile::{accumulate, clear, dots, load, score_gradient, store, write_tile, zeroed};
use super::{Quad, Variant};
use crate::cubecl::{array, grid, launch};
use crate::ops::attention::AttentionOptions;
use crate::random::cubecl::{Rounds, row_bits};

pub(in crate::ops::attention::cubecl) fn backward_q<R: CubeRuntime>(
    [query, key, value, grad]: [&Heads<R>; 4],
    rows: &CubeTensor<R>,
    d_query: &Heads<R>,
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let variant = Variant::choose(&query.tensor.client, dims.head_dim, mask.kind(), options.dropout.is_some());
    let width = width(&[query, key, value, grad, d_query], dims.head_dim, 4);
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_heads * dims.seq_length.div_ceil(variant.tile());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its
    // own.
    unsafe {
        launch!(
            backward_q_kernel::BackwardQKernel,
            &query.tensor.client,
            grid(cubes),
            variant.units(),
            [N = width],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Vector<backward_q_kernel::F, backward_q_kernel::N>> = array(&query.tensor),
                key: Array<Vector<backward_q_kernel::F, backward_q_kernel::N>> = array(&key.tensor),
                value: Array<Vector<backward_q_kernel::F, backward_q_kernel::N>> = array(&value.tensor),
                grad: Array<Vector<backward_q_kernel::F, backward_q_kernel::N>> = array(&grad.tensor),
                ints: Array<backward_q_kernel::I> = array(&ints),
                statistics: Array<f32> = array(rows),
                d_query: Array<Vector<backward_q_kernel::F, backward_q_kernel::N>> = array(&d_query.tensor),
                query_place: Place = query.place(width),
                key_place: Place = key.place(width),
                value_place: Place = value.place(width),
                grad_place: Place = grad.place(width),
                d_query_place: Place = d_query.place(width),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [variant: Variant = variant]
        );
    }
}

/// Gradients of the queries of a tile, from all keys that any of them sees.
#[cube(launch_unchecked)]
fn backward_q_kernel<F: Float, I: Int, N: Size>(
    query: &Array<Vector<F, N>>,
    key: &Array<Vector<F, N>>,
    value: &Array<Vector<F, N>>,
    grad: &Array<Vector<F, N>>,
    ints: &Array<I>,
    statistics: &Array<f32>,
    d_query: &mut Array<Vector<F, N>>,
    query_place: &Place,
    key_place: &Place,
    value_place: &Place,
    grad_place: &Place,
    d_query_place: &Place,
    sizes: &Sizes,
    rounds: &Rounds,
    #[comptime] variant: Variant,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _int: StorageType,
) {
    let side = comptime!(variant.side as u32);
    let tile = comptime!(variant.tile() as u32);
    let slices = comptime!(variant.slices());
    let count = comptime!(slices as u32);
    let mask = comptime!(variant.mask);
    let (number, head, batch) = cube_place(sizes.queries, sizes.n_heads, sizes, tile);
    if batch >= sizes.batch_size {
        terminate!();
    }
    let first = (sizes.queries.div_ceil(tile) - 1 - number) * tile;
    let kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    let queries = query_place.rows(batch, head, sizes.queries);
    let grads = grad_place.rows(batch, head, sizes.queries);
    let keys = key_place.rows(batch, kv_head, sizes.keys);
    let values = value_place.rows(batch, kv_head, sizes.keys);
    let line = (batch * sizes.n_heads + head) * sizes.queries;

    let mut rows = SharedMemory::<Quad>::new(comptime!(variant.tile() * (variant.side + 1)));
    let mut columns = SharedMemory::<Quad>::new(comptime!(variant.tile() * (variant.side + 1)));
    let mut scores_tile = SharedMemory::<Quad>::new(comptime!(variant.tile() * variant.side));

    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut begin = Array::<i32>::new(4usize);
    let mut last = Array::<i32>::new(4usize);
    let mut log = Array::<f32>::new(4usize);
    let mut delta = Array::<f32>::new(4usize);
    let mut bits = Array::<u32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        let row = min(first + y * 4 + i as u32, sizes.queries - 1);
        begin[i] = first_seen::<I>(ints, batch, row, sizes, mask);
        last[i] = last_key::<I>(ints, batch, row, sizes, mask);
        log[i] = statistics[((line + row) * 2) as usize];
        delta[i] = statistics[((line + row) * 2 + 1) as usize];
        bits[i] = 0u32;
        if comptime!(variant.drops) {
            bits[i] = row_bits(line + row, rounds);
        }
    }

    let mut scores = Array::<f32>::new(16usize);
    let mut d_scores = Array::<f32>::new(16usize);
    let mut sums = zeroed(slices);
    let (start, end) = keys_of::<I>(ints, batch, first, sizes, tile, mask);
    for at in start / tile..end.div_ceil(tile) {
        let first_key = at * tile;
        clear(&mut scores);
        clear(&mut d_scores);
        for slice in 0..count {
            sync_cube();
            load::<F, N>(grad, &grads, first, &mut rows, slice, false, variant);
            load::<F, N>(value, &values, first_key, &mut columns, slice, true, variant);
            sync_cube();
            dots(&rows, &columns, &mut d_scores, slice, variant);
        }
        for slice in 0..count {
            sync_cube();
            load::<F, N>(query, &queries, first, &mut rows, slice, false, variant);
            load::<F, N>(key, &keys, first_key, &mut columns, slice, true, variant);
            sync_cube();
            dots(&rows, &columns, &mut scores, slice, variant);
        }

        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for j in 0..4usize {
                let key = first_key + x * 4 + j as u32;
                let (_, d_score) = score_gradient(
                    scores[i * 4 + j],
                    d_scores[i * 4 + j],
                    sees(key, begin[i], last[i]),
                    key < sizes.keys,
                    log[i],
                    delta[i],
                    bits[i],
                    key,
                    sizes,
                    rounds,
                    comptime!(variant.drops),
                );
                d_scores[i * 4 + j] = d_score;
            }
        }
        write_tile(&d_scores, &mut scores_tile, variant);
        #[unroll]
        for slice in 0..slices {
            if comptime!(slices > 1) {
                sync_cube();
                load::<F, N>(key, &keys, first_key, &mut columns, comptime!(slice as u32), true, variant);
            }
            sync_cube();
            accumulate(&scores_tile, &columns, &mut sums, slice, variant);
        }
    }
    store::<F, N>(d_query, &d_query_place.rows(batch, head, sizes.queries), first, &sums, variant);
}
