//! Skinny products on NVIDIA's tensor cores.
//!
//! ```text
//! a cube: 8 outputs or a few times as many; its planes split K (`d_input`)
//!
//! K:      | plane 0 | plane 1 | .. | plane P-1 | plane 0 | ..   chunks of 32 columns, `ahead` of
//!                                                        them loaded together; P is 8, or 16 with
//!                                                        few cubes and up to eight rows
//! weight  8 outputs x 32 columns: lane = 4 * output + i loads 16 bytes (8 of INT8),
//!                                 columns 8 i .. 8 i + 7
//! x       8 rows    x 32 columns: the same; `mma` m16n8k16 twice per chunk, sums in registers
//!         -> sums of all planes through shared memory -> epilogue
//! ```
//!
//! A sum over K does not depend on which columns a lane's registers have, if both sides agree. Both
//! are therefore loaded from memory as stored, without `ldmatrix`.
//!
//! A decode step is a chain of such products, each too short to hide latency. Everything
//! independent is therefore loaded before the first wait. The deviation of an RMS norm divides the
//! sums at the end, so that the product does not wait for it.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::stream::{Tiles, stream};
use super::tile::{CHUNK, GROUP, eight, multiply, planes_sum};
use super::{CubeWeight, Epilogue, Normed, Parts, Sizes, SizesLaunch, bind, finished, residual_of};
use crate::cubecl::reduce::lanes_sum;
use crate::cubecl::tensor_cores::{Pair, Wide, has_tensor_cores};
use crate::cubecl::{array, contiguous, dtype_of, grid, launch, optional, rows, vector_width};
use crate::multiprocessors::multiprocessors;
use crate::ops::norm::cubecl::CubeNorm;
use crate::quant::Format;

/// Planes per cube: with many cubes, and with few.
const PLANES: usize = 8;
const MORE_PLANES: usize = 16;
/// Up to this many cubes are few.
const FEW_CUBES: usize = 256;
/// Maximum groups of outputs per cube, without those of a gate.
const MOST_GROUPS: usize = 4;
/// Outstanding 16-byte loads per lane: of the weight; of the weight with few cubes and up to eight
/// rows, which leaves more registers; and of `x`.
const READS: usize = 8;
const MORE_READS: usize = 12;
const X_READS: usize = 16;
/// Vectors of `x` that a lane loads together for a row's statistics.
const TOGETHER: usize = 4;
/// Maximum bands (of 16 rows) times groups of weights (including a gate's), whose sums must fit in
/// shared memory.
const MOST: usize = 8;

/// The shape of a cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    planes: usize,
    /// Groups of outputs.
    groups: usize,
    /// Blocks of eight rows; two are one operand of `mma`.
    blocks: usize,
    /// Groups of weights: with a gate, those of both halves.
    sides: usize,
    /// Chunks loaded together.
    ahead: usize,
}

impl Shape {
    const fn bands(&self) -> usize {
        self.blocks.div_ceil(2)
    }
}

/// Whether the tensor-core kernel supports `x` and `weight`.
pub(crate) fn on_tensor_cores<R: CubeRuntime>(x: &CubeTensor<R>, weight: &CubeWeight<R>) -> bool {
    match weight {
        CubeWeight::Float(weight) => floats_on_tensor_cores(x, weight),
        // A word of bytes has the size of two elements.
        CubeWeight::Quantized(weight) => {
            let whole = |x: &CubeTensor<R>| x.handle.offset_start.unwrap_or(0).is_multiple_of(16);
            let lengths = [stride(x), x.meta.shape()[1], 8];
            is_taken(x) && vector_width(&[x], &lengths) == 8 && whole(&weight.packed)
        }
    }
}

/// Whether the tensor-core kernel supports `x` and a float weight.
fn floats_on_tensor_cores<R: CubeRuntime>(x: &CubeTensor<R>, weight: &CubeTensor<R>) -> bool {
    let lengths = [stride(x), stride(weight), x.meta.shape()[1], 8];
    is_taken(x) && weight.dtype == x.dtype && weight.meta.strides()[1] == 1 && vector_width(&[x, weight], &lengths) == 8
}

/// The row stride. For a single row 8, which fits every vector width.
fn stride<R: CubeRuntime>(x: &CubeTensor<R>) -> usize {
    if x.meta.shape()[0] == 1 { 8 } else { x.meta.strides()[0] }
}

