//! Projections of few rows in CubeCL, as decoding has them: all time goes into reading the weight, so it is read once,
//! and what stands before and after the product is done in the same pass.
//!
//! On NVIDIA's matrix units a cube has 8 outputs or a few times as many, and its planes share the inner dimension among
//! them. Both sides of `mma` come from memory as they lie: a lane reads sixteen bytes of a row, and takes them for the
//! columns that the instruction wants of it. Which columns these are does not matter to a sum, as long as both sides
//! agree. Elsewhere a team of units has an output.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cmma::MmaDefinition;
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use crate::activation::cube::value;
use crate::cube::{array, contiguous, empty, grid, rows, vector_width};
use crate::norm::cube::CubeNorm;
use crate::team::{Team, lanes_sum, team_sum};
use crate::{Activation, ActivationKind};

/// More rows than this are a product like any other.
pub(crate) const FEW_ROWS: usize = 32;

/// Planes of a cube of the matrix kernel.
const PLANES: usize = 8;
/// Outputs of a group: columns of `mma`'s result.
const GROUP: usize = 8;
/// Columns of the inner dimension that a plane works on at a time, eight for each of a lane's four neighbours.
const CHUNK: usize = 32;
/// Sixteen-byte reads of the weight that a lane has under way at a time.
const READS: usize = 8;
/// Cubes that keep a large device busy.
const CUBES: usize = 512;
/// Blocks of 16 rows times groups that the planes' sums have room for in shared memory.
const MOST: usize = 8;
/// Rows of a block of the plain kernel.
const BLOCK: usize = 8;

type Pair = Vector<f32, Const<2>>;
type Half<F> = Vector<F, Const<2>>;
type Wide<F> = Vector<F, Const<8>>;

/// What follows the product.
pub(crate) struct Ending<R: CubeRuntime> {
    /// `[d_output]`.
    pub(crate) bias: Option<CubeTensor<R>>,
    /// A nonlinearity, which may gate: then the first half of the outputs is the gate, and there are half as many.
    pub(crate) activation: Option<Activation>,
    /// Added at the end, `[rows, outputs]`.
    pub(crate) residual: Option<CubeTensor<R>>,
    /// Dtype of the result.
    pub(crate) dtype: DType,
}

impl<R: CubeRuntime> Ending<R> {
    /// The product alone, in `dtype`.
    pub(crate) fn none(dtype: DType) -> Self {
        Self { bias: None, activation: None, residual: None, dtype }
    }
}

/// What a kernel is compiled for, beside its dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Parts {
    biased: bool,
    activation: Option<ActivationKind>,
    gated: bool,
    adds: bool,
    normed: Option<Normed>,
}

/// The norm before the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Normed {
    layer: bool,
    shifted: bool,
}

/// The sizes that may differ from launch to launch, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: u32,
    d_input: u32,
    outputs: u32,
    x_stride: u32,
    weight_stride: u32,
    residual_stride: u32,
    share: f32,
    epsilon: f32,
}

/// `x` times `weight^T`, and what follows: `x` `[rows, d_input]` of at most [`FEW_ROWS`] rows, `weight`
/// `[d_output, d_input]` of any float dtype.
pub(crate) fn project_few<R: CubeRuntime>(x: CubeTensor<R>, weight: CubeTensor<R>, ending: Ending<R>) -> CubeTensor<R> {
    if on_matrix_units(&x, &weight) {
        return by_matrix_units(x, None, weight, ending);
    }
    by_teams(rows(x), rows(weight), ending)
}

/// [`project_few`] of `x` normalised. Only for what [`on_matrix_units`] has: elsewhere, a norm for each output again
/// would cost more than a launch of its own.
pub(crate) fn norm_project_few<R: CubeRuntime>(
    x: CubeTensor<R>,
    norm: CubeNorm<R>,
    weight: CubeTensor<R>,
    ending: Ending<R>,
) -> CubeTensor<R> {
    by_matrix_units(x, Some(norm), weight, ending)
}

