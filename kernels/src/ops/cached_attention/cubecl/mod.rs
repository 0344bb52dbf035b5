//! Cached attention in CubeCL. Rows with one new token need a single kernel, which splits long rows
//! of keys ([`planes`], or [`units`] without planes); rows with several use [`append`] and then
//! [`prompts`].

mod append;
mod planes;
mod prompts;
mod units;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use self::append::rotary_append;
use self::prompts::{over_pages, prefill};
use super::{CachedAttention, CachedAttentionOps, CachedRow, KvStorage, Placement, reference};
use crate::checked::Checked;
use crate::cubecl::reduce::{RowUnits, row_vector};
use crate::cubecl::{array, clamp_index, contiguous, empty, grid, launch, scratch};
use crate::masked::MASKED;
use crate::ops::attention::{AttentionOptions, AttentionOutput, with_sinks};
use crate::ops::rotary::{QkvRotaryForward, RotaryTable, qkv_rotary_forward};
use crate::packed_heads::PackedHeads;
use crate::quant::int8::{PACKED, unpack};
use crate::recorder::fell_back;
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;
/// Maximum heads placed per cube, and query heads attended per cube.
const MOST_HEADS: usize = 8;

/// Maximum head size of the kernels.
const MOST_COLUMNS: usize = 256;

impl<R, F, I, BT> CachedAttentionOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn cached_attention(operands: Checked<CachedAttention<'_, Self>>) -> Tensor<Self, 3> {
        let head_dim = operands.heads.head_dim;
        if head_dim > MOST_COLUMNS {
            fell_back("cached_attention", &Self::name(&operands.qkv.device()), "its heads are wider than 256");
            return reference::cached_attention(operands.into_inner());
        }
        let CachedAttention { mut qkv, heads, mut placement, options, at, cache } = operands.into_inner();
        let [tokens, _] = qkv.dims();
        // The kernels rotate whole heads.
        let is_part = |table: &RotaryTable<Self>| 2 * table.cos.dims()[1] < head_dim;
        if let Some(table) = placement.rotary.clone().filter(is_part) {
            let device = Self::name(&qkv.device());
            fell_back("cached_attention", &device, "a part of each head rotates, in a launch of its own");
            if placement.query_norm.is_some() {
                let operands = CachedAttention { qkv, heads, placement, options, at, cache };
                return reference::cached_attention(operands);
            }
            let positions = at.positions.clone();
            let rotated = QkvRotaryForward { qkv: qkv.unsqueeze(), heads, table, positions, inverse: false };
            qkv = qkv_rotary_forward(Checked::new(rotated)).squeeze_dim(0);
            placement.rotary = None;
        }
        let sinks = placement.sinks.take();
        let prefilled = |(output, log_sum_exp): (CubeTensor<R>, CubeTensor<R>)| -> Tensor<Self, 3> {
            let without = AttentionOutput { output: float(output), log_sum_exp: float(log_sum_exp) };
            let output = match &sinks {
                Some(sinks) => with_sinks::<Self>(without, sinks.clone()).output,
                None => without.output,
            };
            output.squeeze_dim(0)
        };
        let (placement, qkv) = (cube_placement(placement), contiguous(primitive(qkv)));
        let cached = [&cache.keys, &cache.values].map(CubeKvStorage::of);
        let all = Pass {
            heads,
            placement,
            positions: contiguous(at.positions.clone().into_primitive()),
            table: contiguous(at.pages.clone().into_primitive()),
            window: at.window,
            options,
            sinks: sinks.clone().map(|sinks| contiguous(primitive(sinks))),
            qkv,
        };
        let together = !cached[0].is_int8() || planes::take_int8(&all, cached.each_ref());
        if !together {
            fell_back("cached_attention", &Self::name(&at.pages.device()), "a cache of INT8 is read row by row");
        }
        let runs = runs(&at.rows, together);
        let cached = cached.each_ref();
        if let [run] = &runs[..]
            && run.single
        {
            let out = scratch(&all.qkv, [tokens, heads.n_heads, head_dim], all.qkv.dtype);
            decode(&all, run, cached, &out);
            return float(out);
        }
        let longer = longer(&runs);
        let query = rotary_append(&all, &longer, contiguous(at.row_of_each().clone().into_primitive()), cached);
        let paged = over_pages(&all, at, &longer, &query, cached);
        if let ([run], None) = (&runs[..], &paged) {
            return prefilled(prefill(&all, run, &query, cached));
        }
        let row_by_row = paged.is_none();
        let out = paged.unwrap_or_else(|| empty(&all.qkv, [tokens, heads.n_heads, head_dim], all.qkv.dtype));
        let mut out = float::<Self, 3>(out);
        for run in &runs {
            if run.single {
                decode(&all, run, cached, &primitive(out.clone()));
            } else if row_by_row {
                let part = prefilled(prefill(&all, run, &query, cached));
                let place = [run.first_token..run.first_token + run.tokens, 0..heads.n_heads, 0..head_dim];
                out.inplace(|out| out.slice_assign(place, part));
            }
        }
        float(primitive(out))
    }
}

