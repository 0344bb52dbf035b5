//! The GEMM for Ampere and later, in CUDA C++ (`sm80/gemm.cu`): how a product is cut, and its
//! launch.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::device::{Device, DeviceId};
use cubecl::server::Handle;

use super::{Epilogue, Numbers, Traits};
use crate::cubecl::contiguous;
use crate::cuda::{self, AMPERE, Arguments, CudaKernel, Tried, shared_bytes};
use crate::multiprocessors::multiprocessors;
use crate::ops::dropout::Dropout;

/// Bytes of K in a stage, and as many numbers of 16 bits; and bytes of a list of works in shared
/// memory for each stage and one more.
const DEPTH_BYTES: usize = 64;
pub(super) const DEPTH: usize = DEPTH_BYTES / 2;
const WORK_BYTES: usize = 32;
/// Shared memory that the system reserves per block: a multiprocessor has this much more than a
/// block may take.
const RESERVED_BYTES: usize = 1 << 10;

/// A tile that a block computes, and what it costs, in microseconds on an H200: a stage, the end,
/// the parts of tiles that are cut, and each further part of one. Fitted to ten products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tile {
    rows: usize,
    columns: usize,
    /// Warps along its rows and columns.
    warps: [usize; 2],
    /// Blocks of a multiprocessor.
    blocks: usize,
    most_stages: usize,
    costs: Costs,
}

/// In nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Costs {
    stage: u32,
    end: u32,
    cut: u32,
    part: u32,
}

const LARGE: Costs = Costs { stage: 560, end: 2500, cut: 4000, part: 2500 };
/// A warp has 64 x 64 sums in registers: all that there are, with two warps for each quarter of a
/// multiprocessor.
const TILES: [Tile; 3] = [
    Tile { rows: 128, columns: 256, warps: [2, 4], blocks: 1, most_stages: 4, costs: LARGE },
    Tile { rows: 256, columns: 128, warps: [4, 2], blocks: 1, most_stages: 4, costs: LARGE },
    Tile {
        rows: 128,
        columns: 128,
        warps: [2, 2],
        blocks: 2,
        most_stages: 4,
        costs: Costs { stage: 640, end: 1500, cut: 4000, part: 2500 },
    },
];
/// That of exact f32, of which a warp has sums twice.
const SPLIT_TILES: [Tile; 1] = [Tile {
    rows: 128,
    columns: 128,
    warps: [2, 4],
    blocks: 1,
    most_stages: 4,
    costs: Costs { stage: 400, end: 2500, cut: 4000, part: 2500 },
}];
/// The most threads and sums of a block.
const MOST_THREADS: usize = 256;
const MOST_SUMS: usize = 128;

impl Tile {
    fn threads(&self) -> usize {
        32 * self.warps[0] * self.warps[1]
    }

    fn stage_bytes(&self) -> usize {
        (self.rows + self.columns) * DEPTH_BYTES
    }

    /// Bytes of shared memory with so many stages.
    fn bytes(&self, stages: usize) -> usize {
        stages * self.stage_bytes() + (stages + 1) * WORK_BYTES
    }

    /// Stages where a block may take so many bytes of shared memory; none if these are too few.
    fn stages(&self, most_bytes: usize) -> Option<usize> {
        let room = (most_bytes + RESERVED_BYTES) / self.blocks - RESERVED_BYTES;
        (3..=self.most_stages).rev().find(|stages| self.bytes(*stages) <= room)
    }

    /// Tiles of a result along both sides, where half of the columns are gates' if it is `gated`.
    fn across(&self, [m, n]: [usize; 2], gated: bool) -> [usize; 2] {
        [m.div_ceil(self.rows), n.div_ceil(self.columns / (1 + usize::from(gated)))]
    }
}

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GemmAmpere {
    traits: Traits,
    tile: Tile,
    stages: usize,
}

/// A kernel, and how many tiles its blocks compute as a whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct AmperePlan {
    kernel: GemmAmpere,
    whole_tiles: usize,
}

impl CudaKernel for GemmAmpere {
    fn threads(&self) -> u32 {
        self.tile.threads() as u32
    }

