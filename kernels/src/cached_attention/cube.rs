//! Cached attention in CubeCL: for one new token a row, all in one kernel, which cuts long rows of keys into pieces; for
//! more, a kernel that places and appends, before that of attention.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::PackedHeads;
use crate::cube::{array, contiguous, empty, grid, vector_width};
use crate::team::{Team, team_max, team_sum};

const UNITS: u32 = 256;
/// Keys of a piece: a unit has the score of one.
const PIECE: u32 = UNITS;
/// The most heads that a cube places, and the most query heads that it attends for.
const MOST_HEADS: usize = 8;
/// Vectors that a unit reads together.
const RUN: u32 = 8;
/// The maximum of no scores: finite, so that differences are.
const NOTHING: f32 = -1e30;

/// [`Placement`](super::Placement) on the device.
pub(crate) struct CubePlacement<R: CubeRuntime> {
    /// Gammas of queries and keys, and epsilon.
    pub(crate) norms: Option<([CubeTensor<R>; 2], f64)>,
    /// Cosines and sines.
    pub(crate) rotary: Option<[CubeTensor<R>; 2]>,
}

/// Where the new tokens stand, and what they see.
pub(crate) struct At<R: CubeRuntime> {
    pub(crate) positions: CubeTensor<R>,
    pub(crate) keys: usize,
    pub(crate) window: Option<usize>,
}

/// What the kernels are compiled for, beside their dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    head_dim: usize,
    /// Heads that a cube places, or query heads that it attends for.
    heads: usize,
    normed: bool,
    rotated: bool,
    /// Whether results are parts, of pieces of the keys.
    cut: bool,
    team: Team,
}

/// The sizes that may differ from launch to launch, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    tokens: u32,
    seq_length: u32,
    n_heads: u32,
    n_kv_heads: u32,
    capacity: u32,
    pieces: u32,
    window: i32,
    scale: f32,
    epsilon: f32,
    batch_stride: u32,
    token_stride: u32,
    last: u32,
}

/// The tensors of a launch, those that are not there standing for each other.
struct Bound<R: CubeRuntime> {
    qkv: CubeTensor<R>,
    gammas: [CubeTensor<R>; 2],
    table: [CubeTensor<R>; 2],
    positions: CubeTensor<R>,
    plan: Plan,
    epsilon: f64,
}

fn bind<R: CubeRuntime>(
    qkv: CubeTensor<R>,
    heads: usize,
    head_dim: usize,
    placement: CubePlacement<R>,
    at: &At<R>,
) -> Bound<R> {
    let qkv = contiguous(qkv);
    let plan = Plan {
        head_dim,
        heads,
        normed: placement.norms.is_some(),
        rotated: placement.rotary.is_some(),
        cut: false,
        team: Team { rows: 1, units: UNITS, ..Team::new(&qkv.client, UNITS as usize, 1, UNITS) },
    };
    let (gammas, epsilon) = placement.norms.unwrap_or_else(|| ([qkv.clone(), qkv.clone()], 0.0));
    let table = placement.rotary.unwrap_or_else(|| [qkv.clone(), qkv.clone()]);
    Bound {
        gammas: gammas.map(contiguous),
        table: table.map(contiguous),
        positions: at.positions.clone(),
        qkv,
        plan,
        epsilon,
    }
}

fn sizes<R: CubeRuntime>(
    bound: &Bound<R>,
    heads: PackedHeads,
    capacity: usize,
    pieces: usize,
    at: &At<R>,
) -> SizesLaunch<R> {
    let [batch_size, seq_length] = [bound.qkv.meta.shape()[0], bound.qkv.meta.shape()[1]];
    let strides = bound.positions.meta.strides();
    let last = if bound.plan.rotated { bound.table[0].meta.shape()[0] - 1 } else { 0 };
    SizesLaunch::new(
        (batch_size * seq_length) as u32,
        seq_length as u32,
        heads.n_heads as u32,
        heads.n_kv_heads as u32,
        capacity as u32,
        pieces as u32,
        at.window.map_or(i32::MAX / 2, |window| window.min(i32::MAX as usize / 2) as i32),
        1.0 / (heads.head_dim as f32).sqrt(),
        bound.epsilon as f32,
        strides[0] as u32,
        strides[1] as u32,
        last as u32,
    )
}

