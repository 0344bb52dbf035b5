//! Cached attention in CubeCL: for one new token a row, all in one kernel, which cuts long rows of keys into pieces; for
//! more, a kernel that places and appends, for all rows together, and then one that attends over pages, where there is one. Elsewhere a
//! row's pages are put side by side before attention, row by row.

mod planes;
mod units;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use super::{CachedAttention, CachedAttentionOps, CachedRow, CachedTokens, Held, Placement, reference};
use crate::checked::Checked;
use crate::cubecl::reduce::RowUnits;
use crate::cubecl::{array, clamp_index, contiguous, empty, grid, launch, optional, scratch, vector_width};
use crate::masked::MASKED;
use crate::ops::attention::AttentionOptions;
#[cfg(feature = "cuda")]
use crate::ops::attention::PagedHopper;
use crate::ops::attention::cubecl::{CubeMask, Dims, Heads, attention_forward};
use crate::ops::weight::PACKED;
use crate::ops::weight::cubecl::bytes;
use crate::packed_heads::PackedHeads;
use crate::recorder::fell_back;
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;
/// The most heads that a cube places, and the most query heads that it attends for.
const MOST_HEADS: usize = 8;

/// The widest heads that the kernels take.
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
        let CachedAttention { qkv, heads, placement, at, cache } = operands.into_inner();
        let [tokens, _] = qkv.dims();
        let (placement, qkv) = (cube_placement(placement), contiguous(primitive(qkv)));
        let cached = [&cache.keys, &cache.values].map(CubeHeld::of);
        let all = Pass {
            heads,
            placement,
            positions: contiguous(at.positions.clone().into_primitive()),
            table: contiguous(at.pages.clone().into_primitive()),
            window: at.window,
            qkv,
        };
        let together = !cached[0].is_int8() || planes::take_int8(&all);
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
            return float::<Self, 4>(prefill(&all, run, &query, cached)).squeeze_dim(0);
        }
        let row_by_row = paged.is_none();
        let out = paged.unwrap_or_else(|| empty(&all.qkv, [tokens, heads.n_heads, head_dim], all.qkv.dtype));
        let mut out = float::<Self, 3>(out);
        for run in &runs {
            if run.single {
                decode(&all, run, cached, &primitive(out.clone()));
            } else if row_by_row {
                let part = float::<Self, 4>(prefill(&all, run, &query, cached)).squeeze_dim(0);
                let place = [run.first_token..run.first_token + run.tokens, 0..heads.n_heads, 0..head_dim];
                out.inplace(|out| out.slice_assign(place, part));
            }
        }
        float(primitive(out))
    }
}

/// Rows that are attended to together: one of several new tokens, or several of one each.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    first_row: usize,
    first_token: usize,
    tokens: usize,
    /// Whether each token is a row's only one, and they are attended to by one kernel.
    single: bool,
    /// Tokens of the longest row.
    keys: usize,
}

/// Runs of rows, those of single tokens together where there is a kernel for them.
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

/// All from the first run of several new tokens to the last one. Single tokens between them are appended with them, and once more where
/// they are attended to.
fn longer(runs: &[Run]) -> Run {
    let several = |run: &&Run| !run.single;
    let first = runs.iter().find(several).expect("a run that is none of single tokens");
    let last = runs.iter().rfind(several).unwrap_or(first);
    let (first_row, first_token) = (first.first_row, first.first_token);
    let keys = runs.iter().map(|run| run.keys).max().unwrap_or(1);
    Run { first_row, first_token, tokens: last.first_token + last.tokens - first_token, single: false, keys }
}

/// Keys, or values, on the device.
struct CubeHeld<R: CubeRuntime> {
    /// Floats `[pages, n_kv_heads, page_tokens, head_dim]`, or words of bytes `[pages, n_kv_heads, page_tokens, head_dim / 4]`.
    stored: CubeTensor<R>,
    /// Of bytes, `[pages, n_kv_heads, page_tokens]`.
    scales: Option<CubeTensor<R>>,
}

impl<R: CubeRuntime> CubeHeld<R> {
    fn of<B>(held: &Held<B>) -> Self
    where
        B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
    {
        match held {
            Held::Float(floats) => Self { stored: primitive(floats.clone()), scales: None },
            Held::Int8 { packed, scales } => {
                let stored = packed.clone().into_primitive();
                // Eight bytes of them are read together.
                let aligned = stored.handle.offset_start.unwrap_or(0).is_multiple_of(8);
                assert!(aligned, "cached_attention: a cache of bytes that begins between two words");
                Self { stored, scales: Some(primitive(scales.clone())) }
            }
        }
    }