/// Rows attended together: one with several new tokens, or several with one each.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    first_row: usize,
    first_token: usize,
    tokens: usize,
    /// Whether each token is its row's only new one, and one kernel attends to them.
    single: bool,
    /// Tokens of the longest row.
    keys: usize,
}

/// Splits a pass into runs, with single tokens together if a kernel supports it.
fn runs(rows: &[CachedRow], together: bool) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut first_token = 0;
    for (first_row, row) in rows.iter().enumerate() {
        let single = together && row.tokens == 1;
        match runs.last_mut() {
            Some(run) if run.single && single => {
                run.tokens += 1;
                run.keys = run.keys.max(row.keys);
            }
            _ => runs.push(Run { first_row, first_token, tokens: row.tokens, single, keys: row.keys }),
        }
        first_token += row.tokens;
    }
    runs
}

/// The range from the first run with several new tokens to the last. Single tokens in between are
/// appended with it, and again where they are attended.
fn longer(runs: &[Run]) -> Run {
    let several = |run: &&Run| !run.single;
    let first = runs.iter().find(several).expect("a run that is none of single tokens");
    let last = runs.iter().rfind(several).unwrap_or(first);
    let (first_row, first_token) = (first.first_row, first.first_token);
    let keys = runs.iter().map(|run| run.keys).max().unwrap_or(1);
    Run { first_row, first_token, tokens: last.first_token + last.tokens - first_token, single: false, keys }
}

/// Keys, or values, on the device.
struct CubeKvStorage<R: CubeRuntime> {
    /// Floats `[pages, n_kv_heads, page_tokens, head_dim]`, or packed bytes `[pages, n_kv_heads,
    /// page_tokens, head_dim / 4]`.
    stored: CubeTensor<R>,
    /// For bytes, `[pages, n_kv_heads, page_tokens]`.
    scales: Option<CubeTensor<R>>,
}

impl<R: CubeRuntime> CubeKvStorage<R> {
    fn of<B>(held: &KvStorage<B>) -> Self
    where
        B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
    {
        match held {
            KvStorage::Float(floats) => Self { stored: primitive(floats.clone()), scales: None },
            KvStorage::Int8 { packed, scales } => {
                let stored = packed.clone().into_primitive();
                // Eight bytes are read together.
                let aligned = stored.handle.offset_start.unwrap_or(0).is_multiple_of(8);
                assert!(aligned, "cached_attention: a cache of bytes that begins between two words");
                Self { stored, scales: Some(primitive(scales.clone())) }
            }
        }
    }

    fn is_int8(&self) -> bool {
        self.scales.is_some()
    }

    /// The kernels' storage type: bytes come in unsigned words.
    fn dtype(&self) -> StorageType {
        if self.is_int8() { u32::as_type_native_unchecked().storage_type() } else { self.stored.dtype.into() }
    }

