//! Which GEMM runs on CUDA and WGPU, by shape, dtype and device: the one place that decides.
//!
//! ```text
//! 9 to 128 rows, 16-bit, Hopper, aligned ---> few rows, in CUDA C++ (../cuda/few_rows); of weights as large as a head's from one row on, of
//!     smaller ones up to 256, and more of them where there are few outputs: 1,024 of 1,024
//! rows <= SKINNY_ROWS ---> skinny (one pass over the weight; norm, bias, activation and residual in the same launch)
//!     16-bit, aligned, tensor cores -----> skinny/tensor_cores; many outputs of 9 to 32 rows: skinny/stream
//!     else ------------------------------> skinny/simt
//! more rows ---> gemm
//!     16-bit or f32, Ampere or later, large, aligned -> ours in CUDA C++ (../cuda): sm90 on Hopper, else sm80; exact f32 only where TF32 is fast
//!     16-bit, device has TMA, large -----> cubek's warp-specialised kernel behind TMA (Gemm::Tma)
//!     f32, not asked for in TF32 --------> gemm_simt (Gemm::Simt)
//!     16-bit, small, aligned ------------> gemm_tensor_cores (Gemm::TensorCores)
//!     else ------------------------------> cubek's own choice (Gemm::Cubek)
//! ```
//!
//! Thresholds were measured (`docs/log/2026-11.md`); nothing is tuned at run time. What depends on
//! how large the device is is counted in its multiprocessors.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::features::Tma;
use cubecl::prelude::*;

use super::cubecl::{gemm_simt, gemm_tensor_cores};
use crate::cubecl::tensor_cores::has_tensor_cores;
#[cfg(feature = "cuda")]
use crate::cuda::{self, Arch};
use crate::multiprocessors::multiprocessors;
use crate::products::takes_tf32;

/// Up to so many rows, two tiles of `mma`'s sixteen, a projection is skinny: all its time goes into
/// reading the weight, so it is read once, and the norm before the product and its epilogue run in
/// the same launch. With more rows, reusing the weight in a GEMM is worth more.
pub(crate) const SKINNY_ROWS: usize = 32;

/// Rows of the skinniest products, a tile of `mma`; elements of a weight that is large, as a head's
/// is; and the fewest that more rows are worth a GEMM for.
#[cfg(feature = "cuda")]
const SKINNIEST: usize = 8;
#[cfg(feature = "cuda")]
const LARGE_WEIGHT: usize = 1 << 24;
#[cfg(feature = "cuda")]
const FEW_ROWS_WEIGHT: usize = 1 << 18;

/// Edge of the tile that a cube computes in `cubek`'s kernels without TMA.
const TILE: usize = 128;
/// The tile of a cube in the kernel behind TMA, rows and columns.
pub(crate) const TMA_TILE: [usize; 2] = [256, 128];
/// Bytes of shared memory that this takes, or somewhat less: two stages of 64 columns of both
/// matrices, and the result.
const TMA_SHARED_BYTES: usize = 112 << 10;

/// A slice of split-K is at least so long: a shorter one is over before its pipeline is full.
const MIN_SLICE: usize = 512;
/// The most slices of split-K: each is a matrix of f32 sums that is written and read again.
const MAX_SLICES: usize = 32;
/// The fewest: two do not make up for the launch that adds them.
const MIN_SLICES: usize = 4;
/// Multiplications that a multiprocessor with tensor cores does in the time in which the memory
/// moves a byte for it: 1e12 a second against 3.3e12 bytes for 132 of them.
const MULTIPLICATIONS_PER_BYTE: f64 = 40.0;

/// The most multiplications of the small tensor-core GEMM: its tile of 64 by 64 reads each operand
/// twice as often as the larger ones, which pays only where a launch costs as much as the product.
const MOST_SMALL: usize = 1 << 28;

/// Edge of the SIMT GEMM's tile, and the fewest tiles that it is for: with fewer, smaller tiles
/// fill the device better.
const SIMT_TILE: usize = gemm_simt::EDGE;
const FEWEST_SIMT_TILES: usize = 16;
/// Tiles for each multiprocessor up to which the SIMT GEMM splits K.
const SIMT_TILES_EACH: usize = 4;

/// A GEMM and the slices of K that it is split into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gemm {
    /// `cubek`'s warp-specialised kernel, its operands brought by TMA.
    Tma,
    /// Our own in f32, by f32 units.
    Simt { split_k: usize },
    /// Our own for small 16-bit matrices.
    TensorCores { split_k: usize },
    /// What `cubek` chooses.
    Cubek { split_k: usize },
}

/// Whether a product `[m, n, k]` within `dtype` is for a GEMM in CUDA C++, as far as its size
/// goes. With fewer rows than a tile has, reading the weight takes most of the time, and of what
/// the GEMM for few rows leaves this one reads it fastest, large or not, in 16 bits.
pub(crate) fn takes_cuda<R: CubeRuntime>(x: &CubeTensor<R>, dtype: DType, [m, n, k]: [usize; 3]) -> bool {
    let few = m > SKINNY_ROWS && m <= TILE && n * k > TILE * TILE * 16;
    let many = m >= TILE && m * n * k > MOST_SMALL;
    let large = n >= TILE && if dtype == DType::F32 { many } else { dtype.size() == 2 && (few || many) };
    #[cfg(feature = "cuda")]
    return large && cuda::family(x).is_some();
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (x, large);
        false
    }
}