    fn is_int8(&self) -> bool {
        self.scales.is_some()
    }

    /// What a kernel reads: bytes come in unsigned words.
    fn dtype(&self) -> StorageType {
        if self.is_int8() { u32::as_type_native_unchecked().storage_type() } else { self.stored.dtype.into() }
    }

    /// Elements that lie where `floats` numbers do.
    fn width(&self, floats: usize) -> usize {
        if self.is_int8() { floats / PACKED } else { floats }
    }
}

/// The placement's tensors as primitives. Both norms are there, or none.
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

/// What all runs of a pass share.
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
}

/// What the kernels are compiled for, beside their dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    head_dim: usize,
    /// Heads that a cube places, or query heads that it attends for.
    heads: usize,
    normed: bool,
    rotated: bool,
    /// Whether results are parts, of pieces of the keys.
    cut: bool,
    /// Whether the cache holds bytes.
    int8: bool,
    row_units: RowUnits,
}

/// The sizes that may differ from launch to launch, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Tokens of the run, and where they and their rows begin.
    tokens: u32,
    first_token: u32,
    first_row: u32,
    n_heads: u32,
    n_kv_heads: u32,
    /// Pages of the cache, and of a row in the table.
    pages: u32,
    pages_a_row: u32,
    /// A page has two to this power tokens.
    page_shift: u32,
    /// Pieces of the keys, or cubes for a token.
    pieces: u32,
    /// Keys of a piece.
    piece: u32,
    /// Keys of the longest row.
    keys: u32,
    window: i32,
    scale: f32,
    epsilon: f32,
    last: u32,
}

/// The head of the cache, counted in lines of `head_dim`, that a token of a row has in it.
#[cube]
fn cell<I: Int>(table: &Array<I>, row: u32, kv_head: u32, place: u32, sizes: &Sizes) -> u32 {
    let entry = table[(row * sizes.pages_a_row + min(place >> sizes.page_shift, sizes.pages_a_row - 1)) as usize];
    let page = clamp_index::<I>(entry, sizes.pages - 1);
    let within = place & ((1u32 << sizes.page_shift) - 1);
    ((page * sizes.n_kv_heads + kv_head) << sizes.page_shift) + within
}

/// The tensors of a launch, those that are not there standing for each other.
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

fn sizes<R: CubeRuntime>(
    bound: &Bound<R>,
    pass: &Pass<R>,
    run: &Run,
    CubeHeld { stored: held, .. }: &CubeHeld<R>,
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
        1.0 / (heads.head_dim as f32).sqrt(),
        bound.epsilon as f32,
        last as u32,
    )
}

/// Attends to the keys of all rows of several new tokens in one launch, where there is a kernel that reads pages: `[tokens, n_heads,
/// head_dim]`, in which rows of one new token are left out.
#[cfg(feature = "cuda")]
fn over_pages<R: CubeRuntime, B: Backend<IntTensorPrimitive = CubeTensor<R>>>(
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
    unsafe { paged.forward(query, cached, &pass.table, &contiguous(at.tiles().clone().into_primitive()), &out) };
    Some(out)
}

#[cfg(not(feature = "cuda"))]
fn over_pages<R: CubeRuntime, B: Backend<IntTensorPrimitive = CubeTensor<R>>>(
    _: &Pass<R>,
    _: &CachedTokens<B>,
    _: &Run,
    _: &CubeTensor<R>,
    _: [&CubeHeld<R>; 2],
) -> Option<CubeTensor<R>> {
    None
}