/// Whether the device's tensor cores support the dtype of `x`, and its columns are contiguous.
fn is_taken<R: CubeRuntime>(x: &CubeTensor<R>) -> bool {
    x.meta.strides()[1] == 1 && has_tensor_cores(x)
}

pub(super) fn by_tensor_cores<R: CubeRuntime>(
    x: CubeTensor<R>,
    norm: Option<CubeNorm<R>>,
    weight: CubeWeight<R>,
    epilogue: Epilogue<R>,
) -> CubeTensor<R> {
    let (x, x_stride) = rows(x);
    let weight = weight.stored();
    let plain = norm.is_none() && epilogue.is_plain();
    if let Some(tiles) = plain.then(|| Tiles::new(&x, weight.d_output)).flatten() {
        return stream(x, x_stride, weight, epilogue.dtype, tiles);
    }
    let [n_rows, d_input] = [x.meta.shape()[0], x.meta.shape()[1]];
    let bound = bind(&x, &weight, epilogue);
    let (mut parts, outputs) = (bound.parts, bound.outputs);
    let mut epsilon = 0.0;
    let (mut gamma, mut beta) = (None, None);
    if let Some(norm) = norm {
        let (layer, shifted) = (norm.layer, norm.beta.is_some());
        // f16 may overflow before the division.
        parts.normed = Some(Normed { layer, shifted, late: !layer && !shifted && x.dtype == DType::BF16 });
        epsilon = norm.epsilon;
        (gamma, beta) = (Some(contiguous(norm.gamma)), norm.beta.map(contiguous));
    }
    // As many outputs per cube as leave about one cube per multiprocessor: each cube reads all of
    // `x`, and a few cubes more than fit would take a second wave.
    let blocks = n_rows.div_ceil(8);
    let gates = 1 + usize::from(parts.gated);
    let multiprocessors = multiprocessors(&x);
    let enough = (multiprocessors - multiprocessors / 16) as usize;
    let fits =
        |groups: &usize| groups * blocks.div_ceil(2) * gates <= MOST && outputs.div_ceil(groups * GROUP) >= enough;
    let groups = (2..=MOST_GROUPS).rev().find(fits).unwrap_or(1);
    let cubes = outputs.div_ceil(groups * GROUP);
    // With many rows, sums need the registers of more planes, and exchanging them takes longer.
    let planes = if cubes <= FEW_CUBES && blocks == 1 { MORE_PLANES } else { PLANES };
    let sides = groups * gates;
    // At most as many chunks as a plane has, and as many registers as a lane has.
    let chunks = d_input.div_ceil(CHUNK * planes);
    let reads = if planes == MORE_PLANES { MORE_READS } else { READS };
    let most = (reads / sides).min(X_READS / blocks).max(1);
    let ahead = chunks.div_ceil(chunks.div_ceil(most));
    let shape = Shape { planes, groups, blocks, sides, ahead };
    // SAFETY: reads are guarded by rows, outputs and columns, writes by rows and outputs; `gamma`
    // and `beta` have as many elements as `x` has columns.
    unsafe {
        launch!(
            tensor_core_kernel::TensorCoreKernel,
            &x.client,
            grid(cubes),
            CubeDim::new_1d(32 * planes as u32),
            [],
            [
                F = x.dtype,
                G = dtype_of(&gamma, &x),
                H = dtype_of(&beta, &x),
                V = dtype_of(&bound.bias, &x),
                S = dtype_of(&bound.residual, &x),
                O = bound.out.dtype,
            ],
            [
                x: Array<Wide<tensor_core_kernel::F>> = array(&x),
                gamma: ComptimeOption<Array<Wide<tensor_core_kernel::G>>> = optional(&gamma),
                beta: ComptimeOption<Array<Wide<tensor_core_kernel::H>>> = optional(&beta),
                weight: ComptimeOption<Array<Wide<tensor_core_kernel::F>>> = optional(&weight.floats),
                packed: ComptimeOption<Array<Vector<u32, Const<2>>>> = optional(&weight.packed),
                scales: ComptimeOption<Array<f32>> = optional(&weight.scales),
                bias: ComptimeOption<Array<tensor_core_kernel::V>> = optional(&bound.bias),
                residual: ComptimeOption<Array<tensor_core_kernel::S>> = optional(&bound.residual),
                out: Array<tensor_core_kernel::O> =
                    bound.out_array(&[&gamma, &beta, &weight.floats, &weight.packed, &weight.scales]),
                sizes: Sizes = SizesLaunch::new(
                    n_rows as u32,
                    d_input as u32,
                    outputs as u32,
                    x_stride as u32,
                    weight.stride as u32,
                    bound.residual_stride as u32,
                    1.0 / d_input as f32,
                    epsilon as f32,
                ),
            ],
            [shape: Shape = shape, parts: Parts = parts]
        );
    }
    bound.out
}

