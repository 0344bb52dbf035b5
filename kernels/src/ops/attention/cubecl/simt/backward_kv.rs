//! Gradients of a tile of keys and of their values. Tiles of scores are transposed here: keys down,
//! queries across.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::mask::{Sizes, first_seen, last_key, queries_of, sees};
use super::super::parts::{Place, cube_place};
use super::super::{CubeMask, Dims, Heads, rounds, sizes, width};
use super::tile::{accumulate, clear, dots, load, score_gradient, store, write_tile, zeroed};
use super::{Quad, Variant};
use crate::cubecl::{array, grid, launch};
use crate::ops::attention::AttentionOptions;
use crate::random::cubecl::{Rounds, row_bits};

pub(in crate::ops::attention::cubecl) fn backward_kv<R: CubeRuntime>(
    [query, key, value, grad]: [&Heads<R>; 4],
    rows: &CubeTensor<R>,
    [d_key, d_value]: [&Heads<R>; 2],
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let variant = Variant::choose(&query.tensor.client, dims.head_dim, mask.kind(), options.dropout.is_some());
    let width = width(&[query, key, value, grad, d_key, d_value], dims.head_dim, 4);
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_kv_heads * dims.keys.div_ceil(variant.tile());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its
    // own.
    unsafe {
        launch!(
            backward_kv_kernel::BackwardKvKernel,
            &query.tensor.client,
            grid(cubes),
            variant.units(),
            [N = width],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Vector<backward_kv_kernel::F, backward_kv_kernel::N>> = array(&query.tensor),
                key: Array<Vector<backward_kv_kernel::F, backward_kv_kernel::N>> = array(&key.tensor),
                value: Array<Vector<backward_kv_kernel::F, backward_kv_kernel::N>> = array(&value.tensor),
                grad: Array<Vector<backward_kv_kernel::F, backward_kv_kernel::N>> = array(&grad.tensor),
                ints: Array<backward_kv_kernel::I> = array(&ints),
                statistics: Array<f32> = array(rows),
                d_key: Array<Vector<backward_kv_kernel::F, backward_kv_kernel::N>> = array(&d_key.tensor),
                d_value: Array<Vector<backward_kv_kernel::F, backward_kv_kernel::N>> = array(&d_value.tensor),
                query_place: Place = query.place(width),
                key_place: Place = key.place(width),
                value_place: Place = value.place(width),
                grad_place: Place = grad.place(width),
                d_key_place: Place = d_key.place(width),
                d_value_place: Place = d_value.place(width),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [variant: Variant = variant]
        );
    }
}

/// Gradients of the keys and values of a tile, from all queries that see any of them.
#[cube(launch_unchecked)]
fn backward_kv_kernel<F: Float, I: Int, N: Size>(
    query: &Array<Vector<F, N>>,
    key: &Array<Vector<F, N>>,
    value: &Array<Vector<F, N>>,
    grad: &Array<Vector<F, N>>,
    ints: &Array<I>,
    statistics: &Array<f32>,
    d_key: &mut Array<Vector<F, N>>,
    d_value: &mut Array<Vector<F, N>>,
    query_place: &Place,
    key_place: &Place,
    value_place: &Place,
    grad_place: &Place,
    d_key_place: &Place,
    d_value_place: &Place,
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
    let (number, kv_head, batch) = cube_place(sizes.keys, sizes.n_kv_heads, sizes, tile);
    if batch >= sizes.batch_size {
        terminate!();
    }
    let first = number * tile;
    let group = sizes.n_heads / sizes.n_kv_heads;
    let keys = key_place.rows(batch, kv_head, sizes.keys);
    let values = value_place.rows(batch, kv_head, sizes.keys);

    let mut rows = SharedMemory::<Quad>::new(comptime!(variant.tile() * (variant.side + 1)));
    let mut columns = SharedMemory::<Quad>::new(comptime!(variant.tile() * (variant.side + 1)));
    let mut scores_tile = SharedMemory::<Quad>::new(comptime!(variant.tile() * variant.side));

    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut scores = Array::<f32>::new(16usize);
    let mut d_scores = Array::<f32>::new(16usize);
    let mut key_sums = zeroed(slices);
    let mut value_sums = zeroed(slices);
    let (start, end) = queries_of::<I>(ints, batch, first, sizes, tile, mask);
    for head in kv_head * group..(kv_head + 1) * group {
        let queries = query_place.rows(batch, head, sizes.queries);
        let grads = grad_place.rows(batch, head, sizes.queries);
        let line = (batch * sizes.n_heads + head) * sizes.queries;
        for at in start / tile..end.div_ceil(tile) {
            let first_query = at * tile;
            clear(&mut scores);
            clear(&mut d_scores);
            for slice in 0..count {
                sync_cube();
                load::<F, N>(key, &keys, first, &mut rows, slice, false, variant);
                load::<F, N>(query, &queries, first_query, &mut columns, slice, true, variant);
                sync_cube();
                dots(&rows, &columns, &mut scores, slice, variant);
            }
            for slice in 0..count {
                sync_cube();
                load::<F, N>(value, &values, first, &mut rows, slice, false, variant);
                load::<F, N>(grad, &grads, first_query, &mut columns, slice, true, variant);
                sync_cube();
                dots(&rows, &columns, &mut d_scores, slice, variant);
            }

            #[unroll]
            for j in 0..4usize {
                let row = first_query + x * 4 + j as u32;
                let inside = row < sizes.queries;
                let row = min(row, sizes.queries - 1);
                let begin = first_seen::<I>(ints, batch, row, sizes, mask);
                let last = last_key::<I>(ints, batch, row, sizes, mask);
                let log = statistics[((line + row) * 2) as usize];
                let delta = statistics[((line + row) * 2 + 1) as usize];
                let mut bits = 0u32;
                if comptime!(variant.drops) {
                    bits = row_bits(line + row, rounds);
                }
                #[unroll]
                for i in 0..4usize {
                    let key = first + y * 4 + i as u32;
                    let (dropped, d_score) = score_gradient(
                        scores[i * 4 + j],
                        d_scores[i * 4 + j],
                        sees(key, begin, last),
                        inside,
                        log,
                        delta,
                        bits,
                        key,
                        sizes,
                        rounds,
                        comptime!(variant.drops),
                    );
                    scores[i * 4 + j] = dropped;
                    d_scores[i * 4 + j] = d_score;
                }
            }

            write_tile(&scores, &mut scores_tile, variant);
            #[unroll]
            for slice in 0..slices {
                if comptime!(slices > 1) {
                    sync_cube();
                    load::<F, N>(grad, &grads, first_query, &mut columns, comptime!(slice as u32), true, variant);
                }
                sync_cube();
                accumulate(&scores_tile, &columns, &mut value_sums, slice, variant);
            }
            sync_cube();
            write_tile(&d_scores, &mut scores_tile, variant);
            #[unroll]
            for slice in 0..slices {
                if comptime!(slice > 0) {
                    sync_cube();
                }
                load::<F, N>(query, &queries, first_query, &mut columns, comptime!(slice as u32), true, variant);
                sync_cube();
                accumulate(&scores_tile, &columns, &mut key_sums, slice, variant);
            }
        }
    }
    store::<F, N>(d_key, &d_key_place.rows(batch, kv_head, sizes.keys), first, &key_sums, variant);
    store::<F, N>(d_value, &d_value_place.rows(batch, kv_head, sizes.keys), first, &value_sums, variant);
}
