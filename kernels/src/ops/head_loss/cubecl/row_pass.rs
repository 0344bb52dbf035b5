//! Online softmax statistics of a row in CubeCL: a row stays in registers where it fits. Longer ones are worked through a
//! block at a time with a running maximum, and read again from shared memory, as far as they fit there, or through the
//! cache.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::cubecl::reduce::{RowUnits, lanes_max, lanes_sum, row_max, row_sum, within};

/// Elements of a row that a unit holds where the whole row stays in registers.
const HELD: usize = 32;
/// Bytes of a row that a unit holds at a time where it does not.
const BLOCK: usize = 32;
/// Units of a row: with more, too few cubes share a processor to read while others compute.
const UNITS: u32 = 512;
/// Cubes that share a processor, and its memory.
const CUBES: usize = 3;
/// Devices with less shared memory than this do not keep rows in it.
const SHARED: usize = 96 << 10;

/// How a row's units go over it: in blocks, of each of which a unit has `row_units.count` vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Passes {
    pub(super) row_units: RowUnits,
    /// With a single block, the row stays in registers.
    pub(super) blocks: u32,
    /// Blocks, from the first on, that stay in shared memory.
    pub(super) kept: u32,
    /// Vectors of those blocks.
    pub(super) shared: u32,
    /// Whether the device has a faster exponential, good to some units in the last place.
    pub(super) fast: bool,
    /// Whether the last vector has lanes beyond the row's end.
    pub(super) padded: bool,
}

impl Passes {
    /// The passes over rows of `x`, of `columns` elements in vectors of `width`.
    pub(super) fn new<R: CubeRuntime>(x: &CubeTensor<R>, columns: usize, width: usize) -> Self {
        let vectors = columns.div_ceil(width);
        let padded = !columns.is_multiple_of(width);
        // Only CUDA has one that is right for infinities.
        let fast = R::name(&x.client) == "cuda";
        let most = HELD / width;
        let row_units = RowUnits::new(&x.client, vectors, most, UNITS);
        if row_units.count as usize <= most {
            return Self { row_units, blocks: 1, kept: 0, shared: 0, fast, padded };
        }
        let blocks = row_units.count.div_ceil((BLOCK / x.dtype.size() / width) as u32);
        let count = row_units.count.div_ceil(blocks);
        let block = count * row_units.units;
        let row_units = RowUnits { count, exact: vectors == (blocks * block) as usize, ..row_units };
        let memory = x.client.properties().hardware.max_shared_memory_size;
        let room = if memory >= SHARED { (memory / CUBES - 4096) / (width * x.dtype.size()) } else { 0 };
        let kept = if vectors <= room { blocks } else { (room as u32) / block };
        let shared = (kept * block).min(vectors as u32);
        Self { row_units, blocks, kept, shared, fast, padded }
    }
}

/// What the first pass finds out about a row.
#[derive(CubeType)]
pub(super) struct Statistics {
    /// The largest element.
    pub(super) max: f32,
    /// The sum of `exp(x - max)`.
    pub(super) sum: f32,
    /// The sum of the elements, by `weight`, and the one at `target`, by `target_weight`, where asked for.
    pub(super) weighed: f32,
}

/// What the first pass sums up besides the exponentials.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Weights {
    pub(super) target: u32,
    pub(super) target_weight: f32,
    pub(super) weight: f32,
    /// Whether the sum over all elements is wanted.
    #[cube(comptime)]
    pub(super) all: bool,
    /// Whether any of it is.
    #[cube(comptime)]
    pub(super) any: bool,
}

