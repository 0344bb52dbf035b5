//! The kernels in CUDA C++ of all operations, by the family of devices that they are for.

use super::{attention, decode_step, head_loss, head_sample, linear, norm};
use crate::cuda::Arch;

/// A kernel in CUDA C++, with all that it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaSource {
    /// What tells it from the others of its target.
    pub name: String,
    /// What it is compiled for, as NVIDIA's compilers call it: `sm_90a`.
    pub target: &'static str,
    /// All of its source.
    pub source: String,
}

/// The kernels in CUDA C++ in bf16: for tools that look at what compilers make of them. None of them may spill registers.
///
/// Of attention with dropout two masks are among them; under the other two its backward pass spills up to 8 bytes in a warp
/// that only reads. Whole decode steps of few rows are among them only for models of any shape, and one row, and not with both
/// weights and a cache of INT8: others spill some 20 bytes a thread, and more with eight rows.
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
