//! Chooses the GEMM on CUDA and WGPU by shape, dtype and device. Nothing else decides this.
//!
//! ```text
//! few rows, 16-bit, Hopper, aligned -> CUDA C++ (../cuda/few_rows); see `takes_few_rows`: 9 to 128
//!                                      rows; from one row for a weight as large as a head's; up to
//!                                      256 rows for smaller ones; more rows if outputs are few
//! rows <= SKINNY_ROWS ---------------> skinny (weight read once; norm and epilogue in the launch)
//!     16-bit, aligned, tensor cores -> skinny/tensor_cores; many outputs of 9 to 32 rows:
//!                                      skinny/stream
//!     else --------------------------> skinny/simt
//! more rows -------------------------> gemm
//!     f32 or 16-bit, Ampere or later, large, aligned: CUDA C++ (../cuda), for Hopper or Ampere;
//!                                  exact f32 only on devices with fast TF32; on Hopper also if one
//!                                  side of a 16-bit product is narrow, as those of adapters
//!     16-bit, device has TMA, large -> cubek's warp-specialized TMA kernel (Gemm::Tma)
//!     f32, TF32 not requested -------> gemm_simt (Gemm::Simt)
//!     16-bit, small, aligned --------> gemm_tensor_cores (Gemm::TensorCores)
//!     else --------------------------> cubek's own choice (Gemm::Cubek)
//! ```
//!
//! Thresholds were measured (`docs/log/2026-11.md`); nothing is tuned at run time. Thresholds that
//! depend on the device's size are multiples of its multiprocessors.

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

/// Maximum rows of a skinny product: two tiles of `mma`, which has sixteen rows. Its time is that
/// of reading the weight, so it reads the weight once, and norm and epilogue run in the same
/// launch. With more rows, a GEMM gains more by reusing the weight.
pub(crate) const SKINNY_ROWS: usize = 32;

/// The GEMM for few rows: up to `SKINNIEST` rows (half a tile of `mma`), weights need
/// `LARGE_WEIGHT` elements, as a head's; with more rows, `FEW_ROWS_WEIGHT`.
#[cfg(feature = "cuda")]
const SKINNIEST: usize = 8;
#[cfg(feature = "cuda")]
const LARGE_WEIGHT: usize = 1 << 24;
#[cfg(feature = "cuda")]
const FEW_ROWS_WEIGHT: usize = 1 << 18;

/// Edge of a cube's tile in `cubek`'s kernels without TMA.
const TILE: usize = 128;
/// A cube's tile in the TMA kernel, `[rows, columns]`.
pub(crate) const TMA_TILE: [usize; 2] = [256, 128];
/// Shared memory of the TMA kernel, in bytes, rounded down: two stages of 64 columns of both
/// matrices, and the result.
const TMA_SHARED_BYTES: usize = 112 << 10;

/// Minimum length of a split-K slice: a shorter one ends before its pipeline is full.
const MIN_SLICE: usize = 512;
/// Maximum number of split-K slices: each writes a matrix of f32 sums, which is read again.
const MAX_SLICES: usize = 32;
/// Minimum number of slices: two do not make up for the launch that adds them.
const MIN_SLICES: usize = 4;
/// Multiplications of a multiprocessor's tensor cores per byte of its share of memory bandwidth:
/// 1e12 per second, and 3.3e12 bytes per second for 132 multiprocessors.
const MULTIPLICATIONS_PER_BYTE: f64 = 40.0;

/// Maximum multiplications of the small tensor-core GEMM. Its 64x64 tile reads operands twice as
/// often as larger tiles do, which pays only if a launch costs as much as the product.
const MOST_SMALL: usize = 1 << 28;

/// Minimum of a side of a 16-bit product for Hopper's GEMM, whose tile is mostly empty then: it
/// takes as long as reading the other matrix, which other kernels read more slowly.
const NARROWEST: usize = 8;

/// Edge of the SIMT GEMM's tile, and its minimum number of tiles: with fewer, smaller tiles fill
/// the device better.
const SIMT_TILE: usize = gemm_simt::EDGE;
const FEWEST_SIMT_TILES: usize = 16;
/// The SIMT GEMM splits K until each multiprocessor has this many tiles.
const SIMT_TILES_EACH: usize = 4;