/// Places the queries and keys of `qkv` `[batch_size, seq_length, width]`, and writes keys and values into the cache
/// `[batch_size, n_kv_heads, capacity, head_dim]`, where it lies: the queries, `[batch_size, seq_length, n_heads,
/// head_dim]`.
pub(crate) fn rotary_append<R: CubeRuntime>(
    qkv: CubeTensor<R>,
    heads: PackedHeads,
    placement: CubePlacement<R>,
    at: &At<R>,
    [keys, values]: [&CubeTensor<R>; 2],
) -> CubeTensor<R> {
    let [batch_size, seq_length] = [qkv.meta.shape()[0], qkv.meta.shape()[1]];
    let bound = bind(qkv, MOST_HEADS, heads.head_dim, placement, at);
    let query = empty(&bound.qkv, [batch_size, seq_length, heads.n_heads, heads.head_dim], bound.qkv.dtype);
    let turns = (heads.n_heads + heads.n_kv_heads).div_ceil(MOST_HEADS);
    // SAFETY: each cube places heads of its own token, below all heads; positions are held within table and cache.
    unsafe {
        append_kernel::launch_unchecked(
            &bound.qkv.client,
            grid(batch_size * seq_length * turns),
            CubeDim::new_1d(UNITS),
            array(&bound.qkv),
            array(&bound.gammas[0]),
            array(&bound.gammas[1]),
            array(&bound.table[0]),
            array(&bound.table[1]),
            array(&bound.positions),
            array(&query),
            array(keys),
            array(values),
            sizes(&bound, heads, keys.meta.shape()[2], turns, at),
            bound.plan,
            bound.qkv.dtype.into(),
            bound.gammas[0].dtype.into(),
            bound.table[0].dtype.into(),
            bound.positions.dtype.into(),
        );
    }
    query
}

/// [`rotary_append`] and attention for one new token a row: `[batch_size, 1, n_heads, head_dim]`.
pub(crate) fn decode<R: CubeRuntime>(
    qkv: CubeTensor<R>,
    heads: PackedHeads,
    placement: CubePlacement<R>,
    at: &At<R>,
    [keys, values]: [&CubeTensor<R>; 2],
) -> CubeTensor<R> {
    let batch_size = qkv.meta.shape()[0];
    let PackedHeads { n_heads, n_kv_heads, head_dim } = heads;
    let group = n_heads / n_kv_heads;
    let together = (1..=MOST_HEADS.min(group)).rev().find(|count| group.is_multiple_of(*count)).unwrap_or(1);
    let mut bound = bind(qkv, together, head_dim, placement, at);
    let pieces = at.keys.div_ceil(PIECE as usize);
    bound.plan.cut = pieces > 1;
    let out = empty(&bound.qkv, [batch_size, 1, n_heads, head_dim], bound.qkv.dtype);
    let (partial, statistics) = match bound.plan.cut {
        true => (
            empty(&out, [batch_size, n_heads, pieces, head_dim], DType::F32),
            empty(&out, [batch_size, n_heads, pieces, 2], DType::F32),
        ),
        false => (out.clone(), CubeTensor { dtype: DType::F32, ..out.clone() }),
    };
    let vector = vector_width(&[&bound.qkv, keys, values, &partial], &[head_dim]);
    // SAFETY: each cube writes the heads of its own row and piece, and its row's new key and value, which the others
    // do not read; positions are held within table and cache. What stands in for statistics is not written.
    unsafe {
        decode_kernel::launch_unchecked(
            &bound.qkv.client,
            grid(batch_size * (n_heads / together) * pieces),
            CubeDim::new_1d(UNITS),
            vector,
            array(&bound.qkv),
            array(&bound.gammas[0]),
            array(&bound.gammas[1]),
            array(&bound.table[0]),
            array(&bound.table[1]),
            array(&bound.positions),
            array(keys),
            array(values),
            array(&partial),
            array(&statistics),
            sizes(&bound, heads, keys.meta.shape()[2], pieces, at),
            bound.plan,
            bound.qkv.dtype.into(),
            bound.gammas[0].dtype.into(),
            bound.table[0].dtype.into(),
            bound.positions.dtype.into(),
            partial.dtype.into(),
        );
    }
    if bound.plan.cut {
        // SAFETY: a cube joins the pieces of one head.
        unsafe {
            join_kernel::launch_unchecked(
                &out.client,
                grid(batch_size * n_heads),
                CubeDim::new_1d(head_dim.next_power_of_two().min(UNITS as usize) as u32),
                array(&partial),
                array(&statistics),
                array(&out),
                (batch_size * n_heads) as u32,
                pieces as u32,
                head_dim as u32,
                out.dtype.into(),
            );
        }
    }
    out
}

/// Where the heads lie that a cube places: `queries` of them from element `start` on, and keys from element `keys` on.
#[derive(CubeType, Clone, Copy)]
struct Source {
    start: u32,
    queries: u32,
    keys: u32,
    /// All of them.
    heads: u32,
    position: u32,
}

