//! The CUDA C++ kernels of all operations, by device family.

use super::{attention, decode_step, head_loss, head_sample, linear, norm};
use crate::cuda::Arch;

/// A CUDA C++ kernel with all compile-time values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaSource {
    /// Its name, unique per target.
    pub name: String,
    /// Its target in NVIDIA's compilers: `sm_90a`.
    pub target: &'static str,
    /// Its complete source.
    pub source: String,
}

/// The CUDA C++ kernels in bf16, for tools that inspect compiled code. None of them may spill
/// registers.
///
/// For attention with dropout they include two masks; under the other two, its backward pass spills
/// up to 8 bytes in a warp that only loads. Of fused decode steps for few rows they include only
/// those for any shape with one row, and not with both weights and cache in INT8: others spill some
/// 20 bytes per thread, and more with eight rows.
pub fn cuda_sources() -> Vec<CudaSource> {
    let table = [
        (Arch::Sm90, linear::hopper_sources().collect::<Vec<_>>()),
        (Arch::Sm90, attention::hopper_sources().collect()),
        (Arch::Sm90, norm::hopper_sources().collect()),
        (Arch::Sm90, head_loss::hopper_sources().collect()),
        (Arch::Sm90, decode_step::hopper_sources().collect()),
        (Arch::Sm90, head_sample::hopper_sources().collect()),
    ];
    let of_arch = |(arch, sources): (Arch, Vec<(String, String)>)| {
        sources.into_iter().map(move |(name, source)| CudaSource { name, target: arch.target(), source })
    };
    table.into_iter().flat_map(of_arch).collect()
}