/// A GEMM and its number of split-K slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gemm {
    /// `cubek`'s warp-specialized kernel, with operands loaded by TMA.
    Tma,
    /// Our f32 kernel without tensor cores.
    Simt { split_k: usize },
    /// Our kernel for small 16-bit matrices.
    TensorCores { split_k: usize },
    /// `cubek`'s choice.
    Cubek { split_k: usize },
}

/// Whether a CUDA C++ GEMM supports the size of a product `[m, n, k]` in `dtype`, and the device
/// has one. With fewer rows than a tile, reading the weight dominates. In 16 bits, of the products
/// that the GEMM for few rows does not take, this GEMM reads the weight fastest.
pub(crate) fn takes_cuda<R: CubeRuntime>(x: &CubeTensor<R>, dtype: DType, [m, n, k]: [usize; 3]) -> bool {
    let few = m > SKINNY_ROWS && m <= TILE && n * k > TILE * TILE * 16;
    let many = m >= TILE && m * n * k > MOST_SMALL;
    let large = n >= TILE && if dtype == DType::F32 { many } else { dtype.size() == 2 && (few || many) };
    let narrow = m.min(n) >= NARROWEST && m.max(n) >= TILE && m * n * k >= MOST_SMALL && dtype.size() == 2;
    #[cfg(feature = "cuda")]
    return large && cuda::family(x).is_some() || narrow && cuda::takes(x, Arch::Sm90);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (x, large, narrow);
        false
    }
}

/// Whether the Hopper GEMM for few rows supports a product `[m, n, k]` of 16-bit `x`. Up to eight
/// rows, skinny kernels have shorter latency; this kernel is faster only for large weights.
#[cfg(feature = "cuda")]
pub(crate) fn takes_few_rows<R: CubeRuntime>(x: &CubeTensor<R>, [m, n, k]: [usize; 3]) -> bool {
    let worth = m > 0 && if m <= SKINNIEST { n * k >= LARGE_WEIGHT } else { n >= TILE && n * k >= FEW_ROWS_WEIGHT };
    // Each tile of rows reads the whole weight.
    let once = m <= TILE || m <= 2 * TILE && n * k < LARGE_WEIGHT;
    // A tile of the Hopper GEMM occupies two multiprocessors. At most half of them would have one.
    let idle = || 4 * m.div_ceil(2 * TILE) * n.div_ceil(TILE) <= multiprocessors(x) as usize;
    x.dtype.size() == 2 && worth && k.is_multiple_of(8) && cuda::takes(x, Arch::Sm90) && (once || idle())
}

/// Chooses the GEMM of `a` `[m, k]` and `b` `[k, n]`. Both have the same dtype and one stride of 1.
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

/// Whether the TMA kernel supports a product `[m, n, k]` in `dtype`: 16-bit elements, rows aligned
/// to 16 bytes, and a large result.
pub(crate) fn takes_tma<R: CubeRuntime>(x: &CubeTensor<R>, dtype: DType, [m, n, k]: [usize; 3]) -> bool {
    let properties = x.client.properties();
    let has_tma =
        properties.features.tma.contains(Tma::Base) && properties.hardware.max_shared_memory_size >= TMA_SHARED_BYTES;
    has_tma && dtype.size() == 2 && is_large(m, n) && (k * dtype.size()).is_multiple_of(16)
}

/// Whether the result has at least sixteen tiles.
pub(crate) fn is_large(m: usize, n: usize) -> bool {
    m >= TILE && n >= TILE && m * n >= 16 * TILE * TILE
}

/// The number of split-K slices that minimizes the TMA kernel's time: tiles of all slices should
/// fill the multiprocessors in whole waves, and slices' sums have to be written and read.
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

/// The number of split-K slices without TMA: enough for one tile per multiprocessor.
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

/// The number of split-K slices of the SIMT GEMM, if it supports the size and the device has
/// nothing faster for f32.
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
    // At least half of a tile must be used.
    (m.min(n) >= SIMT_TILE / 2 && tiles * slices >= FEWEST_SIMT_TILES).then_some(slices)
}