    /// Storage elements of `floats` values.
    fn width(&self, floats: usize) -> usize {
        if self.is_int8() { floats / PACKED } else { floats }
    }
}

/// The placement's tensors as primitives. Both norms are given, or none.
fn cube_placement<R: CubeRuntime, B: Backend<FloatTensorPrimitive = CubeTensor<R>>>(
    placement: Placement<B>,
) -> CubePlacement<R> {
    let norms = placement.query_norm.zip(placement.key_norm);
    CubePlacement {
        norms: norms.map(|(query, key)| ([query.gamma, key.gamma].map(primitive), query.epsilon)),
        rotary: placement.rotary.map(|table| [table.cos, table.sin].map(primitive)),
    }
}

/// [`Placement`] on the device.
#[derive(Clone)]
struct CubePlacement<R: CubeRuntime> {
    /// Gammas of queries and keys, and epsilon.
    norms: Option<([CubeTensor<R>; 2], f64)>,
    /// Cosines and sines.
    rotary: Option<[CubeTensor<R>; 2]>,
}

/// State shared by all runs of a pass.
struct Pass<R: CubeRuntime> {
    /// `[tokens, width]`.
    qkv: CubeTensor<R>,
    heads: PackedHeads,
    placement: CubePlacement<R>,
    /// Index in its row of each token.
    positions: CubeTensor<R>,
    /// Pages of each row, `[rows, most]`.
    table: CubeTensor<R>,
    window: Option<usize>,
    options: AttentionOptions,
    /// A score per query head that takes part in the softmax.
    sinks: Option<CubeTensor<R>>,
}

/// Compile-time values of the kernels, besides dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    head_dim: usize,
    /// Heads placed per cube, or query heads attended per cube.
    heads: usize,
    normed: bool,
    rotated: bool,
    /// Whether results are partial, over a piece of the keys.
    cut: bool,
    /// Whether the cache is INT8.
    int8: bool,
    row_units: RowUnits,
}

/// The sizes that may change per launch, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Tokens of the run, and the offsets of tokens and rows.
    tokens: u32,
    first_token: u32,
    first_row: u32,
    n_heads: u32,
    n_kv_heads: u32,
    /// Pages of the cache, and of a row in the table.
    pages: u32,
    pages_a_row: u32,
    /// Logarithm of the page size.
    page_shift: u32,
    /// Number of pieces of the keys, or cubes per token.
    pieces: u32,
    /// Keys per piece.
    piece: u32,
    /// Keys of the longest row.
    keys: u32,
    window: i32,
    scale: f32,
    /// Cap of the scores; zero for none.
    softcap: f32,
    epsilon: f32,
    last: u32,
}

/// The cache line of a token's head, in units of `head_dim`.
#[cube]
fn cell<I: Int>(table: &Array<I>, row: u32, kv_head: u32, place: u32, sizes: &Sizes) -> u32 {
    let entry = table[(row * sizes.pages_a_row + min(place >> sizes.page_shift, sizes.pages_a_row - 1)) as usize];
    let page = clamp_index::<I>(entry, sizes.pages - 1);
    let within = place & ((1u32 << sizes.page_shift) - 1);
    ((page * sizes.n_kv_heads + kv_head) << sizes.page_shift) + within
}

/// Dtype of placed heads: that of `qkv`; f32 for an INT8 cache, to round only once.
fn placed_dtype<R: CubeRuntime>(qkv: &CubeTensor<R>, held: &CubeKvStorage<R>) -> StorageType {
    if held.is_int8() { f32::as_type_native_unchecked().storage_type() } else { qkv.dtype.into() }
}

/// The tensors of a launch; missing ones are replaced by others.
struct Bound<R: CubeRuntime> {
    gammas: [CubeTensor<R>; 2],
    table: [CubeTensor<R>; 2],
    variant: Variant,
    epsilon: f64,
}