/// Units that add up the squares of a head together.
const SUMMERS: u32 = 16;

/// Reads heads into shared memory, normalised and rotated: queries, and keys behind them.
#[cube]
#[allow(clippy::too_many_arguments)]
fn place<F: Float, G: Float, T: Float>(
    qkv: &Array<F>,
    query_gamma: &Array<G>,
    key_gamma: &Array<G>,
    cos: &Array<T>,
    sin: &Array<T>,
    placed: &mut SharedMemory<f32>,
    source: &Source,
    sizes: &Sizes,
    #[comptime] plan: Plan,
) {
    let head_dim = comptime!(plan.head_dim as u32);
    let half = comptime!(plan.head_dim as u32 / 2);
    for i in range_stepped(UNIT_POS, source.heads * head_dim, UNITS) {
        let mut from = source.start + i;
        if i >= source.queries * head_dim {
            from = source.keys + i - source.queries * head_dim;
        }
        placed[i as usize] = f32::cast_from(qkv[from as usize]);
    }
    sync_cube();
    if comptime!(plan.normed) {
        let mut squares = SharedMemory::<f32>::new(UNITS as usize);
        let head = UNIT_POS / SUMMERS;
        let mut sum = 0.0f32;
        if head < source.heads {
            #[unroll]
            for i in 0..comptime!(plan.head_dim.div_ceil(SUMMERS as usize)) {
                let column = comptime!(i as u32 * SUMMERS) + UNIT_POS % SUMMERS;
                if column < head_dim {
                    let value = placed[(head * head_dim + column) as usize];
                    sum += value * value;
                }
            }
        }
        squares[UNIT_POS as usize] = sum;
        sync_cube();
        for i in range_stepped(UNIT_POS, source.heads * head_dim, UNITS) {
            let head = i / head_dim;
            let mut sum = 0.0f32;
            #[unroll]
            for part in 0..SUMMERS {
                sum += squares[(head * SUMMERS + part) as usize];
            }
            let inverse = 1.0f32 / (sum / f32::cast_from(head_dim) + sizes.epsilon).sqrt();
            let column = i % head_dim;
            let mut gamma = f32::cast_from(query_gamma[column as usize]);
            if head >= source.queries {
                gamma = f32::cast_from(key_gamma[column as usize]);
            }
            placed[i as usize] = f32::cast_from(F::cast_from(placed[i as usize] * inverse * gamma));
        }
        sync_cube();
    }
    if comptime!(plan.rotated) {
        for i in range_stepped(UNIT_POS, source.heads * half, UNITS) {
            let pair = i % half;
            let first = i / half * head_dim + pair;
            let a = placed[first as usize];
            let b = placed[(first + half) as usize];
            let angle = min(source.position, sizes.last) * half + pair;
            let c = f32::cast_from(cos[angle as usize]);
            let s = f32::cast_from(sin[angle as usize]);
            placed[first as usize] = f32::cast_from(F::cast_from(a * c - b * s));
            placed[(first + half) as usize] = f32::cast_from(F::cast_from(b * c + a * s));
        }
        sync_cube();
    }
}

/// A cube places some of one token's heads.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn append_kernel<F: Float, G: Float, T: Float, I: Int>(
    qkv: &Array<F>,
    query_gamma: &Array<G>,
    key_gamma: &Array<G>,
    cos: &Array<T>,
    sin: &Array<T>,
    positions: &Array<I>,
    query: &mut Array<F>,
    keys: &mut Array<F>,
    values: &mut Array<F>,
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gamma_dtype: StorageType,
    #[define(T)] _table_dtype: StorageType,
    #[define(I)] _position_dtype: StorageType,
) {
    let head_dim = comptime!(plan.head_dim as u32);
    let most = comptime!(plan.heads as u32);
    let token = CUBE_POS as u32 / sizes.pieces;
    if token >= sizes.tokens {
        terminate!();
    }
    let batch = token / sizes.seq_length;
    let within = batch * sizes.batch_stride + token % sizes.seq_length * sizes.token_stride;
    let position = min(u32::cast_from(positions[within as usize]), sizes.capacity - 1);
    let placed_heads = sizes.n_heads + sizes.n_kv_heads;
    let row = token * (placed_heads + sizes.n_kv_heads) * head_dim;
    let first = CUBE_POS as u32 % sizes.pieces * most;
    // Heads of both kinds may be among them: queries first, then keys, which lie behind them.
    let end = min(first + most, placed_heads);
    let middle = min(max(sizes.n_heads, first), end);
    let queries = middle - first;
    let keys_at = row + middle * head_dim;
    let source = Source { start: row + first * head_dim, queries, keys: keys_at, heads: end - first, position };
    let mut placed = SharedMemory::<f32>::new(comptime!(plan.heads * plan.head_dim));
    place::<F, G, T>(qkv, query_gamma, key_gamma, cos, sin, &mut placed, &source, sizes, plan);
    for i in range_stepped(UNIT_POS, (end - first) * head_dim, UNITS) {
        let head = first + i / head_dim;
        if head < middle {
            query[((token * sizes.n_heads + first) * head_dim + i) as usize] = F::cast_from(placed[i as usize]);
        } else {
            let head = head - sizes.n_heads;
            let to = ((batch * sizes.n_kv_heads + head) * sizes.capacity + position) * head_dim + i % head_dim;
            keys[to as usize] = F::cast_from(placed[i as usize]);
            let value = row + (placed_heads + head) * head_dim + i % head_dim;
            values[to as usize] = qkv[value as usize];
        }
    }
}

