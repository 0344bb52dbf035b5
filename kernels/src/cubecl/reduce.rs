//! Row reductions in CubeCL: within a row, and over many rows.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::features::Plane;
use cubecl::prelude::*;

use crate::cubecl::{array, empty, launch, rows};

/// Units that share a row: unit `u` has vectors `u`, `u + units`, `u + 2 * units` and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowUnits {
    /// Units per row, a power of two.
    pub(crate) units: u32,
    /// Rows per cube; more than one only if a row's units need no shared memory.
    pub(crate) rows: u32,
    /// Units that exchange values without shared memory, a power of two; one if the device has no
    /// planes.
    pub(crate) plane: u32,
    /// Maximum vectors per unit.
    pub(crate) count: u32,
    /// Whether all units have that many.
    pub(crate) exact: bool,
}

impl RowUnits {
    /// For rows of `vectors`, with at most `most` vectors per unit if possible, and at most `units`
    /// units per row.
    pub(crate) fn new<R: CubeRuntime>(client: &ComputeClient<R>, vectors: usize, most: usize, units: u32) -> Self {
        let hardware = &client.properties().hardware;
        let uniform = hardware.plane_size_min == hardware.plane_size_max && hardware.plane_size_min.is_power_of_two();
        let plane = match client.features().plane.contains(Plane::Ops) && uniform {
            true => hardware.plane_size_min,
            false => 1,
        };
        let most_units = units.min(hardware.max_units_per_cube).min(hardware.max_cube_dim.0);
        let vectors = u32::try_from(vectors).expect("rows of fewer than 2^32 vectors").max(1);
        let mut units = vectors.next_power_of_two().min(plane.max(32));
        while vectors.div_ceil(units) > most as u32 && 2 * units <= most_units {
            units *= 2;
        }
        let rows = if units <= plane { (256 / units).min(hardware.max_cube_dim.1) } else { 1 };
        let count = vectors.div_ceil(units);
        Self { units, rows, plane, count, exact: vectors == count * units }
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.units, self.rows)
    }
}

/// The widest vector of the device, for the first tensor's elements, that divides each of `lengths`
/// and to which every tensor is aligned.
pub(crate) fn row_vector<R: CubeRuntime>(tensors: &[&CubeTensor<R>], lengths: &[usize]) -> usize {
    let fits = |width: usize| {
        lengths.iter().all(|length| length.is_multiple_of(width))
            && tensors.iter().all(|x| {
                let offset = x.handle.offset_start.unwrap_or(0) as usize;
                offset.is_multiple_of(width * x.dtype.size())
            })
    };
    let size = tensors[0].dtype.size();
    tensors[0].client.io_optimized_vector_sizes(size).find(|width| fits(*width)).unwrap_or(1)
}

/// Whether the row has a vector at `column`.
#[cube]
pub(crate) fn within(column: u32, columns: u32, #[comptime] row_units: RowUnits) -> bool {
    if row_units.exact { true.runtime() } else { column < columns }
}

/// The sum of a value over a row's units, on all of them.
#[cube]
pub(crate) fn row_sum(value: f32, #[comptime] row_units: RowUnits) -> f32 {
    exchanged(value, row_units, false)
}

/// The maximum over a row's units.
#[cube]
pub(crate) fn row_max(value: f32, #[comptime] row_units: RowUnits) -> f32 {
    exchanged(value, row_units, true)
}

#[cube]
fn exchanged(value: f32, #[comptime] row_units: RowUnits, #[comptime] largest: bool) -> f32 {
    let mut value = value;
    #[unroll]
    for step in 0..comptime!(row_units.units.min(row_units.plane).trailing_zeros()) {
        value = joined(value, plane_shuffle_xor(value, 1u32 << step), largest);
    }
    if comptime!(row_units.units > row_units.plane) {
        let pieces = comptime!(row_units.units / row_units.plane);
        // In a loop, another unit may still read this shared memory from the round before.
        sync_cube();
        let mut shared = SharedMemory::<f32>::new(comptime!(pieces as usize));
        let lane = UNIT_POS_X % row_units.plane;
        if lane == 0 {
            shared[(UNIT_POS_X / row_units.plane) as usize] = value;
        }
        sync_cube();
        // Halve until few values are left, which every unit then reads.
        let halvings = comptime!(pieces.trailing_zeros().saturating_sub(4));
        #[unroll]
        for step in 0..halvings {
            let half = comptime!(pieces / 2) >> step;
            if UNIT_POS_X < half {
                let other = shared[(UNIT_POS_X + half) as usize];
                shared[UNIT_POS_X as usize] = joined(shared[UNIT_POS_X as usize], other, largest);
            }
            sync_cube();
        }
        value = shared[0];
        #[unroll]
        for piece in 1..comptime!(pieces.min(16)) {
            value = joined(value, shared[piece as usize], largest);
        }
    }
    value
}

