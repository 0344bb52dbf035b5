//! Skinny products with very many outputs, as the head's, on NVIDIA's tensor cores: persistent
//! cubes, one per multiprocessor.
//!
//! ```text
//! x [rows, K]      in shared memory, read once by each cube; planes split K as in `tensor_cores`
//! weight [N, K]    cube c has the tiles of outputs c, c + cubes, c + 2 cubes, ..
//!                  the weights of the next tile are read while one is multiplied
//! ```
//!
//! With a cube per tile, as in `tensor_cores.rs`, reads of `x` from the cache would exceed reads of
//! the weight from memory.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::tile::{CHUNK, GROUP, eight, multiply, planes_sum};
use super::{Sizes, SizesLaunch, Stored};
use crate::cubecl::tensor_cores::{Pair, Wide};
use crate::cubecl::{array, empty, grid, optional};
use crate::quant::Format;

/// Planes per cube, which split the inner dimension.
const PLANES: usize = 16;
/// Outstanding 16-byte loads of the weight per lane.
const READS: usize = 10;
/// Maximum groups of outputs per tile.
const MOST_GROUPS: usize = 4;
/// Minimum tiles per cube.
const TILES: usize = 4;
/// Up to this many rows, it costs little that each cube reads `x` itself.
const REREAD_ROWS: usize = 8;

/// How a cube traverses the outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tiles {
    /// Chunks of the inner dimension per plane.
    chunks: usize,
    /// Groups of outputs per tile.
    groups: usize,
    /// Blocks of eight rows.
    blocks: usize,
    cubes: usize,
}

impl Tiles {
    /// The tiles of a product of `x` with `outputs` outputs, if this kernel supports it.
    pub(super) fn new<R: CubeRuntime>(x: &CubeTensor<R>, outputs: usize) -> Option<Self> {
        let [n_rows, d_input] = [x.meta.shape()[0], x.meta.shape()[1]];
        let hardware = &x.client.properties().hardware;
        let cubes = hardware.num_streaming_multiprocessors? as usize;
        let chunks = d_input.div_ceil(CHUNK * PLANES);
        let groups = (READS / chunks).min(MOST_GROUPS);
        let blocks = n_rows.div_ceil(8);
        let tiles = Self { chunks, groups, blocks, cubes };
        let fits = groups > 0
            && n_rows > REREAD_ROWS
            && outputs >= cubes * TILES * GROUP * groups
            && tiles.shared_bytes() <= hardware.max_shared_memory_size;
        fits.then_some(tiles)
    }

    /// Vectors of `x` in a cube's shared memory.
    const fn kept(&self) -> usize {
        PLANES * 32 * self.chunks * self.blocks
    }

    /// Pairs of sums of all planes.
    const fn sums(&self) -> usize {
        PLANES * 8 * self.blocks * self.groups * GROUP / 2
    }

    const fn shared_bytes(&self) -> usize {
        self.kept() * size_of::<[u16; 8]>() + self.sums() * size_of::<[f32; 2]>()
    }
}

/// `x * weight^T` in `dtype`, for `x` `[rows, d_input]` with row stride `x_stride`, in elements.
pub(super) fn stream<R: CubeRuntime>(
    x: CubeTensor<R>,
    x_stride: usize,
    weight: Stored<R>,
    dtype: DType,
    tiles: Tiles,
) -> CubeTensor<R> {
    let [n_rows, d_input] = [x.meta.shape()[0], x.meta.shape()[1]];
    let out = empty(&x, [n_rows, weight.d_output], dtype);
    // SAFETY: reads are guarded by rows, outputs and columns, writes by rows and outputs.
    unsafe {
        stream_kernel::launch_unchecked(
            &x.client,
            grid(tiles.cubes),
            CubeDim::new_1d(32 * PLANES as u32),
            array(&x),
            optional(&weight.floats),
            optional(&weight.packed),
            optional(&weight.scales),
            array(&out),
            SizesLaunch::new(
                n_rows as u32,
                d_input as u32,
                weight.d_output as u32,
                x_stride as u32,
                weight.stride as u32,
                0,
                1.0,
                0.0,
            ),
            tiles,
            weight.format,
            x.dtype.into(),
            dtype.into(),
        );
    }
    out
}

