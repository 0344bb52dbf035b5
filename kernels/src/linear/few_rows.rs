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
use crate::weight::PACKED;
use crate::weight::cube::{CubeInt8, bytes};
use crate::{Activation, ActivationKind};

/// More rows than this are a product like any other.
pub(crate) const FEW_ROWS: usize = 32;

/// Planes of a cube of the matrix kernel where there are many cubes, and where there are few.
const PLANES: usize = 8;
const MORE_PLANES: usize = 16;
/// Cubes that are few.
const FEW_CUBES: usize = 256;
/// Outputs of a group: columns of `mma`'s result.
const GROUP: usize = 8;
/// Columns of the inner dimension that a plane works on at a time, eight for each of a lane's four neighbours.
const CHUNK: usize = 32;
/// Sixteen-byte reads of the weight that a lane has under way at a time.
const READS: usize = 8;
/// Columns of `x` that a lane reads at a time for the statistics of a row, in vectors.
const TOGETHER: usize = 4;
/// Cubes that keep a large device busy; with more rows than eight fewer, since each of them reads all rows.
const CUBES: usize = 256;
const TALL_CUBES: usize = 128;
/// Blocks of 16 rows times groups that the planes' sums have room for in shared memory.
const MOST: usize = 8;
/// Rows of a block of the plain kernel.
const BLOCK: usize = 8;

/// A weight that is read once.
#[expect(clippy::large_enum_variant, reason = "made and taken apart within one call")]
pub(crate) enum CubeWeight<R: CubeRuntime> {
    /// Floats, `[d_output, d_input]`.
    Float(CubeTensor<R>),
    /// Bytes.
    Int8(CubeInt8<R>),
}

/// A weight's words as a kernel takes them: floats, or bytes, with what stands for the other.
struct Stored<R: CubeRuntime> {
    floats: CubeTensor<R>,
    packed: CubeTensor<R>,
    scales: CubeTensor<R>,
    /// Elements from one row to the next.
    stride: usize,
    d_output: usize,
    int8: bool,
}

impl<R: CubeRuntime> CubeWeight<R> {
    /// `x` is a tensor of the dtype that stands for floats.
    fn stored(self, x: &CubeTensor<R>) -> Stored<R> {
        match self {
            Self::Float(weight) => {
                let d_output = weight.meta.shape()[0];
                let (floats, stride) = rows(weight);
                let (packed, scales) = (floats.clone(), floats.clone());
                Stored { floats, packed, scales, stride, d_output, int8: false }
            }
            Self::Int8(CubeInt8 { packed, scales }) => {
                let [d_output, words] = [packed.meta.shape()[0], packed.meta.shape()[1]];
                let (packed, scales) = (contiguous(packed), contiguous(scales));
                Stored { floats: x.clone(), packed, scales, stride: words * PACKED, d_output, int8: true }
            }
        }
    }
}

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
    int8: bool,
}

/// The shape of a cube of the matrix kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    planes: usize,
    /// Groups of outputs.
    groups: usize,
    /// Blocks of eight rows, two of which are one side of `mma`.
    blocks: usize,
    /// Groups of weights: with a gate, its own and those of the other half.
    sides: usize,
    /// Chunks that are read together.
    ahead: usize,
}

