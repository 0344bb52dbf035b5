//! Output and log-sum-exp of a tile of queries.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::mask::{Sizes, first_seen, keys_of, last_key, sees};
use super::super::parts::{OUTSIDE, Place, cube_place, kept_pair};
use super::super::softcap::capped;
use super::super::{CubeMask, Dims, Heads, rounds, sizes, width};
use super::tile::{accumulate, clear, dots, load, store, zeroed};
use super::{Quad, Variant};
use crate::cubecl::{array, grid, launch};
use crate::masked::MASKED;
use crate::ops::attention::AttentionOptions;
use crate::random::cubecl::{Rounds, row_bits};

pub(in crate::ops::attention::cubecl) fn forward<R: CubeRuntime>(
    [query, key, value]: [&Heads<R>; 3],
    output: &Heads<R>,
    log_sum_exp: &CubeTensor<R>,
    dims: Dims,
    mask: &CubeMask<R>,
    options: AttentionOptions,
) {
    let variant = Variant::choose(&query.tensor.client, dims.head_dim, mask.kind(), options.dropout.is_some());
    let width = width(&[query, key, value, output], dims.head_dim, 4);
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_heads * dims.seq_length.div_ceil(variant.tile());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its
    // own.
    unsafe {
        launch!(
            forward_kernel::ForwardKernel,
            &query.tensor.client,
            grid(cubes),
            variant.units(),
            [N = width],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Vector<forward_kernel::F, forward_kernel::N>> = array(&query.tensor),
                key: Array<Vector<forward_kernel::F, forward_kernel::N>> = array(&key.tensor),
                value: Array<Vector<forward_kernel::F, forward_kernel::N>> = array(&value.tensor),
                ints: Array<forward_kernel::I> = array(&ints),
                output: Array<Vector<forward_kernel::F, forward_kernel::N>> = array(&output.tensor),
                log_sum_exp: Array<f32> = array(log_sum_exp),
                query_place: Place = query.place(width),
                key_place: Place = key.place(width),
                value_place: Place = value.place(width),
                output_place: Place = output.place(width),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [variant: Variant = variant]
        );
    }
}