#[cube]
fn joined(a: f32, b: f32, #[comptime] largest: bool) -> f32 {
    if largest { max(a, b) } else { a + b }
}

/// An exclusive prefix sum over the units of the cube's only row, in some order, and the total.
#[cube]
pub(crate) fn exclusive_sum(value: u32, #[comptime] row_units: RowUnits) -> (u32, u32) {
    // As in `exchanged`.
    sync_cube();
    let pieces = comptime!((row_units.units / row_units.plane) as usize);
    let mut sums = SharedMemory::<u32>::new(pieces);
    let mut before = 0u32;
    let mut total = 0u32;
    if comptime!(row_units.plane > 1) {
        let plane = UNIT_POS_X / row_units.plane;
        let lane = UNIT_POS_X % row_units.plane;
        let within = plane_inclusive_sum(value);
        let all = plane_sum(value);
        if lane == 0 {
            sums[plane as usize] = all;
        }
        sync_cube();
        before += within - value;
        for other in 0..pieces {
            let sum = sums[other];
            total += sum;
            before += select(u32::cast_from(other) < plane, sum, 0u32);
        }
    } else {
        sums[UNIT_POS_X as usize] = value;
        sync_cube();
        #[unroll]
        for doubling in 0..comptime!(row_units.units.trailing_zeros()) {
            let step = comptime!(1u32 << doubling);
            let mut sum = sums[UNIT_POS_X as usize];
            if UNIT_POS_X >= step {
                sum += sums[(UNIT_POS_X - step) as usize];
            }
            sync_cube();
            sums[UNIT_POS_X as usize] = sum;
            sync_cube();
        }
        before += sums[UNIT_POS_X as usize] - value;
        total += sums[comptime!(row_units.units as usize - 1)];
    }
    sync_cube();
    (before, total)
}

/// The sum of a vector's elements.
#[cube]
pub(crate) fn lanes_sum<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut sum = vector[0];
    #[unroll]
    for lane in 1..N::value() {
        sum += vector[lane];
    }
    sum
}

/// The largest of a vector's elements.
#[cube]
pub(crate) fn lanes_max<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut largest = vector[0];
    #[unroll]
    for lane in 1..N::value() {
        largest = max(largest, vector[lane]);
    }
    largest
}

/// Minimum rows per piece of a sum.
const PIECE: usize = 64;
/// Rows that one launch sums.
const ONE_PASS_ROWS: usize = 4096;
/// Maximum pieces of a sum.
const PIECES: usize = 256;

/// The sums `[columns]`, f32, over the rows of `x` `[rows, columns]` of any float dtype.
pub(crate) fn sum_over_rows<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let out = empty(&x, [columns], DType::F32);
    // A launch costs more than a few thousand rows.
    let pieces = if n_rows <= ONE_PASS_ROWS { 1 } else { (n_rows / PIECE).clamp(1, PIECES) };
    if pieces == 1 {
        add_up(x, &out, &out, 1);
        return out;
    }
    let partial = empty(&x, [pieces, columns], DType::F32);
    add_up(x, &partial, &partial, pieces);
    add_up(partial, &out, &out, 1);
    out
}

/// The sums over rows of two parts, each into its own tensor; both of one dtype.
pub(crate) fn sum_over_row_pairs<R: CubeRuntime>(x: CubeTensor<R>, first: &CubeTensor<R>, second: &CubeTensor<R>) {
    add_up(x, first, second, 1);
}

