//! The CUDA C++ kernels of all operations, by device family.

use super::{attention, decode_step, experts, head_loss, head_sample, linear, norm};
use crate::cuda::arch::Target;
use crate::cuda::{self, Arch};

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
/// registers, but for a few at the end of a tile in the GEMM for Ampere.
///
/// For attention with dropout they include two masks; under the other two, its backward pass spills
/// up to 8 bytes in a warp that only loads. Of fused decode steps for few rows they include those
/// with four rows, and those for any shape with one row, not with both weights and cache in INT8:
/// others spill some 20 bytes per thread, and more with eight rows.
pub fn cuda_sources() -> Vec<CudaSource> {
    let hopper = [
        linear::hopper_sources().collect::<Vec<_>>(),
        attention::hopper_sources().collect(),
        norm::hopper_sources().collect(),
        head_loss::hopper_sources().collect(),
        decode_step::hopper_sources().collect(),
        experts::hopper_sources().collect(),
        head_sample::hopper_sources().collect(),
    ];
    let named = |target: &Target, (name, source)| CudaSource { name, target: target.name, source };
    let of_hopper =
        Arch::Sm90.targets().iter().flat_map(|target| hopper.concat().into_iter().map(move |it| named(target, it)));
    // All for the first target, a selection for the others.
    let of_ampere = Arch::Sm80.targets().iter().enumerate().flat_map(|(index, target)| {
        let (most_bytes, all) = (target.shared_bytes, index == 0);
        let sources = linear::ampere_sources(most_bytes, all)
            .chain(attention::ampere_sources(most_bytes, all))
            .chain(norm::ampere_sources(most_bytes, all));
        sources.map(move |it| named(target, it))
    });
    of_hopper.chain(of_ampere).collect()
}

/// The operations that have CUDA C++ kernels, with the families that these are for.
const FAMILIES: [(&str, &[Arch]); 9] = [
    ("linear", &[Arch::Sm80, Arch::Sm90]),
    ("lora", &[Arch::Sm90]),
    ("attention", &[Arch::Sm80, Arch::Sm90]),
    ("norm", &[Arch::Sm80, Arch::Sm90]),
    ("experts", &[Arch::Sm90]),
    ("head_loss", &[Arch::Sm90]),
    ("head_sample", &[Arch::Sm90]),
    ("decode_step", &[Arch::Sm90]),
    ("experts of few tokens", &[Arch::Sm90]),
];

/// Operations whose kernels of a family run [only if asked for](cuda::is_forced), until their parity
/// tests have run to their end on a device.
const ASKED_FOR: [(&str, Arch); 1] = [("attention", Arch::Sm80)];

/// Which operations have kernels of a family, and which run the portable ones.
pub(crate) fn families(family: Option<Arch>) -> String {
    let Some(family) = family else { return "portable".into() };
    let names = |has: bool| {
        let runs = |name: &str, families: &[Arch]| {
            families.contains(&family) && (cuda::is_forced() || !ASKED_FOR.contains(&(name, family)))
        };
        let of = FAMILIES.into_iter().filter(|(name, families)| runs(name, families) == has);
        of.map(|(name, _)| name).collect::<Vec<_>>().join(", ")
    };
    let (own, others) = (names(true), names(false));
    if others.is_empty() {
        family.name().to_string()
    } else {
        format!("{} for {own}; portable for {others}", family.name())
    }
}
