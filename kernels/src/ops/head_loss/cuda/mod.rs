//! The pass over rows of logits on Hopper, in CUDA C++ (`row_pass.cu`).

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use super::cubecl::target_rows::TargetRows;
use crate::cubecl::empty;
use crate::cuda::{self, Arch, Arguments, CudaKernel, HOPPER, HOPPER_SHARED_BYTES, Tried};
use crate::multiprocessors::multiprocessors;

/// Warps of a block, which share a row. Each lane has one warp's values, so there are 32.
const WARPS: usize = 32;
/// Values per part of a row.
const KINDS: usize = 4;
/// Rows of a block in shared memory: with only one it would wait for each.
const STAGES: std::ops::RangeInclusive<usize> = 2..=4;
/// Rows of smaller vocabularies are too short for this many warps.
const LEAST_VOCABULARY: usize = 24_576;

/// Compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct HeadLossHopper {
    /// The dtype of logits in the source.
    half: &'static str,
    vocabulary: usize,
    /// The type of targets in the source.
    target: &'static str,
}

impl HeadLossHopper {
    /// All warps' parts of a row.
    fn stage_bytes(&self) -> usize {
        self.vocabulary.div_ceil(8).div_ceil(WARPS) * WARPS * 16
    }

    /// The values of each part, twice, and barriers.
    fn other_bytes(&self) -> usize {
        2 * KINDS * WARPS * 4 + STAGES.end() * WARPS * 8
    }

    fn stages(&self) -> usize {
        ((HOPPER_SHARED_BYTES - self.other_bytes()) / self.stage_bytes()).min(*STAGES.end())
    }
}

impl CudaKernel for HeadLossHopper {
    fn threads(&self) -> u32 {
        (32 * WARPS) as u32
    }

    fn entry(&self) -> &'static str {
        "head_loss_hopper"
    }

    fn source(&self) -> String {
        let Self { half, vocabulary, target } = self;
        let stages = self.stages();
        let defined = [("VOCABULARY", *vocabulary), ("STAGES", stages), ("WARPS", WARPS), ("KINDS", KINDS)];
        let defined = cuda::defines(defined);
        let half = format!("#define HALF \"{half}\"\n#define TARGET {target}\n");
        format!("{half}{defined}{HOPPER}{}", include_str!("sm90/row_pass.cu"))
    }

    fn shared_bytes(&self) -> usize {
        self.stages() * self.stage_bytes() + self.other_bytes()
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<HeadLossHopper> = Mutex::new(None);
        &TRIED
    }
}

/// The bf16 kernels for GPT-2's vocabulary and its tiles, with names and sources.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    [50_257, 50_304]
        .into_iter()
        .map(|vocabulary| cuda::named(HeadLossHopper { half: "bf16", vocabulary, target: "int" }))
}

/// Writes the losses of rows of 16-bit `logits` `[rows, columns]` with row stride `stride` and, if
/// requested, replaces the first `vocabulary` columns with their gradient. Returns false if no
/// kernel supports the device and [the operands](HeadLossHopper::for_rows), or it does not run.
pub(super) fn loss_of_rows<R: CubeRuntime>(logits: &CubeTensor<R>, stride: usize, of: &TargetRows<R>) -> bool {
    let kernel = HeadLossHopper::for_rows(logits, stride, of).filter(|_| cuda::takes(logits, Arch::Sm90));
    let Some(kernel) = kernel.filter(|kernel| works(logits, *kernel)) else { return false };
    kernel.launch(logits, stride, of, multiprocessors(logits));
    true
}

impl HeadLossHopper {
    /// The kernel for these operands: 16-bit rows, aligned to 16 bytes, of whole vectors, neither
    /// too short nor too long.
    fn for_rows<R: CubeRuntime>(logits: &CubeTensor<R>, stride: usize, of: &TargetRows<R>) -> Option<Self> {
        let TargetRows { targets, nats, share, start, vocabulary, .. } = *of;
        let [rows, columns] = [logits.meta.shape()[0], logits.meta.shape()[1]];
        let half = cuda::half_name(logits.dtype.into())?;
        let target = match targets.dtype {
            DType::I32 => "int",
            DType::I64 => "long long",
            _ => return None,
        };
        let of_row = |x: &CubeTensor<R>| x.is_contiguous() && x.meta.num_elements() >= start + rows;
        let kernel = Self { half, vocabulary, target };
        let fits = vocabulary >= LEAST_VOCABULARY
            && STAGES.contains(&kernel.stages())
            // The last vector of a row is accessed as a whole.
            && vocabulary.next_multiple_of(8) <= columns
            && columns <= stride
            && stride.is_multiple_of(8)
            && logits.handle.offset_start.unwrap_or(0).is_multiple_of(16)
            && of_row(targets)
            && of_row(nats)
            && nats.dtype == DType::F32
            && share.is_none_or(|share| share.dtype == DType::F32 && logits.can_mut());
        fits.then_some(kernel)
    }

    fn launch<R: CubeRuntime>(self, logits: &CubeTensor<R>, stride: usize, of: &TargetRows<R>, blocks: u32) {
        assert_eq!(Self::for_rows(logits, stride, of), Some(self), "head_loss: the kernel is for other operands");
        let TargetRows { targets, nats, share, start, .. } = *of;
        let pointers = [logits, targets, share.unwrap_or(nats), nats];
        let arguments = pointers.into_iter().fold(Arguments::default(), Arguments::pointer);
        let [target_weight, weight] = of.weights().map(|weight| weight.to_bits() as usize);
        let words = [logits.meta.shape()[0], stride, start, share.is_some().into(), target_weight, weight];
        let arguments = words.into_iter().fold(arguments, Arguments::word);
        // SAFETY: the kernel was compiled for these operands. A block reads its own rows and, if
        // gradients are requested, overwrites them; no other tensor overlaps them then. Accesses
        // are whole vectors, aligned to 16 bytes. Every row has a target and a loss, and a target
        // is an index only if it is below the vocabulary.
        unsafe { cuda::launch(logits, self, blocks, arguments) };
    }
}

/// Whether the kernel runs on the device of `logits`; tried on two rows.
fn works<R: CubeRuntime>(logits: &CubeTensor<R>, kernel: HeadLossHopper) -> bool {
    cuda::works(logits, &kernel, "losses take the portable kernel", || {
        const ROWS: usize = 2;
        let columns = kernel.vocabulary.next_multiple_of(8);
        let rows = empty(logits, [ROWS, columns], logits.dtype);
        let target = if kernel.target == "int" { DType::I32 } else { DType::I64 };
        let (targets, nats) = (empty(logits, [ROWS], target), empty(logits, [ROWS], DType::F32));
        let share = empty(logits, [1], DType::F32);
        let of = TargetRows {
            targets: &targets,
            nats: &nats,
            share: Some(&share),
            start: 0,
            vocabulary: kernel.vocabulary,
            smoothing: 0.0,
        };
        kernel.launch(&rows, columns, &of, 1);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_into_shared_memory() {
        for vocabulary in [LEAST_VOCABULARY, 32_000, 49_155, 50_257, 50_304, 57_600] {
            let kernel = HeadLossHopper { half: "bf16", vocabulary, target: "int" };
            assert!(STAGES.contains(&kernel.stages()), "{kernel:?}: {} stages", kernel.stages());
            assert!(kernel.shared_bytes() <= HOPPER_SHARED_BYTES, "{kernel:?}: {} bytes", kernel.shared_bytes());
        }
    }
}