fn bind<R: CubeRuntime>(pass: &Pass<R>, heads: usize, int8: bool) -> Bound<R> {
    let Pass { qkv, placement, .. } = pass;
    let variant = Variant {
        head_dim: pass.heads.head_dim,
        heads,
        normed: placement.norms.is_some(),
        rotated: placement.rotary.is_some(),
        cut: false,
        int8,
        row_units: RowUnits { rows: 1, units: UNITS, ..RowUnits::new(&qkv.client, UNITS as usize, 1, UNITS) },
    };
    let (gammas, epsilon) = placement.norms.clone().unwrap_or_else(|| ([qkv.clone(), qkv.clone()], 0.0));
    let table = placement.rotary.clone().unwrap_or_else(|| [qkv.clone(), qkv.clone()]);
    Bound { gammas: gammas.map(contiguous), table: table.map(contiguous), variant, epsilon }
}

/// Elements read at once, for this many contiguous ones of a head.
fn vector<R: CubeRuntime>(bound: &Bound<R>, pass: &Pass<R>, held: [&CubeKvStorage<R>; 2], length: usize) -> usize {
    let [[query_gamma, key_gamma], [cos, sin]] = [&bound.gammas, &bound.table].map(|pair| pair.each_ref());
    let mut tensors = vec![&pass.qkv, query_gamma, key_gamma, cos, sin];
    // Words of bytes are aligned to two.
    tensors.extend(held.into_iter().filter(|held| !held.is_int8()).map(|held| &held.stored));
    row_vector(&tensors, &[length])
}

fn sizes<R: CubeRuntime>(
    bound: &Bound<R>,
    pass: &Pass<R>,
    run: &Run,
    CubeKvStorage { stored: held, .. }: &CubeKvStorage<R>,
    [pieces, piece]: [usize; 2],
) -> SizesLaunch<R> {
    let heads = pass.heads;
    let last = if bound.variant.rotated { bound.table[0].meta.shape()[0] - 1 } else { 0 };
    SizesLaunch::new(
        run.tokens as u32,
        run.first_token as u32,
        run.first_row as u32,
        heads.n_heads as u32,
        heads.n_kv_heads as u32,
        held.meta.shape()[0] as u32,
        pass.table.meta.shape()[1] as u32,
        held.meta.shape()[2].trailing_zeros(),
        pieces as u32,
        piece as u32,
        run.keys as u32,
        pass.window.map_or(i32::MAX / 2, |window| window.min(i32::MAX as usize / 2) as i32),
        pass.options.scale as f32,
        pass.options.softcap.unwrap_or(0.0) as f32,
        bound.epsilon as f32,
        last as u32,
    )
}

/// Places and appends the tokens of a run, one per row, and attends to their keys: into their rows
/// of `out` `[tokens, n_heads, head_dim]`.
fn decode<R: CubeRuntime>(pass: &Pass<R>, run: &Run, held: [&CubeKvStorage<R>; 2], out: &CubeTensor<R>) {
    let bound = bind(pass, 1, held[0].is_int8());
    let pieces = match bound.variant.row_units.plane > 1 {
        true => planes::attend(bound, pass, run, held, out),
        false => units::attend(bound, pass, run, held, out),
    };
    if let Some(pieces) = pieces {
        join(pieces, out, pass, run);
    }
}

/// Partial results of pieces of the keys: `partial` `[tokens, n_heads, pieces, head_dim]`, f32, and
/// for each of its rows in `statistics` `[.., 2]` its maximum and its sum.
struct Pieces<R: CubeRuntime> {
    partial: CubeTensor<R>,
    statistics: CubeTensor<R>,
}

impl<R: CubeRuntime> Pieces<R> {
    /// Allocates them, if there are several pieces, or sinks, which joining adds.
    fn new(out: &CubeTensor<R>, pass: &Pass<R>, run: &Run, pieces: usize) -> Option<Self> {
        let heads = pass.heads;
        let rows = [run.tokens, heads.n_heads, pieces];
        (pieces > 1 || pass.sinks.is_some()).then(|| Self {
            partial: scratch(out, [rows[0], rows[1], rows[2], heads.head_dim], DType::F32),
            statistics: scratch(out, [rows[0], rows[1], rows[2], 2], DType::F32),
        })
    }