/// A cube attends with query heads that share a key head, over one piece of the keys.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn decode_kernel<F: Float, G: Float, T: Float, I: Int, O: Float, N: Size>(
    qkv: &Array<F>,
    query_gamma: &Array<G>,
    key_gamma: &Array<G>,
    cos: &Array<T>,
    sin: &Array<T>,
    positions: &Array<I>,
    keys: &mut Array<Vector<F, N>>,
    values: &mut Array<Vector<F, N>>,
    out: &mut Array<Vector<O, N>>,
    statistics: &mut Array<f32>,
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gamma_dtype: StorageType,
    #[define(T)] _table_dtype: StorageType,
    #[define(I)] _position_dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let width = N::value();
    let head_dim = comptime!(plan.head_dim as u32);
    let columns = comptime!((plan.head_dim / width) as u32);
    let heads = comptime!(plan.heads as u32);
    let piece = CUBE_POS as u32 % sizes.pieces;
    let groups = sizes.n_heads / heads;
    let group = CUBE_POS as u32 / sizes.pieces % groups;
    let batch = CUBE_POS as u32 / sizes.pieces / groups;
    if batch >= sizes.tokens {
        terminate!();
    }
    let head = group * heads;
    let kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    let position = min(u32::cast_from(positions[(batch * sizes.batch_stride) as usize]), sizes.capacity - 1);
    let row = batch * (sizes.n_heads + 2 * sizes.n_kv_heads) * head_dim;
    let first = piece * PIECE;
    let end = min(first + PIECE, position + 1);

    // Queries, and behind them the new key.
    let mut placed = SharedMemory::<f32>::new(comptime!((plan.heads + 1) * plan.head_dim));
    let new_key = comptime!((plan.heads * plan.head_dim) as u32);
    let keys_at = row + (sizes.n_heads + kv_head) * head_dim;
    let source = Source { start: row + head * head_dim, queries: heads, keys: keys_at, heads: heads + 1, position };
    place::<F, G, T>(qkv, query_gamma, key_gamma, cos, sin, &mut placed, &source, sizes, plan);
    let new_value = row + (sizes.n_heads + sizes.n_kv_heads + kv_head) * head_dim;
    let held = (batch * sizes.n_kv_heads + kv_head) * sizes.capacity;
    let writes = position >= first && position < first + PIECE && head == kv_head * (sizes.n_heads / sizes.n_kv_heads);
    if writes && UNIT_POS < columns {
        let to = ((held + position) * columns + UNIT_POS) as usize;
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
    let mut sums = Array::<f32>::new(comptime!(plan.heads));
    #[unroll]
    for i in 0..plan.heads {
        sums[i] = 0.0f32;
    }
    let width_u32 = comptime!(width as u32);
    if seen {
        // A run of columns at a time: all its reads before the first product.
        let run = comptime!(columns.min(RUN));
        for start in range_stepped(0u32, columns, run) {
            let mut key = Array::<Vector<F, N>>::new(comptime!(run as usize));
            #[unroll]
            for i in 0..run {
                let column = min(start + i, columns - 1);
                key[i as usize] = keys[((held + own) * columns + column) as usize];
            }
            #[unroll]
            for i in 0..run {
                let column = start + i;
                if column < columns {
                    let key = Vector::<f32, N>::cast_from(key[i as usize]);
                    #[unroll]
                    for head in 0..plan.heads {
                        #[unroll]
                        for j in 0..width {
                            let at = column * width_u32 + comptime!((head * plan.head_dim + j) as u32);
                            sums[head] += key[j] * placed[at as usize];
                        }
                    }
                }
            }
        }
        // The new key may not have reached the cache yet.
        if own == position {
            #[unroll]
            for head in 0..plan.heads {
                sums[head] = 0.0f32;
                for column in 0..head_dim {
                    let query = placed[(comptime!((head * plan.head_dim) as u32) + column) as usize];
                    sums[head] += query * placed[(new_key + column) as usize];
                }
            }
        }
    }
    let mut maxima = Array::<f32>::new(comptime!(plan.heads));
    let mut totals = Array::<f32>::new(comptime!(plan.heads));
    #[unroll]
    for i in 0..plan.heads {
        let score = select(seen, sums[i] * sizes.scale, NOTHING);
        maxima[i] = team_max(score, plan.team);
        sums[i] = select(seen, (score - maxima[i]).exp(), 0.0f32);
        totals[i] = team_sum(sums[i], plan.team);
    }
    sync_cube();
    let mut scores = SharedMemory::<f32>::new(comptime!(plan.heads * PIECE as usize));
    #[unroll]
    for i in 0..plan.heads {
        scores[(comptime!(i as u32 * PIECE) + UNIT_POS) as usize] = sums[i];
    }
    sync_cube();

    // Values: a unit has a vector of columns, and every so many keys.
    let across = comptime!(columns.next_power_of_two());
    let lanes = comptime!(UNITS / across);
    let column = min(UNIT_POS % across, columns - 1);
    let lane = UNIT_POS / across;
    let mut results = Array::<Vector<f32, N>>::new(comptime!(plan.heads));
    #[unroll]
    for i in 0..plan.heads {
        results[i] = Vector::<f32, N>::new(0.0);
    }
    for start in range_stepped(first + lane, end, comptime!(lanes * RUN)) {
        let mut value = Array::<Vector<F, N>>::new(RUN as usize);
        #[unroll]
        for i in 0..RUN {
            let key = min(start + comptime!(i * lanes), end - 1);
            value[i as usize] = values[((held + key) * columns + column) as usize];
        }
        #[unroll]
        for i in 0..RUN {
            let key = start + comptime!(i * lanes);
            // The new value, which may not have reached the cache yet, comes at the end.
            if key < end && key != position {
                let value = Vector::<f32, N>::cast_from(value[i as usize]);
                #[unroll]
                for head in 0..plan.heads {
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
        for head in 0..plan.heads {
            let share = scores[(comptime!(head as u32 * PIECE) + position - first) as usize];
            results[head] += value * Vector::<f32, N>::new(share);
        }
    }
    sync_cube();
    let mut shared = SharedMemory::<Vector<f32, N>>::new(UNITS as usize);
    #[unroll]
    for i in 0..plan.heads {
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
            if comptime!(plan.cut) {
                let to = (line * sizes.pieces + piece) * columns + UNIT_POS;
                out[to as usize] = Vector::cast_from(result);
            } else {
                result *= Vector::<f32, N>::new(1.0f32 / totals[i]);
                out[(line * columns + UNIT_POS) as usize] = Vector::cast_from(result);
            }
        }
        if comptime!(plan.cut) && UNIT_POS == 0 {
            let to = (line * sizes.pieces + piece) * 2;
            statistics[to as usize] = maxima[i];
            statistics[(to + 1) as usize] = totals[i];
        }
        sync_cube();
    }
}

/// Joins the pieces of each head by their maxima and totals.
#[cube(launch_unchecked)]
fn join_kernel<O: Float>(
    partial: &Array<f32>,
    statistics: &Array<f32>,
    out: &mut Array<O>,
    lines: u32,
    pieces: u32,
    head_dim: u32,
    #[define(O)] _dtype: StorageType,
) {
    let line = CUBE_POS as u32;
    if line >= lines {
        terminate!();
    }
    let mut highest = NOTHING.runtime();
    for piece in 0..pieces {
        highest = max(highest, statistics[((line * pieces + piece) * 2) as usize]);
    }
    for column in range_stepped(UNIT_POS, head_dim, CUBE_DIM) {
        let mut total = 0.0f32;
        let mut sum = 0.0f32;
        for piece in 0..pieces {
            let at = line * pieces + piece;
            let factor = (statistics[(at * 2) as usize] - highest).exp();
            total += statistics[(at * 2 + 1) as usize] * factor;
            sum += partial[(at * head_dim + column) as usize] * factor;
        }
        out[(line * head_dim + column) as usize] = O::cast_from(sum / total);
    }
}