/// Whether the matrix kernel takes `x` and `weight`.
pub(crate) fn on_matrix_units<R: CubeRuntime>(x: &CubeTensor<R>, weight: &CubeTensor<R>) -> bool {
    let stride = |x: &CubeTensor<R>| if x.meta.shape()[0] == 1 { 8 } else { x.meta.strides()[0] };
    let (x_stride, weight_stride) = (stride(x), stride(weight));
    let dtype: StorageType = x.dtype.into();
    let half = matches!(dtype.elem_type(), ElemType::Float(FloatKind::F16 | FloatKind::BF16));
    let sums = ElemType::Float(FloatKind::F32).into();
    let product = MmaConfig { a_type: dtype, b_type: dtype, cd_type: sums, m: 16, n: 8, k: 16 };
    let hardware = &x.client.properties().hardware;
    let lengths = [x_stride, weight_stride, x.meta.shape()[1], 8];
    half && weight.dtype == x.dtype
        && x.meta.strides()[1] == 1
        && weight.meta.strides()[1] == 1
        && x.client.properties().features.matmul.mma.contains(&product)
        && hardware.plane_size_min == 32
        && hardware.plane_size_max == 32
        && vector_width(&[x, weight], &lengths) == 8
}

struct Bound<R: CubeRuntime> {
    parts: Parts,
    outputs: usize,
    bias: CubeTensor<R>,
    residual: CubeTensor<R>,
    residual_stride: usize,
    out: CubeTensor<R>,
}

/// The ending's tensors, those that are not there standing for each other.
fn bind<R: CubeRuntime>(x: &CubeTensor<R>, d_output: usize, ending: Ending<R>) -> Bound<R> {
    let n_rows = x.meta.shape()[0];
    let outputs = ending.activation.map_or(d_output, |activation| activation.output_width(d_output));
    let out = empty(x, [n_rows, outputs], ending.dtype);
    let parts = Parts {
        biased: ending.bias.is_some(),
        activation: ending.activation.map(|activation| activation.kind),
        gated: ending.activation.is_some_and(|activation| activation.gated),
        adds: ending.residual.is_some(),
        normed: None,
    };
    let bias = ending.bias.map_or_else(|| x.clone(), contiguous);
    let (residual, residual_stride) = ending.residual.map_or_else(|| (x.clone(), outputs), rows);
    Bound { parts, outputs, bias, residual, residual_stride, out }
}