    /// The output of a kernel: these, or the result, which also stands in for unwritten statistics.
    fn or<'a>(this: &'a Option<Self>, out: &'a CubeTensor<R>) -> [&'a CubeTensor<R>; 2] {
        match this {
            Some(pieces) => [&pieces.partial, &pieces.statistics],
            None => [out, out],
        }
    }
}

fn join<R: CubeRuntime>(pieces: Pieces<R>, out: &CubeTensor<R>, pass: &Pass<R>, run: &Run) {
    let Pieces { partial, statistics } = pieces;
    let heads = pass.heads;
    let sinks = pass.sinks.as_ref().unwrap_or(&statistics);
    let lines = run.tokens * heads.n_heads;
    // SAFETY: a cube joins the pieces of one head.
    unsafe {
        launch!(
            join_kernel::JoinKernel,
            &out.client,
            grid(lines),
            CubeDim::new_1d(heads.head_dim.next_power_of_two().min(UNITS as usize) as u32),
            [],
            [O = out.dtype, S = sinks.dtype],
            [
                partial: Array<f32> = array(&partial),
                statistics: Array<f32> = array(&statistics),
                sinks: Array<join_kernel::S> = array(sinks),
                out: Array<join_kernel::O> = array(out),
                lines: u32 = lines as u32,
                first_line: u32 = (run.first_token * heads.n_heads) as u32,
                pieces: u32 = partial.meta.shape()[2] as u32,
                head_dim: u32 = heads.head_dim as u32,
                n_heads: u32 = heads.n_heads as u32,
            ],
            [has_sinks: bool = pass.sinks.is_some()]
        );
    }
}

/// The heads that a cube places: `queries` of them from element `start` on, and keys from element
/// `keys` on.
#[derive(CubeType, Clone, Copy)]
struct Source {
    start: u32,
    queries: u32,
    keys: u32,
    /// All of them.
    heads: u32,
    position: u32,
}

/// Units that sum the squares of a head together.
const SUMMERS: u32 = 16;