/// Sums over each of `pieces` pieces of the rows: the first columns into `first`, up to its width,
/// the rest into `second`.
fn add_up<R: CubeRuntime>(x: CubeTensor<R>, first: &CubeTensor<R>, second: &CubeTensor<R>, pieces: usize) {
    let (x, stride) = rows(x);
    let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let split = first.meta.shape()[first.meta.rank() - 1];
    let vector = row_vector(&[&x, first, second], &[columns, split, stride]);
    let columns = (columns / vector) as u32;
    // A single piece uses narrow, tall cubes, so that there are enough units.
    let hardware = &x.client.properties().hardware;
    let (most, units) = match pieces {
        1 if n_rows >= 256 && hardware.max_units_per_cube >= 1024 => (8, 1024),
        1 => (8, 256),
        _ => (32, 256),
    };
    let width = columns.next_power_of_two().min(most);
    // SAFETY: each unit reads its column's vectors below `rows`, and writes that column's sum of
    // its own piece.
    unsafe {
        launch!(
            add_up_kernel::AddUpKernel,
            &x.client,
            CubeCount::Static(columns.div_ceil(width), pieces as u32, 1),
            CubeDim::new_2d(width, units / width),
            [N = vector],
            [F = x.dtype, O = first.dtype],
            [
                x: Array<Vector<add_up_kernel::F, add_up_kernel::N>> = array(&x),
                first: Array<Vector<add_up_kernel::O, add_up_kernel::N>> = array(first),
                second: Array<Vector<add_up_kernel::O, add_up_kernel::N>> = array(second),
                rows: u32 = n_rows as u32,
                columns: u32 = columns,
                stride: u32 = stride as u32 / vector as u32,
                piece: u32 = n_rows.div_ceil(pieces) as u32,
                split: u32 = (split / vector) as u32,
            ],
            [width: u32 = width, units: u32 = units]
        );
    }
}

#[cube(launch_unchecked)]
fn add_up_kernel<F: Float, O: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    first: &mut Array<Vector<O, N>>,
    second: &mut Array<Vector<O, N>>,
    rows: u32,
    columns: u32,
    stride: u32,
    piece: u32,
    split: u32,
    #[comptime] width: u32,
    #[comptime] units: u32,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _sum_dtype: StorageType,
) {
    let height = comptime!(units / width);
    let own = CUBE_POS_X * width + UNIT_POS_X;
    let column = min(own, columns - 1);
    let end = min(rows, (CUBE_POS_Y + 1) * piece);
    let mut row = CUBE_POS_Y * piece + UNIT_POS_Y;
    let mut sum = Vector::<f32, N>::new(0.0);
    // Four reads at a time.
    while row + 3 * height < end {
        let at = row * stride + column;
        let step = height * stride;
        let a = Vector::<f32, N>::cast_from(x[at as usize]);
        let b = Vector::<f32, N>::cast_from(x[(at + step) as usize]);
        let c = Vector::<f32, N>::cast_from(x[(at + 2 * step) as usize]);
        let d = Vector::<f32, N>::cast_from(x[(at + 3 * step) as usize]);
        sum += (a + b) + (c + d);
        row += 4 * height;
    }
    while row < end {
        sum += Vector::cast_from(x[(row * stride + column) as usize]);
        row += height;
    }
    let mut shared = SharedMemory::<Vector<f32, N>>::new(comptime!(units as usize));
    let place = UNIT_POS_Y * width + UNIT_POS_X;
    shared[place as usize] = sum;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(height.trailing_zeros()) {
        let half = comptime!(height / 2) >> step;
        if UNIT_POS_Y < half {
            let other = shared[(place + half * width) as usize];
            shared[place as usize] += other;
        }
        sync_cube();
    }
    if UNIT_POS_Y == 0 && own < columns {
        let sum = Vector::cast_from(shared[UNIT_POS_X as usize]);
        if column < split {
            first[(CUBE_POS_Y * split + column) as usize] = sum;
        } else {
            second[(CUBE_POS_Y * (columns - split) + column - split) as usize] = sum;
        }
    }
}