    fn entry(&self) -> &'static str {
        "gemm_ampere"
    }

    fn source(&self) -> String {
        let Self { traits, tile, stages } = *self;
        let defined = [
            ("ROWS", tile.rows),
            ("COLUMNS", tile.columns),
            ("DEPTH_BYTES", DEPTH_BYTES),
            ("WARPS_M", tile.warps[0]),
            ("WARPS_N", tile.warps[1]),
            ("BLOCKS", tile.blocks),
            ("DOUBLE", 1),
            ("STAGES", stages),
        ];
        let defined = traits.defines() + &cuda::defines(defined);
        format!("{defined}{AMPERE}{}", include_str!("sm80/gemm.cu"))
    }

    fn shared_bytes(&self) -> usize {
        self.tile.bytes(self.stages)
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<GemmAmpere> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels of training in bf16, for devices with this shared memory per block: each with the
/// first tile, the plain one with all. Unless `all` are asked for, one of each output dtype.
pub(super) fn kernels(most_bytes: usize, all: bool) -> impl Iterator<Item = GemmAmpere> {
    let plain = Traits::plain(Numbers::Bf16);
    let f32 = |numbers| Traits { out_f32: true, ..Traits::plain(numbers) };
    let of_first = Traits::of_training().into_iter().map(|traits| (traits, TILES[0]));
    let others = TILES.into_iter().skip(1).map(move |tile| (plain, tile));
    let of_f32 = [(f32(Numbers::Tf32), TILES[0]), (f32(Numbers::SplitF32), SPLIT_TILES[0])];
    let wanted =
        move |(traits, tile): &(Traits, Tile)| all || *tile == TILES[0] && (*traits == plain || traits.row_sums);
    let kernel =
        move |(traits, tile): (Traits, Tile)| tile.stages(most_bytes).map(|stages| GemmAmpere { traits, tile, stages });
    of_first.chain(others).chain(of_f32).filter(wanted).filter_map(kernel)
}

/// The kernel for a product, and how it is cut; none where no tile is for it.
pub(super) fn plan<R: CubeRuntime>(x: &CubeTensor<R>, traits: Traits, [m, n, k]: [usize; 3]) -> Option<AmperePlan> {
    let plan = choose(traits, [m, n, k], multiprocessors(x) as usize, shared_bytes(x))?;
    works(x, plan.kernel).then_some(plan)
}

/// The tile that takes the least time, and how many of them are whole: the others are cut along K.
fn choose(traits: Traits, [m, n, k]: [usize; 3], multiprocessors: usize, most_bytes: usize) -> Option<AmperePlan> {
    let Traits { numbers, gated, slopes, activation, dropout, .. } = traits;
    let tiles: &[Tile] = if numbers == Numbers::SplitF32 { &SPLIT_TILES } else { &TILES };
    // Of what has two halves all tiles are whole; columns of a tile that drops have one high half.
    let halves = gated || activation == 0 && slopes == 2;
    let allowed = |tile: &Tile| {
        let whole = n.is_multiple_of(tile.columns / (1 + usize::from(gated)));
        let one_half = n <= 1 << 17 || (1usize << 17).is_multiple_of(tile.columns);
        (!halves || whole) && (!dropout || one_half)
    };
    let stages = numbers.stages_of(k, DEPTH_BYTES) as f64;
    let mut best: Option<(f64, AmperePlan)> = None;
    for tile in tiles.iter().copied().filter(allowed) {
        let Some(ring) = tile.stages(most_bytes) else { continue };
        let Costs { stage, end, cut, part } = tile.costs;
        let blocks = multiprocessors * tile.blocks;
        let [rows, columns] = tile.across([m, n], gated);
        let (all, full) = (rows * columns, rows * columns / blocks);
        for rounds in [all.div_ceil(blocks), full, full.saturating_sub(1)] {
            let cut_tiles = all.saturating_sub(rounds * blocks);
            let mut time = rounds as f64 * (stages * f64::from(stage) + f64::from(end));
            if cut_tiles > 0 {
                let parts = blocks as f64 / cut_tiles as f64;
                time += stages * f64::from(stage) / parts + f64::from(end + cut) + f64::from(part) * parts;
            }
            let kernel = GemmAmpere { traits, tile, stages: ring };
            let plan = AmperePlan { kernel, whole_tiles: all.min(rounds * blocks) };
            if best.is_none_or(|(least, _)| time < least) {
                best = Some((time, plan));
            }
        }
    }
    best.map(|(_, plan)| plan)
}

impl AmperePlan {
    pub(super) fn launch<R: CubeRuntime>(
        self,
        a: &CubeTensor<R>,
        b: &CubeTensor<R>,
        bias: Option<CubeTensor<R>>,
        epilogue: Epilogue<R>,
        out: &CubeTensor<R>,
    ) {
        let Self { kernel, whole_tiles } = self;
        let GemmAmpere { traits, tile, .. } = kernel;
        let [m, mut k, mut n] = [a.meta.shape()[0], a.meta.shape()[1], out.meta.shape()[1]];
        if traits.activation == 0 {
            n /= traits.slopes.max(1);
        }
        if traits.numbers == Numbers::SplitF32 {
            k /= 2;
        }
        let size = a.dtype.size();
        // Chunks of 16 bytes between two lines, and bytes between those of a thread.
        let strides = |line: usize, along_k: bool| {
            let across = if along_k { DEPTH_BYTES / 16 } else { 8 };
            [line * size / 16, line * size * (tile.threads() / across)]
        };
        let a_strides = strides(a.meta.strides()[usize::from(traits.a_major_m)], !traits.a_major_m);
        let b_strides = strides(b.meta.strides()[usize::from(!traits.b_major_n)], !traits.b_major_n);
        let bias = bias.map(contiguous);
        let bias_kind = bias.as_ref().map_or(0, |bias| if bias.dtype == DType::F32 { 1 } else { 2 });
        let dropout = epilogue.dropout();
        let (adds, other) = epilogue.other();
        let other_stride = other.as_ref().map_or(0, |other| other.meta.strides()[0]);
        let [rows, columns] = tile.across([m, n], traits.gated);
        let stages = traits.numbers.stages_of(k, DEPTH_BYTES);
        let blocks = multiprocessors(a) as usize * tile.blocks;
        let cut = (rows * columns - whole_tiles) * stages;
        let [partial, ready] = match cut {
            0 => [out.clone(), out.clone()],
            _ => cut_buffers(a, blocks),
        };
        let arguments = Arguments::default().pointer(a).pointer(b).pointer(out);
        let arguments = arguments.pointer(other.as_ref().unwrap_or(out)).pointer(bias.as_ref().unwrap_or(out));
        let sizes = [m, n, k].into_iter().chain(a_strides).chain(b_strides).chain([other_stride]);
        let cuts = [rows, columns, stages, whole_tiles, cut / blocks, cut % blocks];
        let words = sizes.chain(cuts).chain([bias_kind, adds.into()]);
        let arguments = words.fold(arguments.pointer(&partial).pointer(&ready), Arguments::word);
        let arguments = arguments.words(Dropout::words(dropout));
        // SAFETY: the matrices are read in chunks of 16 bytes, which begin at multiples of these
        // and do not cross the ends of lines, as `Traits::of` found; results, slopes and residuals
        // are read and written below m and n, in pieces of 16 bytes of rows that are so aligned, or
        // pairs of f32; the sums of rows over each stage below m, of which there are as many as the
        // host made of the stages; the bias below the columns of `b`, of which the caller found it
        // to have as many; each block has a place of its own for what it leaves of a tile.
        unsafe { cuda::launch(a, kernel, blocks as u32, arguments) };
    }
}

/// What is left of tiles that are cut along K, and marks of where that is ready.
///
/// Kept per thread, as one stream of launches has them in turn.
fn cut_buffers<R: CubeRuntime>(like: &CubeTensor<R>, blocks: usize) -> [CubeTensor<R>; 2] {
    thread_local! {
        static KEPT: RefCell<HashMap<DeviceId, Handle>> = RefCell::new(HashMap::new());
    }
    let elements = multiprocessors(like) as usize * MOST_THREADS * MOST_SUMS;
    let handle = KEPT.with_borrow_mut(|kept| {
        kept.entry(like.device.to_id()).or_insert_with(|| like.client.empty(elements * 4)).clone()
    });
    let (client, device) = (like.client.clone(), like.device.clone());
    let partial = CubeTensor::new_contiguous(client, device, [elements].into(), handle, DType::F32);
    [partial, cuda::marks(like, blocks)]
}

/// Whether the kernel runs on the device of `x`: tried on a product of one tile.
fn works<R: CubeRuntime>(x: &CubeTensor<R>, kernel: GemmAmpere) -> bool {
    cuda::works(x, &kernel, "products take the portable kernels", || {
        let GemmAmpere { traits, tile, .. } = kernel;
        let depth = DEPTH_BYTES / x.dtype.size() * if traits.numbers == Numbers::SplitF32 { 2 } else { 1 };
        let (operands, out, epilogue) = traits.operands(x, [tile.rows, tile.columns, depth], 1);
        let [a, b] = operands.first;
        AmperePlan { kernel, whole_tiles: 1 }.launch(&a, &b, None, epilogue, &out);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LITTLE: usize = 99 << 10;

    #[test]
    fn every_tile_fits_into_shared_memory_with_three_stages_or_more() {
        for tile in TILES.into_iter().chain(SPLIT_TILES) {
            for most in [LITTLE, 163 << 10, 227 << 10] {
                let Some(stages) = tile.stages(most) else { panic!("{tile:?} has no room in {most} bytes") };
                assert!(tile.blocks * (tile.bytes(stages) + RESERVED_BYTES) <= most + RESERVED_BYTES, "{tile:?}");
            }
            // Sums of a thread, and the room for those of blocks that run at once.
            let sums = tile.rows * tile.columns / tile.threads();
            assert!(sums <= MOST_SUMS && tile.blocks * tile.threads() * sums <= MOST_THREADS * MOST_SUMS, "{tile:?}");
        }
    }

    #[test]
    fn every_tile_is_computed_and_few_blocks_wait() {
        for m in [128, 300, 2048, 16_384, 65_536] {
            for n in [128, 384, 776, 3072, 50_432] {
                for k in [64, 768, 8192, 16_384] {
                    let plan = choose(Traits::plain(Numbers::Bf16), [m, n, k], 108, 163 << 10);
                    let Some(AmperePlan { kernel, whole_tiles }) = plan else { panic!("there is a tile for all") };
                    let [rows, columns] = kernel.tile.across([m, n], false);
                    let blocks = 108 * kernel.tile.blocks;
                    assert!(whole_tiles == rows * columns || whole_tiles.is_multiple_of(blocks), "{m}x{n}x{k}");
                    // Those that are left are cut among all blocks.
                    assert!(rows * columns - whole_tiles < 2 * blocks, "{m}x{n}x{k}");
                }
            }
        }
    }
}
