//! Output and log-sum-exp of a tile of queries.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::mask::{Sizes, all_seen, first_seen, keys_of, last_key};
use super::super::parts::{OUTSIDE, Place, cube_place, kept_pair};
use super::super::{CubeMask, Dims, Heads, rounds, sizes};
use super::tile::{accumulate, dots, fetch, hide, hold, load, put, store};
use super::{UNITS, Variant};
use crate::cubecl::tensor_cores::{Half, Pair, Wide, clear, zeroed};
use crate::cubecl::{array, grid, launch};
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
    let variant = Variant::forward(dims.head_dim, mask.kind(), options.dropout.is_some());
    let ints = mask.ints(&query.tensor);
    let cubes = dims.batch_size * dims.n_heads * dims.seq_length.div_ceil(variant.rows());
    // SAFETY: all indices are below the sizes that `dims` gives, and each cube writes rows of its
    // own.
    unsafe {
        launch!(
            forward_kernel::ForwardKernel,
            &query.tensor.client,
            grid(cubes),
            CubeDim::new_1d(UNITS as u32),
            [],
            [F = query.tensor.dtype, I = ints.dtype],
            [
                query: Array<Wide<forward_kernel::F>> = array(&query.tensor),
                key: Array<Wide<forward_kernel::F>> = array(&key.tensor),
                value: Array<Wide<forward_kernel::F>> = array(&value.tensor),
                ints: Array<forward_kernel::I> = array(&ints),
                output: Array<Half<forward_kernel::F>> = array(&output.tensor),
                log_sum_exp: Array<f32> = array(log_sum_exp),
                query_place: Place = query.place(8),
                key_place: Place = key.place(8),
                value_place: Place = value.place(8),
                output_place: Place = output.place(2),
                sizes: Sizes = sizes(dims, mask, options),
                rounds: Rounds = rounds(options),
            ],
            [variant: Variant = variant]
        );
    }
}