#[cube(launch_unchecked)]
fn tensor_core_kernel<F: Float, G: Float, H: Float, V: Float, S: Float, O: Float>(
    x: &Array<Wide<F>>,
    gamma: &ComptimeOption<Array<Wide<G>>>,
    beta: &ComptimeOption<Array<Wide<H>>>,
    weight: &ComptimeOption<Array<Wide<F>>>,
    packed: &ComptimeOption<Array<Vector<u32, Const<2>>>>,
    scales: &ComptimeOption<Array<f32>>,
    bias: &ComptimeOption<Array<V>>,
    residual: &ComptimeOption<Array<S>>,
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
    let late = comptime!(parts.late());
    let stride = comptime!((shape.planes * ahead) as u32);
    let steps = sizes.d_input.div_ceil(comptime!(CHUNK as u32)).div_ceil(stride);

    // Load these while statistics are computed.
    let mut weights = Array::<Wide<F>>::new(comptime!(ahead * sides));
    let mut inputs = Array::<Wide<F>>::new(comptime!(ahead * blocks));
    let mut gammas = Array::<Wide<G>>::new(comptime!(if late { ahead } else { 1 }));
    fetch::<F, G>(
        x,
        gamma,
        weight,
        packed,
        &mut weights,
        &mut inputs,
        &mut gammas,
        first,
        plane * 4 + lane_column,
        lane_row,
        sizes,
        shape,
        parts,
    );
    // Also the residual, if it is only two elements per unit.
    let pairs = comptime!((shape.groups * GROUP / 2) as u32);
    let mut added = Pair::new(0.0);
    #[unroll]
    for i in 0..2usize {
        let output = first + 2 * (UNIT_POS % pairs) + i as u32;
        added[i] = residual_of::<S>(residual, UNIT_POS / pairs, output, sizes, parts);
    }

    // Mean and inverse deviation of every row.
    let mut statistics = SharedMemory::<Pair>::new(comptime!(8 * blocks));
    if let Some(normed) = comptime!(parts.normed.filter(|normed| !normed.late)) {
        row_statistics::<F>(x, &mut statistics, plane, lane, sizes, shape, normed);
        sync_cube();
    }
    // Or the lane's sums of squares.
    let mut squares = Array::<f32>::new(blocks);
    #[unroll]
    for block in 0..blocks {
        squares[block] = 0.0f32;
    }

    let mut sums = Array::<Pair>::new(comptime!(2 * bands * sides));
    #[unroll]
    for i in 0..comptime!(2 * bands * sides) {
        sums[i] = Pair::new(0.0);
    }
    for step in 0..steps {
        let column = (step * stride + plane) * 4 + lane_column;
        if step > 0 {
            fetch::<F, G>(
                x,
                gamma,
                weight,
                packed,
                &mut weights,
                &mut inputs,
                &mut gammas,
                first,
                column,
                lane_row,
                sizes,
                shape,
                parts,
            );
        }
        #[unroll]
        for i in 0..ahead {
            let column = column + comptime!((i * shape.planes * 4) as u32);
            if comptime!(late) {
                #[unroll]
                for block in 0..blocks {
                    let value = Wide::<f32>::cast_from(inputs[comptime!(i * blocks + block)]);
                    squares[block] += lanes_sum::<Const<8>>(value * value);
                    let value = value * Wide::<f32>::cast_from(gammas[i]);
                    inputs[comptime!(i * blocks + block)] = Wide::<F>::cast_from(value);
                }
            }
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
                multiply::<F>(upper, lower, &weights, &mut sums, i, band, sides);
            }
        }
    }

    // Sums of all planes, `[plane, row, side, 4 pairs]`. They may overwrite the statistics.
    sync_cube();
    let width = comptime!((sides * GROUP / 2) as u32);
    let tile = comptime!((8 * blocks * sides * GROUP / 2) as u32);
    let mut shared = SharedMemory::<Pair>::new(comptime!(shape.planes * 8 * blocks * sides * GROUP / 2));
    let mut shared_squares = SharedMemory::<f32>::new(comptime!(if late { shape.planes * 8 * blocks } else { 1 }));
    #[unroll]
    for block in 0..blocks {
        let row = comptime!((8 * block) as u32) + lane_row;
        #[unroll]
        for side in 0..sides {
            let place = plane * tile + row * width + comptime!((side * GROUP / 2) as u32) + lane_column;
            shared[place as usize] = sums[comptime!(2 * (block / 2 * sides + side) + block % 2)];
        }
        if comptime!(late) {
            let mut sum = squares[block];
            sum += plane_shuffle_xor(sum, 1u32);
            sum += plane_shuffle_xor(sum, 2u32);
            if lane_column == 0 {
                shared_squares[(plane * comptime!((8 * blocks) as u32) + row) as usize] = sum;
            }
        }
    }
    sync_cube();
    let mut at = UNIT_POS;
    while at < sizes.rows * pairs {
        let row = at / pairs;
        let pair = at % pairs;
        let place = row * width + pair;
        let mut gate = planes_sum(&shared, place, tile, comptime!(shape.planes));
        let mut other = Pair::new(0.0);
        if comptime!(parts.gated) {
            other = planes_sum(&shared, place + pairs, tile, comptime!(shape.planes));
        }
        if comptime!(late) {
            let mut sum = shared_squares[row as usize];
            #[unroll]
            for plane in 1..shape.planes {
                sum += shared_squares[(row + comptime!((plane * 8 * blocks) as u32)) as usize];
            }
            let inverse = Pair::new(1.0f32 / (sum * sizes.share + sizes.epsilon).sqrt());
            gate *= inverse;
            other *= inverse;
        }
        #[unroll]
        for i in 0..2usize {
            let output = first + 2 * pair + i as u32;
            if at != UNIT_POS {
                added[i] = residual_of::<S>(residual, row, output, sizes, parts);
            }
            if output < sizes.outputs {
                let value = finished::<V>(gate[i], other[i], added[i], output, scales, bias, sizes, parts);
                out[(row * sizes.outputs + output) as usize] = O::cast_from(value);
            }
        }
        at += comptime!((32 * shape.planes) as u32);
    }
}