fn by_matrix_units<R: CubeRuntime>(
    x: CubeTensor<R>,
    norm: Option<CubeNorm<R>>,
    weight: CubeTensor<R>,
    ending: Ending<R>,
) -> CubeTensor<R> {
    let ((x, x_stride), (weight, weight_stride)) = (rows(x), rows(weight));
    let [n_rows, d_input] = [x.meta.shape()[0], x.meta.shape()[1]];
    let Bound { mut parts, outputs, bias, residual, residual_stride, out } = bind(&x, weight.meta.shape()[0], ending);
    let mut epsilon = 0.0;
    let (mut gamma, mut beta) = (x.clone(), x.clone());
    if let Some(norm) = norm {
        parts.normed = Some(Normed { layer: norm.layer, shifted: norm.beta.is_some() });
        epsilon = norm.epsilon;
        gamma = contiguous(norm.gamma);
        beta = norm.beta.map_or_else(|| gamma.clone(), contiguous);
    }
    // As many outputs a cube as leave enough cubes: each cube reads all of `x`.
    let bands = n_rows.div_ceil(16);
    let mut groups = 1;
    while 2 * groups * bands * (1 + usize::from(parts.gated)) <= MOST && outputs.div_ceil(2 * groups * GROUP) >= CUBES {
        groups *= 2;
    }
    // SAFETY: reads are guarded by rows, outputs and columns, writes by rows and outputs; `gamma` and `beta` have a
    // column for each of `x`.
    unsafe {
        matrix_kernel::launch_unchecked(
            &x.client,
            grid(outputs.div_ceil(groups * GROUP)),
            CubeDim::new_1d(32 * PLANES as u32),
            array(&x),
            array(&gamma),
            array(&beta),
            array(&weight),
            array(&bias),
            array(&residual),
            array(&out),
            SizesLaunch::new(
                n_rows as u32,
                d_input as u32,
                outputs as u32,
                x_stride as u32,
                weight_stride as u32,
                residual_stride as u32,
                1.0 / d_input as f32,
                epsilon as f32,
            ),
            groups,
            bands,
            parts,
            x.dtype.into(),
            gamma.dtype.into(),
            beta.dtype.into(),
            bias.dtype.into(),
            residual.dtype.into(),
            out.dtype.into(),
        );
    }
    out
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn matrix_kernel<F: Float, G: Float, H: Float, V: Float, S: Float, O: Float>(
    x: &Array<Wide<F>>,
    gamma: &Array<Wide<G>>,
    beta: &Array<Wide<H>>,
    weight: &Array<Wide<F>>,
    bias: &Array<V>,
    residual: &Array<S>,
    out: &mut Array<O>,
    sizes: &Sizes,
    #[comptime] groups: usize,
    #[comptime] bands: usize,
    #[comptime] parts: Parts,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gamma_dtype: StorageType,
    #[define(H)] _beta_dtype: StorageType,
    #[define(V)] _bias_dtype: StorageType,
    #[define(S)] _residual_dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    // Groups of weights: with a gate, its own and those of the other half.
    let sides = comptime!(groups * (1 + parts.gated as usize));
    let wanted = comptime!((groups * GROUP) as u32);
    let ahead = comptime!((READS / sides).max(1));
    let first = CUBE_POS as u32 * wanted;
    if first >= sizes.outputs {
        terminate!();
    }
    let plane = UNIT_POS / 32;
    let lane = UNIT_POS % 32;
    let lane_row = lane / 4;
    let lane_column = lane % 4;

    // Mean and inverse deviation of every row.
    let mut statistics = SharedMemory::<Pair>::new(comptime!(16 * bands));
    if let Some(normed) = comptime!(parts.normed) {
        row_statistics::<F>(x, &mut statistics, plane, lane, sizes, comptime!(16 * bands), normed);
        sync_cube();
    }

    let vectors = sizes.d_input / 8;
    let x_stride = sizes.x_stride / 8;
    let weight_stride = sizes.weight_stride / 8;
    let chunks = sizes.d_input.div_ceil(comptime!(CHUNK as u32));
    let product = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut sums = Array::<Pair>::new(comptime!(2 * bands * sides));
    #[unroll]
    for i in 0..comptime!(2 * bands * sides) {
        sums[i] = Pair::new(0.0);
    }
    let mut read = Array::<Wide<F>>::new(comptime!(ahead * sides));
    let stride = comptime!((PLANES * ahead) as u32);
    for step in 0..chunks.div_ceil(stride) {
        let chunk = step * stride + plane;
        #[unroll]
        for i in 0..ahead {
            let column = (chunk + comptime!((i * PLANES) as u32)) * 4 + lane_column;
            #[unroll]
            for side in 0..sides {
                let group = comptime!((side % groups * GROUP) as u32);
                let mut output = first + group + lane_row;
                let there = output < sizes.outputs && column < vectors;
                if comptime!(side >= groups) {
                    output += sizes.outputs;
                }
                read[comptime!(i * sides + side)] = Wide::<F>::cast_from(0.0f32);
                if there {
                    read[comptime!(i * sides + side)] = weight[(output * weight_stride + column) as usize];
                }
            }
        }
        #[unroll]
        for i in 0..ahead {
            let column = (chunk + comptime!((i * PLANES) as u32)) * 4 + lane_column;
            #[unroll]
            for band in 0..bands {
                let row = comptime!((16 * band) as u32) + lane_row;
                let upper = input::<F, G, H>(x, gamma, beta, &statistics, row, column, vectors, x_stride, sizes, parts);
                let mut lower = Wide::<F>::cast_from(0.0f32);
                if sizes.rows > comptime!((16 * band + 8) as u32) {
                    lower =
                        input::<F, G, H>(x, gamma, beta, &statistics, row + 8, column, vectors, x_stride, sizes, parts);
                }
                #[unroll]
                for half in 0..2usize {
                    let mut left = Array::<Half<F>>::new(4usize);
                    left[0usize] = pair_of::<F>(upper, comptime!(4 * half));
                    left[1usize] = pair_of::<F>(lower, comptime!(4 * half));
                    left[2usize] = pair_of::<F>(upper, comptime!(4 * half + 2));
                    left[3usize] = pair_of::<F>(lower, comptime!(4 * half + 2));
                    #[unroll]
                    for side in 0..sides {
                        let weights = read[comptime!(i * sides + side)];
                        let mut right = Array::<Half<F>>::new(2usize);
                        right[0usize] = pair_of::<F>(weights, comptime!(4 * half));
                        right[1usize] = pair_of::<F>(weights, comptime!(4 * half + 2));
                        let at = comptime!(2 * (band * sides + side));
                        let mut sum = Array::<Pair>::new(2usize);
                        sum[0usize] = sums[at];
                        sum[1usize] = sums[comptime!(at + 1)];
                        product.execute_inplace(&left, &right, &mut sum);
                        sums[at] = sum[0usize];
                        sums[comptime!(at + 1)] = sum[1usize];
                    }
                }
            }
        }
    }

    // The planes' sums, side by side: `[plane, row, side, 4 pairs]`.
    let width = comptime!((sides * GROUP / 2) as u32);
    let tile = comptime!((16 * bands * sides * GROUP / 2) as u32);
    let mut shared = SharedMemory::<Pair>::new(comptime!(PLANES * 16 * bands * sides * GROUP / 2));
    #[unroll]
    for band in 0..bands {
        #[unroll]
        for side in 0..sides {
            #[unroll]
            for below in 0..2usize {
                let row = comptime!((16 * band + 8 * below) as u32) + lane_row;
                let place = plane * tile + row * width + comptime!((side * GROUP / 2) as u32) + lane_column;
                shared[place as usize] = sums[comptime!(2 * (band * sides + side) + below)];
            }
        }
    }
    sync_cube();
    let pairs = comptime!((groups * GROUP / 2) as u32);
    let mut at = UNIT_POS;
    while at < sizes.rows * pairs {
        let row = at / pairs;
        let pair = at % pairs;
        let place = row * width + pair;
        let gate = planes_sum(&shared, place, tile);
        let mut other = Pair::new(0.0);
        if comptime!(parts.gated) {
            other = planes_sum(&shared, place + pairs, tile);
        }
        #[unroll]
        for i in 0..2usize {
            let output = first + 2 * pair + i as u32;
            if output < sizes.outputs {
                let value = finished::<V, S>(gate[i], other[i], row, output, bias, residual, sizes, parts);
                out[(row * sizes.outputs + output) as usize] = O::cast_from(value);
            }
        }
        at += comptime!((32 * PLANES) as u32);
    }
}

#[cube]
fn planes_sum(shared: &SharedMemory<Pair>, place: u32, tile: u32) -> Pair {
    let mut sum = shared[place as usize];
    #[unroll]
    for plane in 1..PLANES {
        sum += shared[(place + plane as u32 * tile) as usize];
    }
    sum
}

/// Bias, activation and residual.
#[cube]
#[allow(clippy::too_many_arguments)]
fn finished<V: Float, S: Float>(
    gate: f32,
    other: f32,
    row: u32,
    output: u32,
    bias: &Array<V>,
    residual: &Array<S>,
    sizes: &Sizes,
    #[comptime] parts: Parts,
) -> f32 {
    let mut gate = gate;
    let mut other = other;
    if comptime!(parts.biased) {
        gate += f32::cast_from(bias[output as usize]);
        if comptime!(parts.gated) {
            other += f32::cast_from(bias[(output + sizes.outputs) as usize]);
        }
    }
    if let Some(kind) = comptime!(parts.activation) {
        gate = value::<Const<1>>(Vector::<f32, Const<1>>::new(gate), kind)[0usize];
        if comptime!(parts.gated) {
            gate *= other;
        }
    }
    if comptime!(parts.adds) {
        gate += f32::cast_from(residual[(row * sizes.residual_stride + output) as usize]);
    }
    gate
}

/// Two neighbouring elements of eight.
#[cube]
fn pair_of<F: Float>(wide: Wide<F>, #[comptime] at: usize) -> Half<F> {
    let mut pair = Half::<F>::cast_from(0.0f32);
    pair[0usize] = wide[at];
    pair[1usize] = wide[comptime!(at + 1)];
    pair
}

/// Eight elements of a row of `x`, normalised; zeros beyond its rows and columns.
#[cube]
#[allow(clippy::too_many_arguments)]
fn input<F: Float, G: Float, H: Float>(
    x: &Array<Wide<F>>,
    gamma: &Array<Wide<G>>,
    beta: &Array<Wide<H>>,
    statistics: &SharedMemory<Pair>,
    row: u32,
    column: u32,
    vectors: u32,
    x_stride: u32,
    sizes: &Sizes,
    #[comptime] parts: Parts,
) -> Wide<F> {
    let mut value = Wide::<F>::cast_from(0.0f32);
    if row < sizes.rows && column < vectors {
        value = x[(row * x_stride + column) as usize];
        if let Some(normed) = comptime!(parts.normed) {
            let row = statistics[row as usize];
            let mut wide = Wide::<f32>::cast_from(value);
            if comptime!(normed.layer) {
                wide -= Wide::<f32>::new(row[0usize]);
            }
            wide = wide * Wide::<f32>::new(row[1usize]) * Wide::<f32>::cast_from(gamma[column as usize]);
            if comptime!(normed.shifted) {
                wide += Wide::<f32>::cast_from(beta[column as usize]);
            }
            value = Wide::<F>::cast_from(wide);
        }
    }
    value
}

/// Mean and inverse deviation of the rows, a plane for each of them in turn.
#[cube]
fn row_statistics<F: Float>(
    x: &Array<Wide<F>>,
    statistics: &mut SharedMemory<Pair>,
    plane: u32,
    lane: u32,
    sizes: &Sizes,
    #[comptime] most: usize,
    #[comptime] normed: Normed,
) {
    let vectors = sizes.d_input / 8;
    #[unroll]
    for turn in 0..comptime!(most / PLANES) {
        let row = comptime!((turn * PLANES) as u32) + plane;
        if row < sizes.rows {
            let start = row * (sizes.x_stride / 8);
            let mut centre = 0.0f32;
            if comptime!(normed.layer) {
                let mut sum = Wide::<f32>::new(0.0);
                for column in range_stepped(lane, vectors, 32u32) {
                    sum += Wide::<f32>::cast_from(x[(start + column) as usize]);
                }
                centre = plane_sum(lanes_sum::<Const<8>>(sum)) * sizes.share;
            }
            let mut squares = Wide::<f32>::new(0.0);
            for column in range_stepped(lane, vectors, 32u32) {
                let value = Wide::<f32>::cast_from(x[(start + column) as usize]) - Wide::<f32>::new(centre);
                squares += value * value;
            }
            let variance = plane_sum(lanes_sum::<Const<8>>(squares)) * sizes.share;
            let mut pair = Pair::new(centre);
            pair[1usize] = 1.0f32 / (variance + sizes.epsilon).sqrt();
            if lane == 0 {
                statistics[row as usize] = pair;
            }
        }
    }
}

fn by_teams<R: CubeRuntime>(
    (x, x_stride): (CubeTensor<R>, usize),
    (weight, weight_stride): (CubeTensor<R>, usize),
    ending: Ending<R>,
) -> CubeTensor<R> {
    let [n_rows, d_input] = [x.meta.shape()[0], x.meta.shape()[1]];
    let Bound { parts, outputs, bias, residual, residual_stride, out } = bind(&x, weight.meta.shape()[0], ending);
    let vector = vector_width(&[&x, &weight], &[d_input, x_stride, weight_stride]);
    let vectors = d_input / vector;
    let team = Team::new(&x.client, vectors, usize::MAX, 32);
    let block = n_rows.next_power_of_two().min(BLOCK);
    // SAFETY: a team reads its own rows of the weight and a block's of `x`, below `outputs` and `n_rows`, and writes
    // what no other does.
    unsafe {
        teams_kernel::launch_unchecked(
            &x.client,
            grid(outputs.div_ceil(team.rows as usize) * n_rows.div_ceil(block)),
            team.cube_dim(),
            vector,
            array(&x),
            array(&weight),
            array(&bias),
            array(&residual),
            array(&out),
            SizesLaunch::new(
                n_rows as u32,
                vectors as u32,
                outputs as u32,
                (x_stride / vector) as u32,
                (weight_stride / vector) as u32,
                residual_stride as u32,
                0.0,
                0.0,
            ),
            block,
            team,
            parts,
            x.dtype.into(),
            weight.dtype.into(),
            bias.dtype.into(),
            residual.dtype.into(),
            out.dtype.into(),
        );
    }
    out
}

/// Here `d_input` and the strides count vectors.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn teams_kernel<F: Float, W: Numeric, V: Float, S: Float, O: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    weight: &Array<Vector<W, N>>,
    bias: &Array<V>,
    residual: &Array<S>,
    out: &mut Array<O>,
    sizes: &Sizes,
    #[comptime] block: usize,
    #[comptime] team: Team,
    #[comptime] parts: Parts,
    #[define(F)] _dtype: StorageType,
    #[define(W)] _weight_dtype: StorageType,
    #[define(V)] _bias_dtype: StorageType,
    #[define(S)] _residual_dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let cubes = sizes.outputs.div_ceil(team.rows);
    let first = CUBE_POS as u32 / cubes * comptime!(block as u32);
    if first >= sizes.rows {
        terminate!();
    }
    let own = CUBE_POS as u32 % cubes * team.rows + UNIT_POS_Y;
    // Teams beyond the end do the last output again without writing it: all units of a cube exchange values together.
    let output = min(own, sizes.outputs - 1);
    let sides = comptime!(1 + parts.gated as usize);
    let mut sums = Array::<Vector<f32, N>>::new(comptime!(sides * block));
    #[unroll]
    for i in 0..comptime!(sides * block) {
        sums[i] = Vector::new(0.0);
    }
    let other = (output + sizes.outputs) * sizes.weight_stride;
    for column in range_stepped(UNIT_POS_X, sizes.d_input, team.units) {
        let weights = Vector::<f32, N>::cast_from(weight[(output * sizes.weight_stride + column) as usize]);
        let mut others = Vector::<f32, N>::new(0.0);
        if comptime!(parts.gated) {
            others = Vector::<f32, N>::cast_from(weight[(other + column) as usize]);
        }
        #[unroll]
        for i in 0..block {
            let row = min(first + comptime!(i as u32), sizes.rows - 1);
            let value = Vector::<f32, N>::cast_from(x[(row * sizes.x_stride + column) as usize]);
            sums[i] += value * weights;
            if comptime!(parts.gated) {
                sums[comptime!(block + i)] += value * others;
            }
        }
    }
    #[unroll]
    for i in 0..block {
        let gate = team_sum(lanes_sum::<N>(sums[i]), team);
        let mut other = 0.0f32;
        if comptime!(parts.gated) {
            other = team_sum(lanes_sum::<N>(sums[comptime!(block + i)]), team);
        }
        let row = first + comptime!(i as u32);
        if UNIT_POS_X == 0 && row < sizes.rows && own < sizes.outputs {
            let value = finished::<V, S>(gate, other, row, output, bias, residual, sizes, parts);
            out[(row * sizes.outputs + output) as usize] = O::cast_from(value);
        }
    }
}