/// Attends to the keys of one row, whose tokens are appended: `[1, tokens, n_heads, head_dim]`.
fn prefill<R: CubeRuntime>(pass: &Pass<R>, run: &Run, query: &CubeTensor<R>, held: [&CubeHeld<R>; 2]) -> CubeTensor<R> {
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
fn rotary_append<R: CubeRuntime>(
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

/// Places and appends the tokens of a run, one a row, and attends to their keys: into their places in `out` `[tokens,
/// n_heads, head_dim]`.
fn decode<R: CubeRuntime>(pass: &Pass<R>, run: &Run, held: [&CubeHeld<R>; 2], out: &CubeTensor<R>) {
    let bound = bind(pass, 1, held[0].is_int8());
    let pieces = match bound.variant.row_units.plane > 1 {
        true => planes::attend(bound, pass, run, held, out),
        false => units::attend(bound, pass, run, held, out),
    };
    if let Some(pieces) = pieces {
        join(pieces, out, pass.heads, run);
    }
}

/// What pieces of the keys contribute: `partial` `[tokens, n_heads, pieces, head_dim]`, f32, and for each of these
/// rows in `statistics` `[.., 2]` the maximum it is scaled by and the sum it is to be divided by.
struct Pieces<R: CubeRuntime> {
    partial: CubeTensor<R>,
    statistics: CubeTensor<R>,
}

impl<R: CubeRuntime> Pieces<R> {
    /// Room for them, if there are several.
    fn new(out: &CubeTensor<R>, heads: PackedHeads, run: &Run, pieces: usize) -> Option<Self> {
        let rows = [run.tokens, heads.n_heads, pieces];
        (pieces > 1).then(|| Self {
            partial: scratch(out, [rows[0], rows[1], rows[2], heads.head_dim], DType::F32),
            statistics: scratch(out, [rows[0], rows[1], rows[2], 2], DType::F32),
        })
    }

    /// What a kernel writes into: these, or else the result, which also stands for statistics that it does not write.
    fn or<'a>(this: &'a Option<Self>, out: &'a CubeTensor<R>) -> [&'a CubeTensor<R>; 2] {
        match this {
            Some(pieces) => [&pieces.partial, &pieces.statistics],
            None => [out, out],
        }
    }
}

fn join<R: CubeRuntime>(pieces: Pieces<R>, out: &CubeTensor<R>, heads: PackedHeads, run: &Run) {
    let Pieces { partial, statistics } = pieces;
    let lines = run.tokens * heads.n_heads;
    // SAFETY: a cube joins the pieces of one head.
    unsafe {
        launch!(
            join_kernel::JoinKernel,
            &out.client,
            grid(lines),
            CubeDim::new_1d(heads.head_dim.next_power_of_two().min(UNITS as usize) as u32),
            [],
            [O = out.dtype],
            [
                partial: Array<f32> = array(&partial),
                statistics: Array<f32> = array(&statistics),
                out: Array<join_kernel::O> = array(out),
                lines: u32 = lines as u32,
                first_line: u32 = (run.first_token * heads.n_heads) as u32,
                pieces: u32 = partial.meta.shape()[2] as u32,
                head_dim: u32 = heads.head_dim as u32,
            ],
            []
        );
    }
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
fn place<F: Float, G: Float, T: Float>(
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
            placed[i as usize] = f32::cast_from(F::cast_from(placed[i as usize] * inverse * gamma));
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
            placed[first as usize] = f32::cast_from(F::cast_from(a * c - b * s));
            placed[(first + half) as usize] = f32::cast_from(F::cast_from(b * c + a * s));
        }
        sync_cube();
    }
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

/// The largest magnitude of some numbers, and the sum of all, which is no number where one of them is none.
#[derive(CubeType, Clone, Copy)]
struct Magnitude {
    largest: f32,
    sum: f32,
}

/// The scale of bytes for such numbers. It is none that can be counted with where one of them is none, or all together are too large.
#[cube]
fn scale_of(of: Magnitude) -> f32 {
    let scale = select(of.largest > 0.0f32, of.largest / 127.0f32, 1.0f32);
    select(of.sum < f32::MAX, scale, of.sum)
}

/// Numbers as a cache stores them: floats, or the nearest bytes by their scale, four in a word.
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
                // With its sign bit flipped, a byte counts up from the least one.
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

/// What a cache stores, as numbers: floats, or bytes before their scale.
#[cube]
fn numbers<K: Numeric, M: Size, N: Size>(stored: Vector<K, M>, #[comptime] int8: bool) -> Vector<f32, N> {
    if comptime!(int8) {
        let mut numbers = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..M::value() {
            let four = bytes(u32::cast_from(stored[i]));
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

/// Joins the pieces of each head by their maxima and totals.
#[cube(launch_unchecked)]
fn join_kernel<O: Float>(
    partial: &Array<f32>,
    statistics: &Array<f32>,
    out: &mut Array<O>,
    lines: u32,
    first_line: u32,
    pieces: u32,
    head_dim: u32,
    #[define(O)] _dtype: StorageType,
) {
    let line = CUBE_POS as u32;
    if line >= lines {
        terminate!();
    }
    let mut highest = MASKED.runtime();
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
        out[((first_line + line) * head_dim + column) as usize] = O::cast_from(sum / total);
    }
}