/// Loads a lane's share of the weight, of `x` and of a late norm's gamma, for some chunks, the
/// first of which starts at `column`. Zeros past rows, outputs and columns.
#[cube]
fn fetch<F: Float, G: Float>(
    x: &Array<Wide<F>>,
    gamma: &ComptimeOption<Array<Wide<G>>>,
    weight: &ComptimeOption<Array<Wide<F>>>,
    packed: &ComptimeOption<Array<Vector<u32, Const<2>>>>,
    weights: &mut Array<Wide<F>>,
    inputs: &mut Array<Wide<F>>,
    gammas: &mut Array<Wide<G>>,
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
                if comptime!(parts.format == Some(Format::Int8)) {
                    value = eight::<F>(packed.as_ref().unwrap()[at]);
                } else {
                    value = weight.as_ref().unwrap()[at];
                }
            }
            weights[comptime!(i * shape.sides + side)] = value;
        }
        if comptime!(parts.late()) {
            gammas[i] = gamma.as_ref().unwrap()[min(column, vectors - 1) as usize];
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

/// Eight elements of a row of `x`, normalized if there is a norm. Zeros past its rows and columns.
#[cube]
fn normalised<F: Float, G: Float, H: Float>(
    value: Wide<F>,
    gamma: &ComptimeOption<Array<Wide<G>>>,
    beta: &ComptimeOption<Array<Wide<H>>>,
    statistics: &SharedMemory<Pair>,
    row: u32,
    column: u32,
    vectors: u32,
    rows: u32,
    #[comptime] parts: Parts,
) -> Wide<F> {
    if let Some(normed) = comptime!(parts.normed.filter(|normed| !normed.late)) {
        let mut output = Wide::<F>::cast_from(0.0f32);
        if row < rows && column < vectors {
            let row = statistics[row as usize];
            let mut wide = Wide::<f32>::cast_from(value);
            if comptime!(normed.layer) {
                wide -= Wide::<f32>::new(row[0usize]);
            }
            wide =
                wide * Wide::<f32>::new(row[1usize]) * Wide::<f32>::cast_from(gamma.as_ref().unwrap()[column as usize]);
            if comptime!(normed.shifted) {
                wide += Wide::<f32>::cast_from(beta.as_ref().unwrap()[column as usize]);
            }
            output = Wide::<F>::cast_from(wide);
        }
        output
    } else {
        value
    }
}

/// Mean and inverse deviation of all rows, one plane per row in turn.
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

/// The sum of a row's elements, or of the squares of their distances from `centre`.
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
        // All loads before the first sum.
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
