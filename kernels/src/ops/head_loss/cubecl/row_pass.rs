//! Online softmax statistics of a row in CubeCL. A row stays in registers if it fits. Longer ones
//! are processed in blocks with a running maximum, and read again from shared memory as far as they
//! fit there, or through the cache.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::cubecl::reduce::{RowUnits, lanes_max, lanes_sum, row_max, row_sum, within};

/// Maximum elements per unit for a row in registers.
const HELD: usize = 32;
/// Bytes per unit and block otherwise.
const BLOCK: usize = 32;
/// Maximum units per row: with more, too few cubes share a processor to overlap reads and
/// computation.
const UNITS: u32 = 512;
/// Cubes that share a processor, and its memory.
const CUBES: usize = 3;
/// Minimum shared memory of a device to keep rows there.
const SHARED: usize = 96 << 10;

/// How a row's units traverse it: in blocks of `row_units.count` vectors per unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Passes {
    pub(super) row_units: RowUnits,
    /// With a single block, the row stays in registers.
    pub(super) blocks: u32,
    /// Number of first blocks kept in shared memory.
    pub(super) kept: u32,
    /// Vectors of those blocks.
    pub(super) shared: u32,
    /// Whether the device has a faster exponential, accurate to a few units in the last place.
    pub(super) fast: bool,
    /// Whether the last vector has lanes past the row's end.
    pub(super) padded: bool,
}

impl Passes {
    /// The passes over rows of `x`, of `columns` elements in vectors of `width`.
    pub(super) fn new<R: CubeRuntime>(x: &CubeTensor<R>, columns: usize, width: usize) -> Self {
        let vectors = columns.div_ceil(width);
        let padded = !columns.is_multiple_of(width);
        // Only CUDA's is right for infinities.
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

/// Results of the first pass over a row.
#[derive(CubeType)]
pub(super) struct Statistics {
    /// The largest element.
    pub(super) max: f32,
    /// The sum of `exp(x - max)`.
    pub(super) sum: f32,
    /// The weighted sum of the elements, and the one at `target`, if requested.
    pub(super) weighed: f32,
}

/// Sums of the first pass besides the exponentials.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Weights {
    pub(super) target: u32,
    pub(super) target_weight: f32,
    pub(super) weight: f32,
    /// Whether the sum over all elements is requested.
    #[cube(comptime)]
    pub(super) all: bool,
    /// Whether either is.
    #[cube(comptime)]
    pub(super) any: bool,
}

/// The first pass over the row of `length` elements, in `columns` vectors, at `start`. Leaves a row
/// of one block in `held`, and the first blocks of a longer one in `kept`. Lanes past a row's end
/// must be zeros.
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

/// A vector of the row again, after [`first_pass`].
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

/// `e^x` for x of at most zero.
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