/// The first pass over the row of `length` elements, in `columns` vectors, that begins at `start`. A row of one block is in
/// `held` afterwards, the first blocks of a longer one in `kept`. Lanes beyond a row's end have to be zeros.
#[cube]
#[allow(clippy::collapsible_if)]
pub(super) fn first_pass<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    start: u32,
    columns: u32,
    length: u32,
    held: &mut Array<Vector<F, N>>,
    kept: &mut SharedMemory<Vector<F, N>>,
    weights: Weights,
    #[comptime] passes: Passes,
) -> Statistics {
    let row_units = comptime!(passes.row_units);
    let mut max = f32::min_value();
    let mut sum = 0.0f32;
    let mut weighed = 0.0f32;
    for block in 0..passes.blocks {
        let first = block * (row_units.count * row_units.units) + UNIT_POS_X;
        let mut largest = Vector::<f32, N>::new(max);
        #[unroll]
        for i in 0..row_units.count {
            let column = first + i * row_units.units;
            if within(column, columns, row_units) {
                let value = x[(start + column) as usize];
                held[i as usize] = value;
                let value = within_row::<N>(Vector::cast_from(value), column, length, f32::min_value(), passes.padded);
                largest = cubecl::prelude::max(largest, value);
            }
        }
        if comptime!(passes.kept > 0) {
            if block < passes.kept {
                #[unroll]
                for i in 0..row_units.count {
                    let column = first + i * row_units.units;
                    if within(column, columns, row_units) {
                        kept[column as usize] = held[i as usize];
                    }
                }
            }
        }
        let new_max = lanes_max::<N>(largest);
        let mut sums = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..row_units.count {
            let column = first + i * row_units.units;
            if within(column, columns, row_units) {
                let value = Vector::<f32, N>::cast_from(held[i as usize]);
                let weight = exponential::<N>(value - Vector::new(new_max), passes.fast);
                sums += within_row::<N>(weight, column, length, 0.0f32, passes.padded);
                if weights.any {
                    if weights.all {
                        weighed += lanes_sum::<N>(value) * weights.weight;
                    }
                    if weights.target / N::value() as u32 == column {
                        weighed += lane_of::<N>(value, weights.target % N::value() as u32) * weights.target_weight;
                    }
                }
            }
        }
        sum = sum * (max - new_max).exp() + lanes_sum::<N>(sums);
        max = new_max;
    }
    let top = row_max(max, row_units);
    let sum = row_sum(sum * (max - top).exp(), row_units);
    if weights.any {
        weighed = row_sum(weighed, row_units);
    }
    Statistics { max: top, sum, weighed }
}

/// A vector of the row once more, after [`first_pass`].
#[cube]
pub(super) fn read_again<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    start: u32,
    column: u32,
    block: u32,
    i: u32,
    held: &Array<Vector<F, N>>,
    kept: &SharedMemory<Vector<F, N>>,
    #[comptime] passes: Passes,
) -> Vector<f32, N> {
    if comptime!(passes.blocks == 1) {
        Vector::cast_from(held[i as usize])
    } else if comptime!(passes.kept == passes.blocks) {
        Vector::cast_from(kept[column as usize])
    } else if comptime!(passes.kept == 0) {
        Vector::cast_from(x[(start + column) as usize])
    } else {
        let value = if block < passes.kept { kept[column as usize] } else { x[(start + column) as usize] };
        Vector::cast_from(value)
    }
}

/// `e^x` of what is at most zero.
#[cube]
pub(super) fn exponential<N: Size>(x: Vector<f32, N>, #[comptime] fast: bool) -> Vector<f32, N> {
    if fast { fast_exponential::<N>(x) } else { x.exp() }
}

#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
fn fast_exponential<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    x.exp()
}

/// The vector with `other` in the lanes beyond the row's end.
#[cube]
pub(super) fn within_row<N: Size>(
    value: Vector<f32, N>,
    column: u32,
    length: u32,
    other: f32,
    #[comptime] padded: bool,
) -> Vector<f32, N> {
    let mut value = value;
    if comptime!(padded) {
        let first = column * N::value() as u32;
        if first + N::value() as u32 > length {
            #[unroll]
            for lane in 0..N::value() {
                value[lane] = select(first + (lane as u32) < length, value[lane], other);
            }
        }
    }
    value
}

/// The element at `lane`.
#[cube]
fn lane_of<N: Size>(vector: Vector<f32, N>, lane: u32) -> f32 {
    let mut value = vector[0];
    #[unroll]
    for other in 1..N::value() {
        value = select(lane == other as u32, vector[other], value);
    }
    value
}