impl Shape {
    const fn bands(&self) -> usize {
        self.blocks.div_ceil(2)
    }
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
/// `[d_output, d_input]` of any float dtype, or bytes.
pub(crate) fn project_few<R: CubeRuntime>(x: CubeTensor<R>, weight: CubeWeight<R>, ending: Ending<R>) -> CubeTensor<R> {
    if on_matrix_units(&x, &weight) {
        return by_matrix_units(x, None, weight, ending);
    }
    by_teams(rows(x), weight, ending)
}

/// [`project_few`] of `x` normalised. Only for what [`on_matrix_units`] has: elsewhere, a norm for each output again
/// would cost more than a launch of its own.
pub(crate) fn norm_project_few<R: CubeRuntime>(
    x: CubeTensor<R>,
    norm: CubeNorm<R>,
    weight: CubeWeight<R>,
    ending: Ending<R>,
) -> CubeTensor<R> {
    by_matrix_units(x, Some(norm), weight, ending)
}

/// Whether the matrix kernel takes `x` and `weight`.
pub(crate) fn on_matrix_units<R: CubeRuntime>(x: &CubeTensor<R>, weight: &CubeWeight<R>) -> bool {
    let stride = |x: &CubeTensor<R>| if x.meta.shape()[0] == 1 { 8 } else { x.meta.strides()[0] };
    let dtype: StorageType = x.dtype.into();
    let half = matches!(dtype.elem_type(), ElemType::Float(FloatKind::F16 | FloatKind::BF16));
    let sums = ElemType::Float(FloatKind::F32).into();
    let product = MmaConfig { a_type: dtype, b_type: dtype, cd_type: sums, m: 16, n: 8, k: 16 };
    let hardware = &x.client.properties().hardware;
    let d_input = x.meta.shape()[1];
    let fits = match weight {
        CubeWeight::Float(weight) => {
            let lengths = [stride(x), stride(weight), d_input, 8];
            weight.dtype == x.dtype && weight.meta.strides()[1] == 1 && vector_width(&[x, weight], &lengths) == 8
        }
        // A word of bytes is as wide as two elements.
        CubeWeight::Int8(weight) => {
            let whole = |x: &CubeTensor<R>| x.handle.offset_start.unwrap_or(0).is_multiple_of(16);
            vector_width(&[x], &[stride(x), d_input, 8]) == 8 && whole(&weight.packed)
        }
    };
    half && fits
        && x.meta.strides()[1] == 1
        && x.client.properties().features.matmul.mma.contains(&product)
        && hardware.plane_size_min == 32
        && hardware.plane_size_max == 32
}

struct Bound<R: CubeRuntime> {
    parts: Parts,
    outputs: usize,
    bias: CubeTensor<R>,
    residual: CubeTensor<R>,
    residual_stride: usize,
    out: CubeTensor<R>,
    /// Whether the result takes the residual's place.
    in_place: bool,
}

impl<R: CubeRuntime> Bound<R> {
    /// The result as an argument, behind `residual_at` others in front of the residual.
    fn out_array(&self, residual_at: usize) -> ArrayArg<R> {
        match self.in_place {
            true => ArrayArg::Alias { input_pos: residual_at, length: [self.out.meta.num_elements()] },
            false => array(&self.out),
        }
    }
}

/// The ending's tensors, those that are not there standing for each other.
fn bind<R: CubeRuntime>(x: &CubeTensor<R>, weight: &Stored<R>, ending: Ending<R>) -> Bound<R> {
    let Stored { d_output, int8, .. } = *weight;
    let n_rows = x.meta.shape()[0];
    let outputs = ending.activation.map_or(d_output, |activation| activation.output_width(d_output));
    // What nobody else holds is written where it lies: each element is read by the unit that writes it.
    let free = |residual: &&CubeTensor<R>| {
        residual.can_mut()
            && residual.dtype == ending.dtype
            && residual.is_contiguous()
            && residual.meta.shape()[1] == outputs
    };
    let free = ending.residual.as_ref().filter(free).cloned();
    let in_place = free.is_some();
    let out = free.unwrap_or_else(|| empty(x, [n_rows, outputs], ending.dtype));
    let parts = Parts {
        biased: ending.bias.is_some(),
        activation: ending.activation.map(|activation| activation.kind),
        gated: ending.activation.is_some_and(|activation| activation.gated),
        adds: ending.residual.is_some(),
        normed: None,
        int8,
    };
    let bias = ending.bias.map_or_else(|| x.clone(), contiguous);
    let (residual, residual_stride) = ending.residual.map_or_else(|| (x.clone(), outputs), rows);
    Bound { parts, outputs, bias, residual, residual_stride, out, in_place }
}

fn by_matrix_units<R: CubeRuntime>(
    x: CubeTensor<R>,
    norm: Option<CubeNorm<R>>,
    weight: CubeWeight<R>,
    ending: Ending<R>,
) -> CubeTensor<R> {
    let (x, x_stride) = rows(x);
    let weight = weight.stored(&x);
    let [n_rows, d_input] = [x.meta.shape()[0], x.meta.shape()[1]];
    let bound = bind(&x, &weight, ending);
    let (mut parts, outputs) = (bound.parts, bound.outputs);
    let mut epsilon = 0.0;
    let (mut gamma, mut beta) = (x.clone(), x.clone());
    if let Some(norm) = norm {
        parts.normed = Some(Normed { layer: norm.layer, shifted: norm.beta.is_some() });
        epsilon = norm.epsilon;
        gamma = contiguous(norm.gamma);
        beta = norm.beta.map_or_else(|| gamma.clone(), contiguous);
    }
    // As many outputs a cube as leave enough cubes: each cube reads all of `x`.
    let blocks = n_rows.div_ceil(8);
    let gates = 1 + usize::from(parts.gated);
    let enough = if blocks > 1 { TALL_CUBES } else { CUBES };
    let mut groups = 1;
    while groups < 4
        && 2 * groups * blocks.div_ceil(2) * gates <= MOST
        && outputs.div_ceil(2 * groups * GROUP) >= enough
    {
        groups *= 2;
    }
    let cubes = outputs.div_ceil(groups * GROUP);
    let planes = if cubes <= FEW_CUBES { MORE_PLANES } else { PLANES };
    let sides = groups * gates;
    // No more chunks than there are for a plane, and no more registers than there are for a lane.
    let chunks = d_input.div_ceil(CHUNK * planes);
    let ahead = (READS / sides).min(2 * READS / blocks).min(chunks.next_power_of_two()).max(1);
    let shape = Shape { planes, groups, blocks, sides, ahead };
    // SAFETY: reads are guarded by rows, outputs and columns, writes by rows and outputs; `gamma` and `beta` have a
    // column for each of `x`.
    unsafe {
        matrix_kernel::launch_unchecked(
            &x.client,
            grid(cubes),
            CubeDim::new_1d(32 * planes as u32),
            array(&x),
            array(&gamma),
            array(&beta),
            array(&weight.floats),
            array(&weight.packed),
            array(&weight.scales),
            array(&bound.bias),
            array(&bound.residual),
            bound.out_array(7),
            SizesLaunch::new(
                n_rows as u32,
                d_input as u32,
                outputs as u32,
                x_stride as u32,
                weight.stride as u32,
                bound.residual_stride as u32,
                1.0 / d_input as f32,
                epsilon as f32,
            ),
            shape,
            parts,
            x.dtype.into(),
            gamma.dtype.into(),
            beta.dtype.into(),
            bound.bias.dtype.into(),
            bound.residual.dtype.into(),
            bound.out.dtype.into(),
        );
    }
    bound.out
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn matrix_kernel<F: Float, G: Float, H: Float, V: Float, S: Float, O: Float>(
    x: &Array<Wide<F>>,
    gamma: &Array<Wide<G>>,
    beta: &Array<Wide<H>>,
    weight: &Array<Wide<F>>,
    packed: &Array<Vector<u32, Const<2>>>,
    scales: &Array<f32>,
    bias: &Array<V>,
    residual: &Array<S>,
    out: &mut Array<O>,
    sizes: &Sizes,
    #[comptime] shape: Shape,
    #[comptime] parts: Parts,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gamma_dtype: StorageType,
    #[define(H)] _beta_dtype: StorageType,
    #[define(V)] _bias_dtype: StorageType,
    #[define(S)] _residual_dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let sides = comptime!(shape.sides);
    let bands = comptime!(shape.bands());
    let blocks = comptime!(shape.blocks);
    let ahead = comptime!(shape.ahead);
    let first = CUBE_POS as u32 * comptime!((shape.groups * GROUP) as u32);
    if first >= sizes.outputs {
        terminate!();
    }
    let plane = UNIT_POS / 32;
    let lane = UNIT_POS % 32;
    let lane_row = lane / 4;
    let lane_column = lane % 4;
    let vectors = sizes.d_input / 8;
    let stride = comptime!((shape.planes * ahead) as u32);
    let steps = sizes.d_input.div_ceil(comptime!(CHUNK as u32)).div_ceil(stride);

    // What is read first is under way while the statistics are made.
    let mut weights = Array::<Wide<F>>::new(comptime!(ahead * sides));
    let mut inputs = Array::<Wide<F>>::new(comptime!(ahead * blocks));
    fetch::<F>(
        x,
        weight,
        packed,
        &mut weights,
        &mut inputs,
        first,
        plane * 4 + lane_column,
        lane_row,
        sizes,
        shape,
        parts,
    );

    // Mean and inverse deviation of every row.
    let mut statistics = SharedMemory::<Pair>::new(comptime!(16 * bands));
    if let Some(normed) = comptime!(parts.normed) {
        row_statistics::<F>(x, &mut statistics, plane, lane, sizes, shape, normed);
        sync_cube();
    }

    let product = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut sums = Array::<Pair>::new(comptime!(2 * bands * sides));
    #[unroll]
    for i in 0..comptime!(2 * bands * sides) {
        sums[i] = Pair::new(0.0);
    }
    for step in 0..steps {
        let column = (step * stride + plane) * 4 + lane_column;
        if step > 0 {
            fetch::<F>(x, weight, packed, &mut weights, &mut inputs, first, column, lane_row, sizes, shape, parts);
        }
        #[unroll]
        for i in 0..ahead {
            let column = column + comptime!((i * shape.planes * 4) as u32);
            #[unroll]
            for band in 0..bands {
                let row = comptime!((16 * band) as u32) + lane_row;
                let upper = inputs[comptime!(i * blocks + 2 * band)];
                let upper =
                    normalised::<F, G, H>(upper, gamma, beta, &statistics, row, column, vectors, sizes.rows, parts);
                let mut lower = Wide::<F>::cast_from(0.0f32);
                if comptime!(2 * band + 1 < blocks) {
                    lower = normalised::<F, G, H>(
                        inputs[comptime!(i * blocks + (2 * band + 1).min(blocks - 1))],
                        gamma,
                        beta,
                        &statistics,
                        row + 8,
                        column,
                        vectors,
                        sizes.rows,
                        parts,
                    );
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
                        let eight = weights[comptime!(i * sides + side)];
                        let mut right = Array::<Half<F>>::new(2usize);
                        right[0usize] = pair_of::<F>(eight, comptime!(4 * half));
                        right[1usize] = pair_of::<F>(eight, comptime!(4 * half + 2));
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

    // The planes' sums, side by side: `[plane, row, side, 4 pairs]`. They may lie where the statistics did.
    sync_cube();
    let width = comptime!((sides * GROUP / 2) as u32);
    let tile = comptime!((16 * bands * sides * GROUP / 2) as u32);
    let mut shared = SharedMemory::<Pair>::new(comptime!(shape.planes * 16 * bands * sides * GROUP / 2));
    #[unroll]
    for block in 0..blocks {
        #[unroll]
        for side in 0..sides {
            let row = comptime!((8 * block) as u32) + lane_row;
            let place = plane * tile + row * width + comptime!((side * GROUP / 2) as u32) + lane_column;
            shared[place as usize] = sums[comptime!(2 * (block / 2 * sides + side) + block % 2)];
        }
    }
    sync_cube();
    let pairs = comptime!((shape.groups * GROUP / 2) as u32);
    let mut at = UNIT_POS;
    while at < sizes.rows * pairs {
        let row = at / pairs;
        let pair = at % pairs;
        let place = row * width + pair;
        let gate = planes_sum(&shared, place, tile, comptime!(shape.planes));
        let mut other = Pair::new(0.0);
        if comptime!(parts.gated) {
            other = planes_sum(&shared, place + pairs, tile, comptime!(shape.planes));
        }
        #[unroll]
        for i in 0..2usize {
            let output = first + 2 * pair + i as u32;
            if output < sizes.outputs {
                let value = finished::<V, S>(gate[i], other[i], row, output, scales, bias, residual, sizes, parts);
                out[(row * sizes.outputs + output) as usize] = O::cast_from(value);
            }
        }
        at += comptime!((32 * shape.planes) as u32);
    }
}

/// Reads a lane's share of the weight and of `x` for some chunks, the first of which has its columns from `column` on;
/// zeros beyond the rows, outputs and columns that there are.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fetch<F: Float>(
    x: &Array<Wide<F>>,
    weight: &Array<Wide<F>>,
    packed: &Array<Vector<u32, Const<2>>>,
    weights: &mut Array<Wide<F>>,
    inputs: &mut Array<Wide<F>>,
    first: u32,
    column: u32,
    lane_row: u32,
    sizes: &Sizes,
    #[comptime] shape: Shape,
    #[comptime] parts: Parts,
) {
    let vectors = sizes.d_input / 8;
    let x_stride = sizes.x_stride / 8;
    let weight_stride = sizes.weight_stride / 8;
    #[unroll]
    for i in 0..comptime!(shape.ahead) {
        let column = column + comptime!((i * shape.planes * 4) as u32);
        #[unroll]
        for side in 0..comptime!(shape.sides) {
            let mut output = first + comptime!((side % shape.groups * GROUP) as u32) + lane_row;
            let there = output < sizes.outputs && column < vectors;
            if comptime!(side >= shape.groups) {
                output += sizes.outputs;
            }
            let mut value = Wide::<F>::cast_from(0.0f32);
            if there {
                let at = (output * weight_stride + column) as usize;
                if comptime!(parts.int8) {
                    value = eight::<F>(packed[at]);
                } else {
                    value = weight[at];
                }
            }
            weights[comptime!(i * shape.sides + side)] = value;
        }
        #[unroll]
        for block in 0..comptime!(shape.blocks) {
            let row = comptime!((8 * block) as u32) + lane_row;
            let mut value = Wide::<F>::cast_from(0.0f32);
            if row < sizes.rows && column < vectors {
                value = x[(row * x_stride + column) as usize];
            }
            inputs[comptime!(i * shape.blocks + block)] = value;
        }
    }
}

#[cube]
fn planes_sum(shared: &SharedMemory<Pair>, place: u32, tile: u32, #[comptime] planes: usize) -> Pair {
    let mut sum = shared[place as usize];
    #[unroll]
    for plane in 1..planes {
        sum += shared[(place + plane as u32 * tile) as usize];
    }
    sum
}

/// Eight signed bytes.
#[cube]
fn eight<F: Float>(words: Vector<u32, Const<2>>) -> Wide<F> {
    let mut wide = Wide::<f32>::new(0.0);
    #[unroll]
    for i in 0..2usize {
        let four = bytes(words[i]);
        #[unroll]
        for j in 0..4usize {
            wide[comptime!(4 * i + j)] = four[j];
        }
    }
    Wide::<F>::cast_from(wide)
}

/// Scale, bias, activation and residual.
#[cube]
#[allow(clippy::too_many_arguments)]
fn finished<V: Float, S: Float>(
    gate: f32,
    other: f32,
    row: u32,
    output: u32,
    scales: &Array<f32>,
    bias: &Array<V>,
    residual: &Array<S>,
    sizes: &Sizes,
    #[comptime] parts: Parts,
) -> f32 {
    let mut gate = gate;
    let mut other = other;
    if comptime!(parts.int8) {
        gate *= scales[output as usize];
        if comptime!(parts.gated) {
            other *= scales[(output + sizes.outputs) as usize];
        }
    }
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

/// Eight elements of a row of `x`, normalised where there is a norm; zeros beyond its rows and columns.
#[cube]
#[allow(clippy::too_many_arguments)]
fn normalised<F: Float, G: Float, H: Float>(
    value: Wide<F>,
    gamma: &Array<Wide<G>>,
    beta: &Array<Wide<H>>,
    statistics: &SharedMemory<Pair>,
    row: u32,
    column: u32,
    vectors: u32,
    rows: u32,
    #[comptime] parts: Parts,
) -> Wide<F> {
    if let Some(normed) = comptime!(parts.normed) {
        let mut output = Wide::<F>::cast_from(0.0f32);
        if row < rows && column < vectors {
            let row = statistics[row as usize];
            let mut wide = Wide::<f32>::cast_from(value);
            if comptime!(normed.layer) {
                wide -= Wide::<f32>::new(row[0usize]);
            }
            wide = wide * Wide::<f32>::new(row[1usize]) * Wide::<f32>::cast_from(gamma[column as usize]);
            if comptime!(normed.shifted) {
                wide += Wide::<f32>::cast_from(beta[column as usize]);
            }
            output = Wide::<F>::cast_from(wide);
        }
        output
    } else {
        value
    }
}

/// Mean and inverse deviation of the rows, a plane for each of them in turn.
#[cube]
fn row_statistics<F: Float>(
    x: &Array<Wide<F>>,
    statistics: &mut SharedMemory<Pair>,
    plane: u32,
    lane: u32,
    sizes: &Sizes,
    #[comptime] shape: Shape,
    #[comptime] normed: Normed,
) {
    #[unroll]
    for turn in 0..comptime!((8 * shape.blocks).div_ceil(shape.planes)) {
        let row = comptime!((turn * shape.planes) as u32) + plane;
        if row < sizes.rows {
            let mut centre = 0.0f32;
            if comptime!(normed.layer) {
                centre = row_sum::<F>(x, row, lane, 0.0f32, sizes, false) * sizes.share;
            }
            let variance = row_sum::<F>(x, row, lane, centre, sizes, true) * sizes.share;
            let mut pair = Pair::new(centre);
            pair[1usize] = 1.0f32 / (variance + sizes.epsilon).sqrt();
            if lane == 0 {
                statistics[row as usize] = pair;
            }
        }
    }
}

/// The sum of a row's elements, or of their squares, less `centre` each.
#[cube]
fn row_sum<F: Float>(
    x: &Array<Wide<F>>,
    row: u32,
    lane: u32,
    centre: f32,
    sizes: &Sizes,
    #[comptime] squared: bool,
) -> f32 {
    let vectors = sizes.d_input / 8;
    let start = row * (sizes.x_stride / 8);
    let mut sum = Wide::<f32>::new(0.0);
    for step in 0..vectors.div_ceil(comptime!(32 * TOGETHER as u32)) {
        // All reads before the first sum.
        let mut values = Array::<Wide<F>>::new(TOGETHER);
        #[unroll]
        for i in 0..TOGETHER {
            let column = (step * comptime!(TOGETHER as u32) + i as u32) * 32 + lane;
            values[i] = x[(start + min(column, vectors - 1)) as usize];
        }
        #[unroll]
        for i in 0..TOGETHER {
            let column = (step * comptime!(TOGETHER as u32) + i as u32) * 32 + lane;
            if column < vectors {
                let value = Wide::<f32>::cast_from(values[i]) - Wide::<f32>::new(centre);
                if comptime!(squared) {
                    sum += value * value;
                } else {
                    sum += value;
                }
            }
        }
    }
    plane_sum(lanes_sum::<Const<8>>(sum))
}

fn by_teams<R: CubeRuntime>(
    (x, x_stride): (CubeTensor<R>, usize),
    weight: CubeWeight<R>,
    ending: Ending<R>,
) -> CubeTensor<R> {
    let weight = weight.stored(&x);
    let [n_rows, d_input] = [x.meta.shape()[0], x.meta.shape()[1]];
    let bound = bind(&x, &weight, ending);
    let (parts, outputs) = (bound.parts, bound.outputs);
    let vector = match weight.int8 {
        // A word of bytes at a time.
        true => vector_width(&[&x], &[d_input, x_stride, PACKED]).min(PACKED),
        false => vector_width(&[&x, &weight.floats], &[d_input, x_stride, weight.stride]),
    };
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
            array(&weight.floats),
            array(&weight.packed),
            array(&weight.scales),
            array(&bound.bias),
            array(&bound.residual),
            bound.out_array(5),
            SizesLaunch::new(
                n_rows as u32,
                vectors as u32,
                outputs as u32,
                (x_stride / vector) as u32,
                (weight.stride / vector) as u32,
                bound.residual_stride as u32,
                0.0,
                0.0,
            ),
            block,
            team,
            parts,
            x.dtype.into(),
            weight.floats.dtype.into(),
            bound.bias.dtype.into(),
            bound.residual.dtype.into(),
            bound.out.dtype.into(),
        );
    }
    bound.out
}

/// Here `d_input` and the strides count vectors.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn teams_kernel<F: Float, W: Float, V: Float, S: Float, O: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    weight: &Array<Vector<W, N>>,
    packed: &Array<u32>,
    scales: &Array<f32>,
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
        let weights = stored::<W, N>(weight, packed, output * sizes.weight_stride + column, parts);
        let mut others = Vector::<f32, N>::new(0.0);
        if comptime!(parts.gated) {
            others = stored::<W, N>(weight, packed, other + column, parts);
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
            let value = finished::<V, S>(gate, other, row, output, scales, bias, residual, sizes, parts);
            out[(row * sizes.outputs + output) as usize] = O::cast_from(value);
        }
    }
}

/// A vector of the weight, whatever it is stored as. Bytes lie four in a word, of which a vector may be a part.
#[cube]
fn stored<W: Float, N: Size>(
    weight: &Array<Vector<W, N>>,
    packed: &Array<u32>,
    at: u32,
    #[comptime] parts: Parts,
) -> Vector<f32, N> {
    let width = N::value();
    if comptime!(parts.int8) {
        let each = comptime!((PACKED / width) as u32);
        let word = packed[(at / each) as usize];
        let first = at % each * comptime!(width as u32);
        let mut vector = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..N::value() {
            let byte = ((word >> (8 * (first + comptime!(i as u32)))) & 0xff) ^ 0x80;
            vector[i] = f32::cast_from(byte) - 128.0f32;
        }
        vector
    } else {
        Vector::<f32, N>::cast_from(weight[at as usize])
    }
}