/// Reads heads into shared memory as `P`, normalized and rotated: queries, then keys.
#[cube]
fn place<F: Float, P: Float, G: Float, T: Float>(
    qkv: &Array<F>,
    query_gamma: &Array<G>,
    key_gamma: &Array<G>,
    cos: &Array<T>,
    sin: &Array<T>,
    placed: &mut SharedMemory<f32>,
    source: &Source,
    sizes: &Sizes,
    #[comptime] variant: Variant,
) {
    let head_dim = comptime!(variant.head_dim as u32);
    let half = comptime!(variant.head_dim as u32 / 2);
    for i in range_stepped(UNIT_POS, source.heads * head_dim, UNITS) {
        let mut from = source.start + i;
        if i >= source.queries * head_dim {
            from = source.keys + i - source.queries * head_dim;
        }
        placed[i as usize] = f32::cast_from(qkv[from as usize]);
    }
    sync_cube();
    if comptime!(variant.normed) {
        let mut squares = SharedMemory::<f32>::new(UNITS as usize);
        let head = UNIT_POS / SUMMERS;
        let mut sum = 0.0f32;
        if head < source.heads {
            #[unroll]
            for i in 0..comptime!(variant.head_dim.div_ceil(SUMMERS as usize)) {
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
            placed[i as usize] = f32::cast_from(P::cast_from(placed[i as usize] * inverse * gamma));
        }
        sync_cube();
    }
    if comptime!(variant.rotated) {
        for i in range_stepped(UNIT_POS, source.heads * half, UNITS) {
            let pair = i % half;
            let first = i / half * head_dim + pair;
            let a = placed[first as usize];
            let b = placed[(first + half) as usize];
            let angle = min(source.position, sizes.last) * half + pair;
            let c = f32::cast_from(cos[angle as usize]);
            let s = f32::cast_from(sin[angle as usize]);
            placed[first as usize] = f32::cast_from(P::cast_from(a * c - b * s));
            placed[(first + half) as usize] = f32::cast_from(P::cast_from(b * c + a * s));
        }
        sync_cube();
    }
}

/// The largest magnitude of some values, and their sum, which is NaN if one of them is.
#[derive(CubeType, Clone, Copy)]
struct Magnitude {
    largest: f32,
    sum: f32,
}

/// The INT8 scale of such values. NaN if one of them is, or if their sum overflows.
#[cube]
fn scale_of(of: Magnitude) -> f32 {
    let scale = select(of.largest > 0.0f32, of.largest / 127.0f32, 1.0f32);
    select(of.sum < f32::MAX, scale, of.sum)
}

/// Values in the cache's storage format: floats, or bytes relative to their scale, four per word.
#[cube]
fn stored<K: Numeric, M: Size, N: Size>(numbers: Vector<f32, N>, scale: f32, #[comptime] int8: bool) -> Vector<K, M> {
    if comptime!(int8) {
        let mut words = Vector::<K, M>::cast_from(0u32);
        #[unroll]
        for i in 0..M::value() {
            let mut word = 0u32;
            #[unroll]
            for j in 0..PACKED {
                let byte = max(min((numbers[comptime!(PACKED * i + j)] / scale).round(), 127.0f32), -127.0f32);
                // With its sign bit flipped, a byte counts from the smallest one.
                let byte = u32::cast_from(byte + 128.0f32) ^ 0x80;
                word |= byte << comptime!(8 * j as u32);
            }
            words[i] = K::cast_from(word);
        }
        words
    } else {
        Vector::cast_from(numbers)
    }
}

/// Stored values as floats; bytes before scaling.
#[cube]
fn numbers<K: Numeric, M: Size, N: Size>(stored: Vector<K, M>, #[comptime] int8: bool) -> Vector<f32, N> {
    if comptime!(int8) {
        let mut numbers = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..M::value() {
            let four = unpack(u32::cast_from(stored[i]));
            #[unroll]
            for j in 0..PACKED {
                numbers[comptime!(PACKED * i + j)] = four[j];
            }
        }
        numbers
    } else {
        Vector::cast_from(stored)
    }
}

/// Combines the pieces of each head, and its sink, by their maxima and sums.
#[cube(launch_unchecked)]
fn join_kernel<O: Float, S: Float>(
    partial: &Array<f32>,
    statistics: &Array<f32>,
    sinks: &Array<S>,
    out: &mut Array<O>,
    lines: u32,
    first_line: u32,
    pieces: u32,
    head_dim: u32,
    n_heads: u32,
    #[comptime] has_sinks: bool,
    #[define(O)] _dtype: StorageType,
    #[define(S)] _sink_dtype: StorageType,
) {
    let line = CUBE_POS as u32;
    if line >= lines {
        terminate!();
    }
    let mut sink = MASKED.runtime();
    if comptime!(has_sinks) {
        sink = f32::cast_from(sinks[(line % n_heads) as usize]);
    }
    let mut highest = sink;
    for piece in 0..pieces {
        highest = max(highest, statistics[((line * pieces + piece) * 2) as usize]);
    }
    for column in range_stepped(UNIT_POS, head_dim, CUBE_DIM) {
        let mut total = 0.0f32;
        if comptime!(has_sinks) {
            total = (sink - highest).exp();
        }
        let mut sum = 0.0f32;
        for piece in 0..pieces {
            let at = line * pieces + piece;
            let factor = (statistics[(at * 2) as usize] - highest).exp();
            total += statistics[(at * 2 + 1) as usize] * factor;
            sum += partial[(at * head_dim + column) as usize] * factor;
        }
        out[((first_line + line) * head_dim + column) as usize] = O::cast_from(sum / total);
    }
}