#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
fn forward_kernel<F: Float, I: Int>(
    query: &Array<Wide<F>>,
    key: &Array<Wide<F>>,
    value: &Array<Wide<F>>,
    ints: &Array<I>,
    output: &mut Array<Half<F>>,
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
    let tile = comptime!(variant.rows() as u32);
    let columns = comptime!(variant.columns as u32);
    let blocks = comptime!(variant.columns / 8);
    let lines = comptime!(2 * variant.bands);
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

    let mut query_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.rows() * variant.stride()));
    let mut key_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.columns * variant.stride()));
    let mut value_tile = SharedMemory::<Wide<F>>::new(comptime!(variant.columns * variant.stride()));

    // The plane's first row in the tile, and the lane's among the plane's.
    let plane_row = UNIT_POS / 32 * comptime!(16 * variant.bands as u32);
    let lane_row = UNIT_POS % 32 / 4;
    let lane_column = UNIT_POS % 4 * 2;
    let mut begin = Array::<i32>::new(lines);
    let mut last = Array::<i32>::new(lines);
    let mut bits = Array::<u32>::new(lines);
    let mut maximum = Array::<f32>::new(lines);
    let mut total = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        let row = min(first + plane_row + lane_row + comptime!(i as u32 * 8), sizes.queries - 1);
        begin[i] = first_seen::<I>(ints, batch, row, sizes, mask);
        last[i] = last_key::<I>(ints, batch, row, sizes, mask);
        if comptime!(variant.drops) {
            bits[i] = row_bits(line + row, rounds);
        }
        maximum[i] = OUTSIDE;
        total[i] = 0.0f32;
    }

    let (start, end) = keys_of::<I>(ints, batch, first, sizes, tile, mask);
    let start = start / columns;
    let end = end.div_ceil(columns);
    load::<F>(query, &queries, first, &mut query_tile, comptime!(variant.rows()), variant);
    load::<F>(key, &keys, start * columns, &mut key_tile, comptime!(variant.columns), variant);
    sync_cube();
    let held = hold::<F>(&query_tile, plane_row, variant);

    let mut scores = Array::<Pair>::new(comptime!(variant.bands * blocks * 2));
    let mut sums = zeroed(comptime!(variant.bands * variant.depth() * 4));
    let mut part = Array::<Wide<F>>::new(comptime!(variant.share(variant.columns)));
    for at in start..end {
        let first_key = at * columns;
        if comptime!(variant.ahead) {
            fetch::<F>(value, &values, first_key, &mut part, comptime!(variant.columns), variant);
        }
        clear(&mut scores, comptime!(variant.bands * blocks * 2));
        dots::<F>(&held, &query_tile, plane_row, &key_tile, &mut scores, variant);
        if comptime!(!variant.ahead) {
            fetch::<F>(value, &values, first_key, &mut part, comptime!(variant.columns), variant);
        }
        put::<F>(&part, &mut value_tile, comptime!(variant.columns), variant);
        sync_cube();
        // The tile after the last is none that anyone needs, but rows of it may be there.
        if comptime!(variant.ahead) {
            fetch::<F>(key, &keys, first_key + columns, &mut part, comptime!(variant.columns), variant);
        }

        let scale = Pair::new(sizes.scale);
        #[unroll]
        for i in 0..comptime!(variant.bands * blocks * 2) {
            scores[i] *= scale;
        }
        if !all_seen::<I>(ints, batch, first, tile, first_key, columns, sizes, mask) {
            hide(&mut scores, &begin, &last, first_key + lane_column, sizes, variant);
        }

        #[unroll]
        for i in 0..lines {
            let (band, side) = comptime!((i / 2, i % 2));
            let mut highest = maximum[i];
            #[unroll]
            for block in 0..blocks {
                let pair = scores[comptime!((band * blocks + block) * 2 + side)];
                highest = max(highest, max(pair[0usize], pair[1usize]));
            }
            highest = max(highest, plane_shuffle_xor(highest, 1));
            highest = max(highest, plane_shuffle_xor(highest, 2));
            let shrink = (maximum[i] - highest).exp();
            maximum[i] = highest;
            let mut row_total = total[i] * shrink;
            #[unroll]
            for block in 0..blocks {
                let index = comptime!((band * blocks + block) * 2 + side);
                let mut pair = (scores[index] - Pair::new(highest)).exp();
                row_total += pair[0usize] + pair[1usize];
                if comptime!(variant.drops) {
                    let key = first_key + comptime!(block as u32 * 8) + lane_column;
                    pair *= kept_pair(bits[i], key / 2, sizes, rounds);
                }
                scores[index] = pair;
            }
            total[i] = row_total;
            let shrink = Pair::new(shrink);
            #[unroll]
            for block in 0..comptime!(2 * variant.depth()) {
                sums[comptime!((band * 2 * variant.depth() + block) * 2 + side)] *= shrink;
            }
        }
        accumulate::<F>(&scores, &value_tile, &mut sums, 0u32, variant);
        if comptime!(!variant.ahead) {
            fetch::<F>(key, &keys, first_key + columns, &mut part, comptime!(variant.columns), variant);
        }
        put::<F>(&part, &mut key_tile, comptime!(variant.columns), variant);
        sync_cube();
    }

    let mut factors = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        let mut row_total = total[i];
        row_total += plane_shuffle_xor(row_total, 1);
        row_total += plane_shuffle_xor(row_total, 2);
        factors[i] = 1.0f32 / row_total;
        let row = first + plane_row + lane_row + comptime!(i as u32 * 8);
        if row < sizes.queries && lane_column == 0 {
            log_sum_exp[(line + row) as usize] = maximum[i] + row_total.ln();
        }
    }
    let outputs = output_place.rows(batch, head, sizes.queries);
    store::<F>(output, &outputs, first + plane_row, &sums, &factors, 0u32, variant);
}
