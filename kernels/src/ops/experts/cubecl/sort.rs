//! Slots sorted by expert, stably, on the device: a counting sort whose units count one expert each.
//!
//! ```text
//! count   a cube per CHUNK slots: how many of them chose each expert
//! scan    one cube: where each expert begins, where each chunk's slots of it do, and the tiles of rows
//! place   a cube per CHUNK slots: each slot to its place
//! ```

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::cubecl::{array, clamp_index, contiguous, empty, grid};
use crate::ops::experts::{MOST_EXPERTS, Sizes};

const UNITS: u32 = 256;
/// Slots of a cube.
const CHUNK: u32 = 1024;

/// Slots in the order of their experts.
#[derive(Clone, Debug)]
pub(in crate::ops::experts) struct Order<R: CubeRuntime> {
    /// Slot of each place, u32 `[slots]`.
    pub(in crate::ops::experts) slots: CubeTensor<R>,
    /// First place of each expert and the end of the last, u32 `[n_experts + 1]`.
    pub(in crate::ops::experts) starts: CubeTensor<R>,
    /// Of each tile of rows its expert, its first place, and the expert's first place and the end of its
    /// places, u32 `[most_tiles, 4]`; the expert of those that are not used is the number of experts.
    pub(in crate::ops::experts) tiles: CubeTensor<R>,
    /// Rows of a tile, all of one expert.
    pub(in crate::ops::experts) tile_rows: usize,
    /// Tiles that there may be.
    pub(in crate::ops::experts) most_tiles: usize,
}

impl<R: CubeRuntime> Order<R> {
    /// Sorts the slots of `chosen` `[tokens, k]`.
    pub(in crate::ops::experts) fn of(chosen: CubeTensor<R>, sizes: Sizes, tile_rows: usize) -> Self {
        let chosen = contiguous(chosen);
        let (slots, n_experts) = (sizes.slots(), sizes.n_experts);
        let chunks = slots.div_ceil(CHUNK as usize);
        let most_tiles = slots / tile_rows + n_experts.min(slots);
        let counts = counts(&chosen, slots, n_experts);
        let order = Self {
            slots: empty(&chosen, [slots], DType::U32),
            starts: empty(&chosen, [n_experts + 1], DType::U32),
            tiles: empty(&chosen, [4 * most_tiles], DType::U32),
            tile_rows,
            most_tiles,
        };
        // SAFETY: there are at most as many tiles as whole ones, and one more for each expert with
        // slots.
        unsafe {
            scan_kernel::launch_unchecked(
                &chosen.client,
                grid(1),
                CubeDim::new_1d(UNITS),
                array(&counts),
                array(&order.starts),
                array(&order.tiles),
                chunks as u32,
                n_experts as u32,
                tile_rows as u32,
                most_tiles as u32,
            );
        }
        // SAFETY: places are a permutation of the slots, as the counts are those of the same
        // choices.
        unsafe {
            place_kernel::launch_unchecked(
                &chosen.client,
                grid(chunks),
                CubeDim::new_1d(UNITS),
                array(&chosen),
                array(&counts),
                array(&order.slots),
                slots as u32,
                n_experts as u32,
                chosen.dtype.into(),
            );
        }
        order
    }
}

