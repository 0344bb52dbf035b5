//! The pass over rows of logits on Hopper, in CUDA C++ (`row_pass.cu`).

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use super::cubecl::TargetRows;
use crate::cubecl::{empty, multiprocessors};
use crate::cuda::{self, Arguments, CudaKernel, HOPPER, HOPPER_SHARED_BYTES, Tried};

/// Warps of a block, which share a row.
const WARPS: usize = 32;
/// Rows that a block has in shared memory at the most. With one it would wait for each.
const MOST_STAGES: usize = 4;
const LEAST_STAGES: usize = 2;
/// A row of a smaller vocabulary is too short for so many warps.
const LEAST_VOCABULARY: usize = 24_576;

/// What the kernel is compiled for.
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

    /// Four numbers of each part, twice, and barriers.
    fn other_bytes(&self) -> usize {
        2 * 4 * WARPS * 4 + MOST_STAGES * WARPS * 8
    }

    fn stages(&self) -> usize {
        ((HOPPER_SHARED_BYTES - self.other_bytes()) / self.stage_bytes()).min(MOST_STAGES)
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
        let defined = format!("#define VOCABULARY {vocabulary}\n#define STAGES {stages}\n#define TARGET {target}\n");
        format!("#define HALF \"{half}\"\n{defined}{HOPPER}{}", include_str!("row_pass.cu"))
    }

    fn shared_bytes(&self) -> usize {
        self.stages() * self.stage_bytes() + self.other_bytes()
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<HeadLossHopper> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels for GPT-2's vocabulary and its tiles in bf16: their names and sources.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    [50_257, 50_304]
        .into_iter()
        .map(|vocabulary| cuda::named(HeadLossHopper { half: "bf16", vocabulary, target: "int" }))
}

/// Writes the losses of rows of 16-bit `logits` `[rows, columns]`, which are `stride` elements apart, and where they are wanted their gradients in the place of the first `vocabulary` columns, if
/// there is a kernel for the device and the vocabulary, and it runs: whether it did.
pub(super) fn loss_of_rows<R: CubeRuntime>(logits: &CubeTensor<R>, stride: usize, of: &TargetRows<R>) -> bool {
    let Some(half) = cuda::half_name(logits.dtype.into()) else { return false };
    let target = match of.targets.dtype {
        DType::I32 => "int",
        DType::I64 => "long long",
        _ => return false,
    };
    let kernel = HeadLossHopper { half, vocabulary: of.vocabulary, target };
    let begin = logits.handle.offset_start.unwrap_or(0);
    let fits = of.vocabulary >= LEAST_VOCABULARY
        && kernel.stages() >= LEAST_STAGES
        // The last vector of a row is read and written as a whole.
        && of.vocabulary.next_multiple_of(8) <= logits.meta.shape()[1]
        && stride.is_multiple_of(8)
        && begin.is_multiple_of(16);
    if !fits || !cuda::on_hopper(logits) || !works(logits, kernel, of.targets.dtype) {
        return false;
    }
    kernel.launch(logits, stride, of, multiprocessors(logits));
    true
}

impl HeadLossHopper {
    fn launch<R: CubeRuntime>(self, logits: &CubeTensor<R>, stride: usize, of: &TargetRows<R>, blocks: u32) {
        let TargetRows { targets, nats, share, start, vocabulary, .. } = *of;
        let [rows, columns] = [logits.meta.shape()[0], logits.meta.shape()[1]];
        let whole = vocabulary.next_multiple_of(8);
        assert!(
            vocabulary == self.vocabulary && whole <= columns && columns <= stride,
            "head_loss: rows of {vocabulary} logits"
        );
        let of_row = |x: &CubeTensor<R>| x.is_contiguous() && x.meta.num_elements() >= start + rows;
        assert!(
            of_row(targets) && of_row(nats) && nats.dtype == DType::F32,
            "head_loss: a target and a loss for each row"
        );
        assert!(share.is_none_or(|share| share.dtype == DType::F32), "head_loss: the share of a target is f32");
        let pointers = [logits, targets, share.unwrap_or(nats), nats];
        let arguments = pointers.into_iter().fold(Arguments::default(), Arguments::pointer);
        let [target_weight, weight] = of.weights().map(|weight| weight.to_bits() as usize);
        let words = [rows, stride, start, share.is_some().into(), target_weight, weight];
        let arguments = words.into_iter().fold(arguments, Arguments::word);
        // SAFETY: a block reads and writes its own rows, below `rows`, which were compared: whole vectors of a row's logits, and its target and loss. Rows begin at
        // multiples of 16 bytes, as the caller sees to; a target is only compared and taken for a place where it is below the vocabulary.
        unsafe { cuda::launch(logits, self, blocks, arguments) };
    }
}

/// Whether the kernel runs on the device of `logits`: it is tried on two rows.
fn works<R: CubeRuntime>(logits: &CubeTensor<R>, kernel: HeadLossHopper, target: DType) -> bool {
    cuda::works(logits, &kernel, "losses take the portable kernel", || {
        const ROWS: usize = 2;
        let columns = kernel.vocabulary.next_multiple_of(8);
        let rows = empty(logits, [ROWS, columns], logits.dtype);
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
        for vocabulary in [LEAST_VOCABULARY, 32_000, 49_155, 50_257, 50_304, 57_000] {
            let kernel = HeadLossHopper { half: "bf16", vocabulary, target: "int" };
            assert!(kernel.stages() >= LEAST_STAGES, "{kernel:?}: {} stages", kernel.stages());
            assert!(kernel.shared_bytes() <= HOPPER_SHARED_BYTES, "{kernel:?}: {} bytes", kernel.shared_bytes());
        }
    }
}
