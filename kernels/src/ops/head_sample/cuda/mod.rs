//! Sampling for Hopper in CUDA C++ (`draw.cu`): all rows of any kind in one launch.

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use super::counts::NUMBERS;
use super::cubecl::sampling_params::SamplingParams;
use super::draws_key;
use crate::cubecl::empty;
use crate::cuda::{self, Arch, Arguments, CudaKernel, HOPPER, LARGEST, Tried, included};

/// Threads per block, with a group of tokens each.
const THREADS: usize = 512;

/// Sampling within a block, by 512 threads with their own barrier, from this many groups of tokens.
pub(crate) fn draw_source(barrier: usize, groups: usize) -> String {
    let (rows, columns) = draws_key().round_keys();
    let keys = rows.iter().zip(columns).map(|(row, column)| format!("{:#x}u", row | column << 16));
    let keys = keys.collect::<Vec<_>>().join(", ");
    let defined = format!("#define DRAW_BARRIER {barrier}\n#define MOST_GROUPS {groups}\n#define KEYS {keys}\n");
    defined + &included(include_str!("sm90/draw.cuh"), &[LARGEST])
}

/// Compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct DrawHopper {
    /// Blocks per row.
    shares: usize,
    /// Logits loaded at once.
    vector: usize,
}

impl DrawHopper {
    /// As many blocks as run concurrently: two per multiprocessor.
    fn new(rows: usize, vocabulary: usize) -> Self {
        let shares = if rows <= 66 { 4 } else { 2 };
        Self { shares, vector: if vocabulary.is_multiple_of(4) { 4 } else { 1 } }
    }
}

impl CudaKernel for DrawHopper {
    fn threads(&self) -> u32 {
        THREADS as u32
    }

    fn entry(&self) -> &'static str {
        "draw"
    }

    fn source(&self) -> String {
        let Self { shares, vector } = *self;
        let defined = [("SHARES", shares), ("VECTOR", vector), ("SHARED", self.shared_bytes())];
        let defined = cuda::defines(defined);
        // It does not depend on a 16-bit dtype.
        let draw = draw_source(0, shares * THREADS);
        format!("#define HALF \"bf16\"\n{defined}{HOPPER}{draw}{}", include_str!("sm90/draw.cu"))
    }

    fn shared_bytes(&self) -> usize {
        72 << 10
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<DrawHopper> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels, with names and sources.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    let kernels = [(4, 4), (2, 4), (4, 1), (2, 1)];
    kernels.into_iter().map(|(shares, vector)| cuda::named(DrawHopper { shares, vector }))
}

/// Writes a token for each row of `logits` `[batch_size, vocabulary]` to `out` `[batch_size]`.
/// Returns false if no kernel supports the device, or it does not run. `counts` are those of the
/// prompts, those of the generated tokens, which are updated, and biases, `[lines, vocabulary]`.
pub(super) fn draw<R: CubeRuntime>(
    logits: &CubeTensor<R>,
    params: &SamplingParams<R>,
    positions: &CubeTensor<R>,
    counts: Option<&[CubeTensor<R>; 3]>,
    out: &CubeTensor<R>,
) -> bool {
    let [batch_size, vocabulary]: [usize; 2] = logits.meta.shape().dims();
    let SamplingParams { streams, lines, numbers, .. } = params;
    let kernel = DrawHopper::new(batch_size, vocabulary);
    let integers = [streams, lines, positions, out].iter().all(|x| x.dtype == DType::I32);
    let read_together = std::iter::once(logits).chain(counts.into_iter().flatten());
    let begins = read_together.map(|x| x.handle.offset_start.unwrap_or(0)).all(|begin| begin.is_multiple_of(16));
    if !integers || !begins || !cuda::takes(logits, Arch::Sm90) || !works(kernel, logits) {
        return false;
    }
    let n_lines = counts.map_or(0, |[prompt, ..]| prompt.meta.shape()[0]);
    // SAFETY: the operands were checked: a number of each kind for each row, lines below `n_lines`
    // or below 0, and counts and biases of a vocabulary each.
    unsafe {
        launch(kernel, logits, [streams, positions, lines], numbers, counts, out, [batch_size, vocabulary, n_lines])
    };
    true
}

/// # Safety
/// Sizes are rows, tokens and lines: of `logits` `[rows, tokens]`, `integers` and `out` `[rows]`,
/// `numbers` `[rows, NUMBERS]` and `counts` `[lines, tokens]`, all without gaps; logits and counts
/// begin at a multiple of 16 bytes, and a multiple of the kernel's vector is a row of them.
unsafe fn launch<R: CubeRuntime>(
    kernel: DrawHopper,
    logits: &CubeTensor<R>,
    integers: [&CubeTensor<R>; 3],
    numbers: &CubeTensor<R>,
    counts: Option<&[CubeTensor<R>; 3]>,
    out: &CubeTensor<R>,
    [rows, vocabulary, lines]: [usize; 3],
) {
    // Without lines these are not accessed.
    let none = [(); 3].map(|()| logits.clone());
    let arguments = Arguments::default().pointer(logits);
    let arguments = integers.into_iter().fold(arguments, Arguments::pointer).pointer(numbers);
    let arguments = counts.unwrap_or(&none).iter().fold(arguments, Arguments::pointer).pointer(out);
    let blocks = (rows * kernel.shares) as u32;
    // SAFETY: a cluster reads its own row of what has a row, by the contract above, and tokens of
    // the vocabulary.
    unsafe { cuda::launch(logits, kernel, blocks, arguments.word(vocabulary).word(lines)) };
}

/// Whether the kernel runs on the device of `x`; tried on a row of a few tokens.
fn works<R: CubeRuntime>(kernel: DrawHopper, x: &CubeTensor<R>) -> bool {
    cuda::works(x, &kernel, "rows of each kind are drawn for apart", || {
        const TOKENS: usize = 16;
        let [logits, numbers] = [TOKENS, NUMBERS].map(|length| empty(x, [1, length], DType::F32));
        let integers = [(); 4].map(|()| empty(x, [1], DType::I32));
        let [streams, positions, lines, out] = &integers;
        // SAFETY: one row, and no lines; what the numbers are does not matter.
        unsafe { launch(kernel, &logits, [streams, positions, lines], &numbers, None, out, [1, TOKENS, 0]) };
    })
}