/// How many of the slots of `chosen` `[tokens, k]` chose each expert, f32 `[n_experts]`.
pub(super) fn loads<R: CubeRuntime>(chosen: CubeTensor<R>, n_experts: usize) -> CubeTensor<R> {
    let chosen = contiguous(chosen);
    let slots = chosen.meta.shape().num_elements();
    let counts = counts(&chosen, slots, n_experts);
    let out = empty(&chosen, [n_experts], DType::F32);
    // SAFETY: a unit below `n_experts` writes its own load, and reads the counts of its expert.
    unsafe {
        load_kernel::launch_unchecked(
            &chosen.client,
            grid(n_experts.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            array(&counts),
            array(&out),
            slots.div_ceil(CHUNK as usize) as u32,
            n_experts as u32,
        );
    }
    out
}

/// Of each chunk of slots how many chose each expert, u32 `[chunks * n_experts]`.
fn counts<R: CubeRuntime>(chosen: &CubeTensor<R>, slots: usize, n_experts: usize) -> CubeTensor<R> {
    let chunks = slots.div_ceil(CHUNK as usize);
    let counts = empty(chosen, [chunks * n_experts], DType::U32);
    // SAFETY: a cube writes the counts of its own chunk.
    unsafe {
        count_kernel::launch_unchecked(
            &chosen.client,
            grid(chunks),
            CubeDim::new_1d(UNITS),
            array(chosen),
            array(&counts),
            slots as u32,
            n_experts as u32,
            chosen.dtype.into(),
        );
    }
    counts
}

#[cube(launch_unchecked)]
fn load_kernel(counts: &Array<u32>, out: &mut Array<f32>, chunks: u32, n_experts: u32) {
    let expert = ABSOLUTE_POS as u32;
    if expert >= n_experts {
        terminate!();
    }
    let mut total = 0u32;
    for chunk in 0..chunks {
        total += counts[(chunk * n_experts + expert) as usize];
    }
    out[expert as usize] = f32::cast_from(total);
}

/// Loads the experts of a chunk's slots. No expert is `n_experts`, which fills the rest.
#[cube]
fn load<I: Int>(chosen: &Array<I>, experts: &mut SharedMemory<u32>, first: u32, slots: u32, n_experts: u32) {
    #[unroll]
    for part in 0..comptime!(CHUNK / UNITS) {
        let at = part * UNITS + UNIT_POS;
        let slot = first + at;
        let mut expert = n_experts;
        if slot < slots {
            expert = clamp_index::<I>(chosen[slot as usize], n_experts - 1);
        }
        experts[at as usize] = expert;
    }
    sync_cube();
}

#[cube(launch_unchecked)]
fn count_kernel<I: Int>(
    chosen: &Array<I>,
    counts: &mut Array<u32>,
    slots: u32,
    n_experts: u32,
    #[define(I)] _dtype: StorageType,
) {
    let chunk = CUBE_POS as u32;
    let first = chunk * CHUNK;
    if first >= slots {
        terminate!();
    }
    let mut experts = SharedMemory::<u32>::new(CHUNK as usize);
    load::<I>(chosen, &mut experts, first, slots, n_experts);
    let end = min(slots - first, CHUNK);
    for expert in range_stepped(UNIT_POS, n_experts, UNITS) {
        let mut count = 0u32;
        for at in 0..end {
            count += select(experts[at as usize] == expert, 1u32, 0u32);
        }
        counts[(chunk * n_experts + expert) as usize] = count;
    }
}

#[cube(launch_unchecked)]
fn scan_kernel(
    counts: &mut Array<u32>,
    starts: &mut Array<u32>,
    tiles: &mut Array<u32>,
    chunks: u32,
    n_experts: u32,
    tile_rows: u32,
    most_tiles: u32,
) {
    if CUBE_POS as u32 > 0 {
        terminate!();
    }
    let mut firsts = SharedMemory::<u32>::new(comptime!(MOST_EXPERTS + 1));
    let mut tile_firsts = SharedMemory::<u32>::new(comptime!(MOST_EXPERTS + 1));
    for expert in range_stepped(UNIT_POS, n_experts, UNITS) {
        let mut total = 0u32;
        for chunk in 0..chunks {
            total += counts[(chunk * n_experts + expert) as usize];
        }
        firsts[expert as usize] = total;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut place = 0u32;
        let mut tile = 0u32;
        for expert in 0..n_experts {
            let total = firsts[expert as usize];
            firsts[expert as usize] = place;
            tile_firsts[expert as usize] = tile;
            place += total;
            tile += total.div_ceil(tile_rows);
        }
        firsts[n_experts as usize] = place;
        tile_firsts[n_experts as usize] = tile;
    }
    sync_cube();
    for expert in range_stepped(UNIT_POS, n_experts + 1, UNITS) {
        starts[expert as usize] = firsts[expert as usize];
    }
    for expert in range_stepped(UNIT_POS, n_experts, UNITS) {
        let first = firsts[expert as usize];
        let mut place = first;
        for chunk in 0..chunks {
            let at = (chunk * n_experts + expert) as usize;
            let count = counts[at];
            counts[at] = place;
            place += count;
        }
        let tile = tile_firsts[expert as usize];
        for at in tile..tile_firsts[(expert + 1) as usize] {
            tiles[(4 * at) as usize] = expert;
            tiles[(4 * at + 1) as usize] = first + (at - tile) * tile_rows;
            tiles[(4 * at + 2) as usize] = first;
            tiles[(4 * at + 3) as usize] = firsts[(expert + 1) as usize];
        }
    }
    for at in range_stepped(tile_firsts[n_experts as usize] + UNIT_POS, most_tiles, UNITS) {
        tiles[(4 * at) as usize] = n_experts;
    }
}

#[cube(launch_unchecked)]
fn place_kernel<I: Int>(
    chosen: &Array<I>,
    places: &Array<u32>,
    order: &mut Array<u32>,
    slots: u32,
    n_experts: u32,
    #[define(I)] _dtype: StorageType,
) {
    let chunk = CUBE_POS as u32;
    let first = chunk * CHUNK;
    if first >= slots {
        terminate!();
    }
    let mut experts = SharedMemory::<u32>::new(CHUNK as usize);
    load::<I>(chosen, &mut experts, first, slots, n_experts);
    let end = min(slots - first, CHUNK);
    for expert in range_stepped(UNIT_POS, n_experts, UNITS) {
        let mut place = places[(chunk * n_experts + expert) as usize];
        for at in 0..end {
            if experts[at as usize] == expert {
                order[place as usize] = first + at;
                place += 1;
            }
        }
    }
}