#[cube(launch_unchecked)]
fn stream_kernel<F: Float, O: Float>(
    x: &Array<Wide<F>>,
    weight: &ComptimeOption<Array<Wide<F>>>,
    packed: &ComptimeOption<Array<Vector<u32, Const<2>>>>,
    scales: &ComptimeOption<Array<f32>>,
    out: &mut Array<O>,
    sizes: &Sizes,
    #[comptime] tiles: Tiles,
    #[comptime] format: Option<Format>,
    #[define(F)] _dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let Tiles { chunks, groups, blocks, .. } = comptime!(tiles);
    let bands = comptime!(blocks.div_ceil(2));
    let outputs_each = comptime!((groups * GROUP) as u32);
    let plane = UNIT_POS / 32;
    let lane = UNIT_POS % 32;
    let lane_row = lane / 4;
    let vectors = sizes.d_input / 8;
    // A plane's chunks are `PLANES` apart, and a lane has one vector of each.
    let first_column = plane * 4 + lane % 4;

    // Each lane reads only what it has written itself.
    let mut kept = SharedMemory::<Wide<F>>::new(comptime!(tiles.kept()));
    #[unroll]
    for i in 0..chunks {
        let column = first_column + comptime!((i * PLANES * 4) as u32);
        #[unroll]
        for block in 0..blocks {
            let row = comptime!((8 * block) as u32) + lane_row;
            let mut value = Wide::<F>::cast_from(0.0f32);
            if row < sizes.rows && column < vectors {
                value = x[(row * (sizes.x_stride / 8) + column) as usize];
            }
            kept[(comptime!(((i * blocks + block) * PLANES * 32) as u32) + UNIT_POS) as usize] = value;
        }
    }

    let count = sizes.outputs.div_ceil(outputs_each);
    let mut shared = SharedMemory::<Pair>::new(comptime!(tiles.sums()));
    let mut weights = Array::<Wide<F>>::new(comptime!(chunks * groups));
    let mut next = Array::<Wide<F>>::new(comptime!(chunks * groups));
    let mut sums = Array::<Pair>::new(comptime!(2 * bands * groups));
    let mut tile = CUBE_POS as u32;
    read_tile::<F>(weight, packed, &mut next, tile * outputs_each + lane_row, first_column, sizes, tiles, format);
    while tile < count {
        let first = tile * outputs_each;
        #[unroll]
        for i in 0..comptime!(chunks * groups) {
            weights[i] = next[i];
        }
        tile += comptime!(tiles.cubes as u32);
        // Past the last tile, weights are zeros.
        read_tile::<F>(weight, packed, &mut next, tile * outputs_each + lane_row, first_column, sizes, tiles, format);

        #[unroll]
        for i in 0..comptime!(2 * bands * groups) {
            sums[i] = Pair::new(0.0);
        }
        #[unroll]
        for i in 0..chunks {
            #[unroll]
            for band in 0..bands {
                let at = comptime!(((i * blocks + 2 * band) * PLANES * 32) as u32) + UNIT_POS;
                let upper = kept[at as usize];
                let mut lower = Wide::<F>::cast_from(0.0f32);
                if comptime!(2 * band + 1 < blocks) {
                    lower = kept[(at + comptime!((PLANES * 32) as u32)) as usize];
                }
                multiply::<F>(upper, lower, &weights, &mut sums, i, band, groups);
            }
        }

        // Sums of all planes, `[plane, row, group, 4 pairs]`.
        let width = comptime!((groups * GROUP / 2) as u32);
        let own = comptime!((8 * blocks * groups * GROUP / 2) as u32);
        #[unroll]
        for block in 0..blocks {
            let row = comptime!((8 * block) as u32) + lane_row;
            #[unroll]
            for group in 0..groups {
                let place = plane * own + row * width + comptime!((group * GROUP / 2) as u32) + lane % 4;
                shared[place as usize] = sums[comptime!(2 * (block / 2 * groups + group) + block % 2)];
            }
        }
        sync_cube();
        for at in range_stepped(UNIT_POS, sizes.rows * width, comptime!((32 * PLANES) as u32)) {
            let sum = planes_sum(&shared, at, own, PLANES);
            #[unroll]
            for i in 0..2usize {
                let output = first + 2 * (at % width) + i as u32;
                if output < sizes.outputs {
                    let mut value = sum[i];
                    if comptime!(format == Some(Format::Int8)) {
                        value *= scales.as_ref().unwrap()[output as usize];
                    }
                    out[(at / width * sizes.outputs + output) as usize] = O::cast_from(value);
                }
            }
        }
        sync_cube();
    }
}

/// Loads a lane's share of a tile's weights: rows `output`, `output + 8` and so on. Zeros past the
/// last output and column.
#[cube]
fn read_tile<F: Float>(
    weight: &ComptimeOption<Array<Wide<F>>>,
    packed: &ComptimeOption<Array<Vector<u32, Const<2>>>>,
    weights: &mut Array<Wide<F>>,
    output: u32,
    first_column: u32,
    sizes: &Sizes,
    #[comptime] tiles: Tiles,
    #[comptime] format: Option<Format>,
) {
    #[unroll]
    for i in 0..comptime!(tiles.chunks) {
        let column = first_column + comptime!((i * PLANES * 4) as u32);
        #[unroll]
        for group in 0..comptime!(tiles.groups) {
            let output = output + comptime!((group * GROUP) as u32);
            let mut value = Wide::<F>::cast_from(0.0f32);
            if output < sizes.outputs && column < sizes.d_input / 8 {
                let at = (output * (sizes.weight_stride / 8) + column) as usize;
                if comptime!(format == Some(Format::Int8)) {
                    value = eight::<F>(packed.as_ref().unwrap()[at]);
                } else {
                    value = weight.as_ref().unwrap()[at];
                }
            }
            weights[comptime!(i * tiles.groups + group)] = value;
        }
    }
}