/// Whether a product `[m, n, k]` of 16-bit `x` is for the GEMM for few rows on Hopper, as far as
/// its size goes. Up to eight rows the skinny kernels wait less; only where the weight is large,
/// this one reads it faster.
#[cfg(feature = "cuda")]
pub(crate) fn takes_few_rows<R: CubeRuntime>(x: &CubeTensor<R>, [m, n, k]: [usize; 3]) -> bool {
    let worth = m > 0 && if m <= SKINNIEST { n * k >= LARGE_WEIGHT } else { n >= TILE && n * k >= FEW_ROWS_WEIGHT };
    // Each tile of rows reads the whole weight.
    let once = m <= TILE || m <= 2 * TILE && n * k < LARGE_WEIGHT;
    // A tile of the GEMM for Hopper is two multiprocessors', and at most half of them would have
    // one.
    let idle = || 4 * m.div_ceil(2 * TILE) * n.div_ceil(TILE) <= multiprocessors(x) as usize;
    x.dtype.size() == 2 && worth && k.is_multiple_of(8) && cuda::takes(x, Arch::Sm90) && (once || idle())
}

/// The GEMM of `a` `[m, k]` and `b` `[k, n]`, both of one dtype and with a stride of one, into `[m,
/// n]`.
pub(crate) fn gemm<R: CubeRuntime>(a: &CubeTensor<R>, b: &CubeTensor<R>) -> Gemm {
    let sizes = [a.meta.shape()[0], b.meta.shape()[1], a.meta.shape()[1]];
    if takes_tma(a, a.dtype, sizes) {
        return Gemm::Tma;
    }
    if let Some(split_k) = simt_slices(a, sizes) {
        return Gemm::Simt { split_k };
    }
    let split_k = slices(a, sizes);
    let [m, n, k] = sizes;
    let small = m * n * k <= MOST_SMALL && has_tensor_cores(a);
    match small && gemm_tensor_cores::supports(a, b, split_k) {
        true => Gemm::TensorCores { split_k },
        false => Gemm::Cubek { split_k },
    }
}

/// Whether a product `[m, n, k]` within `dtype` goes to the kernel behind TMA: it wants 16-bit
/// elements, of which each row begins at a multiple of 16 bytes, and enough of them.
pub(crate) fn takes_tma<R: CubeRuntime>(x: &CubeTensor<R>, dtype: DType, [m, n, k]: [usize; 3]) -> bool {
    let properties = x.client.properties();
    let has_tma =
        properties.features.tma.contains(Tma::Base) && properties.hardware.max_shared_memory_size >= TMA_SHARED_BYTES;
    has_tma && dtype.size() == 2 && is_large(m, n) && (k * dtype.size()).is_multiple_of(16)
}

/// Whether there is a tile for each of several multiprocessors.
pub(crate) fn is_large(m: usize, n: usize) -> bool {
    m >= TILE && n >= TILE && m * n >= 16 * TILE * TILE
}

/// The split of K behind TMA that takes the least time: the tiles of all slices should fill the
/// multiprocessors a whole number of times, or nearly so, and their sums want to be written and
/// read.
pub(crate) fn tma_slices([m, n, k]: [usize; 3], multiprocessors: usize) -> usize {
    let [rows, columns] = TMA_TILE;
    let tiles = m.div_ceil(rows) * n.div_ceil(columns);
    let time = |slices: usize| {
        let waves = (tiles * slices).div_ceil(multiprocessors);
        let sums = if slices == 1 { 0 } else { 8 * (slices + 1) * m * n };
        let moved = sums as f64 / multiprocessors as f64 * MULTIPLICATIONS_PER_BYTE;
        (waves * rows * columns) as f64 * (k / slices) as f64 + moved
    };
    let allowed = |slices: &usize| *slices == 1 || k.is_multiple_of(slices * 8) && k / slices >= MIN_SLICE;
    let options = (0..).map(|power| 1 << power).take_while(|slices| *slices <= MAX_SLICES).filter(allowed);
    options.min_by(|a, b| time(*a).total_cmp(&time(*b))).unwrap_or(1)
}

/// How many slices K is split into without TMA: until each multiprocessor has a tile.
fn slices<R: CubeRuntime>(x: &CubeTensor<R>, [m, n, k]: [usize; 3]) -> usize {
    let multiprocessors = multiprocessors(x) as usize;
    let tiles = m.div_ceil(TILE) * n.div_ceil(TILE);
    let mut slices = 1;
    while slices < MAX_SLICES
        && tiles * slices < multiprocessors
        && k.is_multiple_of(slices * 2)
        && k / (slices * 2) >= MIN_SLICE
    {
        slices *= 2;
    }
    if slices < MIN_SLICES { 1 } else { slices }
}

/// The split of K of the SIMT GEMM, if it is for these sizes and there is nothing faster for f32 on
/// the device.
fn simt_slices<R: CubeRuntime>(a: &CubeTensor<R>, [m, n, k]: [usize; 3]) -> Option<usize> {
    let properties = a.client.properties();
    let floats = [f32::as_type_native_unchecked(), cubecl::tf32::as_type_native_unchecked()].map(|x| x.storage_type());
    let tensor_cores =
        takes_tf32() && properties.features.matmul.cmma.iter().any(|product| floats.contains(&product.a_type));
    let room = properties.hardware.max_shared_memory_size >= gemm_simt::SHARED_BYTES;
    if a.dtype != DType::F32 || tensor_cores || !room {
        return None;
    }
    let tiles = m.div_ceil(SIMT_TILE) * n.div_ceil(SIMT_TILE);
    let enough = SIMT_TILES_EACH * multiprocessors(a) as usize;
    let mut slices = 1;
    while slices < MAX_SLICES
        && tiles * slices < enough
        && k.is_multiple_of(slices * 2 * gemm_simt::DEPTH)
        && k / (slices * 2) >= MIN_SLICE
    {
        slices *= 2;
    }
    // A tile should not be more than half empty.
    (m.min(n) >= SIMT_TILE / 2 && tiles * slices >= FEWEST_SIMT_TILES).then_some(slices)
}