#[cube(launch_unchecked)]
fn forward_kernel<F: Float, I: Int, N: Size>(
    query: &Array<Vector<F, N>>,
    key: &Array<Vector<F, N>>,
    value: &Array<Vector<F, N>>,
    ints: &Array<I>,
    output: &mut Array<Vector<F, N>>,
    log_sum_exp: &mut Array<f32>,
    query_place: &Place,
    key_place: &Place,
    value_place: &Place,
    output_place: &Place,
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
    // Under a causal mask later queries see more keys: the longest work goes first.
    let first = (sizes.queries.div_ceil(tile) - 1 - number) * tile;
    let kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    let queries = query_place.rows(batch, head, sizes.queries);
    let keys = key_place.rows(batch, kv_head, sizes.keys);
    let values = value_place.rows(batch, kv_head, sizes.keys);
    let line = (batch * sizes.n_heads + head) * sizes.queries;

    let mut rows = SharedMemory::<Quad>::new(comptime!(variant.tile() * (variant.side + 1)));
    let mut columns = SharedMemory::<Quad>::new(comptime!(variant.tile() * (variant.side + 1)));
    let mut scores_tile = SharedMemory::<Quad>::new(comptime!(variant.tile() * variant.side));
    let mut partial = SharedMemory::<Quad>::new(comptime!(variant.side * variant.side));

    let x = UNIT_POS % side;
    let y = UNIT_POS / side;
    let mut begin = Array::<i32>::new(4usize);
    let mut last = Array::<i32>::new(4usize);
    let mut bits = Array::<u32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        let row = min(first + y * 4 + i as u32, sizes.queries - 1);
        begin[i] = first_seen::<I>(ints, batch, row, sizes, mask);
        last[i] = last_key::<I>(ints, batch, row, sizes, mask);
        if comptime!(variant.drops) {
            bits[i] = row_bits(line + row, rounds);
        }
    }

    let mut scores = Array::<f32>::new(16usize);
    let mut sums = zeroed(slices);
    let mut maximum = Quad::new(OUTSIDE);
    let mut total = Quad::new(0.0f32);
    if comptime!(slices == 1) {
        load::<F, N>(query, &queries, first, &mut rows, 0u32, false, variant);
    }
    let (start, end) = keys_of::<I>(ints, batch, first, sizes, tile, mask);
    for at in start / tile..end.div_ceil(tile) {
        let first_key = at * tile;
        clear(&mut scores);
        for slice in 0..count {
            sync_cube();
            if comptime!(slices > 1) {
                load::<F, N>(query, &queries, first, &mut rows, slice, false, variant);
            }
            load::<F, N>(key, &keys, first_key, &mut columns, slice, true, variant);
            sync_cube();
            dots(&rows, &columns, &mut scores, slice, variant);
        }

        let mut highest = Quad::new(OUTSIDE);
        #[unroll]
        for i in 0..4usize {
            let mut row_highest = OUTSIDE.runtime();
            #[unroll]
            for j in 0..4usize {
                let key = first_key + x * 4 + j as u32;
                let score = capped(scores[i * 4 + j] * sizes.scale, sizes.softcap);
                let score = select(sees(key, begin[i], last[i]), score, MASKED);
                let score = select(key < sizes.keys, score, OUTSIDE);
                scores[i * 4 + j] = score;
                row_highest = max(row_highest, score);
            }
            highest[i] = row_highest;
        }
        partial[(x * side + y) as usize] = highest;
        sync_cube();
        let mut highest = maximum;
        for other in 0..side {
            highest = max(highest, partial[(other * side + y) as usize]);
        }
        let shrink = (maximum - highest).exp();
        maximum = highest;
        total *= shrink;
        #[unroll]
        for i in 0..4usize {
            let mut probabilities = Quad::new(0.0f32);
            let mut row_total = total[i];
            #[unroll]
            for j in 0..4usize {
                let probability = (scores[i * 4 + j] - highest[i]).exp();
                row_total += probability;
                probabilities[j] = probability;
            }
            if comptime!(variant.drops) {
                #[unroll]
                for pair in 0..2usize {
                    let factors = kept_pair(bits[i], (first_key + x * 4) / 2 + pair as u32, sizes, rounds);
                    probabilities[comptime!(2 * pair)] = probabilities[comptime!(2 * pair)] * factors[0usize];
                    probabilities[comptime!(2 * pair + 1)] = probabilities[comptime!(2 * pair + 1)] * factors[1usize];
                }
            }
            total[i] = row_total;
            scores_tile[((y * 4 + i as u32) * side + x) as usize] = probabilities;
            #[unroll]
            for slice in 0..slices {
                sums[slice * 4 + i] *= Quad::new(shrink[i]);
            }
        }
        #[unroll]
        for slice in 0..slices {
            if comptime!(slice > 0) {
                sync_cube();
            }
            load::<F, N>(value, &values, first_key, &mut columns, comptime!(slice as u32), true, variant);
            sync_cube();
            accumulate(&scores_tile, &columns, &mut sums, slice, variant);
        }
    }

    sync_cube();
    partial[(x * side + y) as usize] = total;
    sync_cube();
    let mut total = Quad::new(0.0f32);
    for other in 0..side {
        total += partial[(other * side + y) as usize];
    }
    let log = maximum + total.ln();
    #[unroll]
    for i in 0..4usize {
        let row = first + y * 4 + i as u32;
        if row < sizes.queries {
            if x == 0 {
                log_sum_exp[(line + row) as usize] = log[i];
            }
            #[unroll]
            for slice in 0..slices {
                sums[slice * 4 + i] /= Quad::new(total[i]);
            }
        }
    }
    store::<F, N>(output, &output_place.rows(batch, head, sizes.queries), first, &sums, variant);
}
