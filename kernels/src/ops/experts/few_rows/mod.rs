//! Experts of few tokens on Hopper, in CUDA C++ (`experts_few_rows.cu`): each chosen expert is read
//! once, by kernels that sort the slots themselves. Two launches, and one that adds each token's
//! rows.

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use super::Sizes;
use crate::cubecl::{contiguous, empty};
use crate::cuda::{self, Arch, Arguments, CudaKernel, NUMBERS, Tried};
use crate::multiprocessors::multiprocessors;
use crate::ops::activation::{Activation, ActivationKind};

/// Threads per block.
const THREADS: u32 = 512;
/// Maximum slots: each block sorts all of them.
const MOST_SLOTS: usize = 512;
/// Maximum slots per expert on average: an expert is read again for each 8.
const SLOTS_EACH: usize = 4;
/// Tokens that are few, whatever the number of experts.
const FEW_TOKENS: usize = 8;
/// Bytes that a lane loads at a time.
const LOAD: usize = 16;

/// A projection of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Projection {
    /// The first, with its activation.
    Up(Activation),
    /// The second, times the slots' weights.
    Down,
}

/// Compile-time values of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ExpertsFewRows {
    projection: Projection,
    n_experts: usize,
    /// Experts per token.
    k: usize,
    /// Columns of the weight, and the stride of its rows.
    columns: usize,
    pitch: usize,
    /// Rows of an expert's matrix.
    rows: usize,
    dtype: DType,
    /// Whether choices are integers of 64 bits.
    long: bool,
    biased: bool,
    limited: bool,
}

impl ExpertsFewRows {
    /// Columns of the result.
    fn outputs(&self) -> usize {
        match self.projection {
            Projection::Up(activation) => activation.output_width(self.rows),
            Projection::Down => self.rows,
        }
    }
}

impl CudaKernel for ExpertsFewRows {
    fn threads(&self) -> u32 {
        THREADS
    }

    fn entry(&self) -> &'static str {
        "experts_few_rows"
    }

    fn source(&self) -> String {
        let (mode, activation) = match self.projection {
            Projection::Up(activation) => (activation.gated.into(), activation.kind.number()),
            Projection::Down => (2, 0),
        };
        let defined = cuda::defines([
            ("MODE", mode),
            ("K", self.columns),
            ("PITCH", self.pitch),
            ("PER", self.rows / 2),
            ("N_EXPERTS", self.n_experts),
            ("CHOICES", self.k),
            ("MOST_SLOTS", MOST_SLOTS),
            ("DTYPE", cuda::dtype_number(self.dtype)),
            ("INT8", 0),
            ("ACTIVATION", activation),
            ("BIAS", self.biased.into()),
            ("LIMIT", self.limited.into()),
            ("SHARED", self.shared_bytes()),
        ]);
        let index = if self.long { "long long" } else { "int" };
        let body = cuda::included(include_str!("sm90/experts_few_rows.cu"), &[NUMBERS]);
        format!("{defined}#define INDEX {index}\n{body}")
    }

    fn shared_bytes(&self) -> usize {
        let halves = 2 * MOST_SLOTS + 2 * self.n_experts + 1;
        (2 * halves).next_multiple_of(4) + 4 * (2 * THREADS as usize / 32 + 1)
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<ExpertsFewRows> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels of Qwen3-30B-A3B: their names and sources.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    let up = ExpertsFewRows {
        projection: Projection::Up(Activation::gated(ActivationKind::Silu)),
        n_experts: 128,
        k: 8,
        columns: 2048,
        pitch: 2048,
        rows: 1536,
        dtype: DType::BF16,
        long: false,
        biased: false,
        limited: false,
    };
    let down = ExpertsFewRows { projection: Projection::Down, columns: 768, pitch: 768, rows: 2048, ..up.clone() };
    [("up", up), ("down", down)].into_iter().map(|(name, kernel)| (format!("experts_few_rows-{name}"), kernel.source()))
}

/// The operands that the kernel reads, as they are stored.
pub(super) struct FewRows<R: CubeRuntime> {
    /// `[tokens, d_model]`.
    pub(super) x: CubeTensor<R>,
    /// `[tokens, k]`.
    pub(super) chosen: CubeTensor<R>,
    /// `[tokens, k]`, f32.
    pub(super) weights: CubeTensor<R>,
    pub(super) up: CubeTensor<R>,
    /// f32, as the other one.
    pub(super) up_bias: Option<CubeTensor<R>>,
    pub(super) activation: Activation,
    pub(super) limit: Option<f64>,
    pub(super) down: CubeTensor<R>,
    pub(super) down_bias: Option<CubeTensor<R>>,
}

impl<R: CubeRuntime> FewRows<R> {
    /// Whether the kernel is for so many tokens, on the device of `x`.
    pub(super) fn are_few(x: &CubeTensor<R>, sizes: Sizes) -> bool {
        let (slots, few) = (sizes.slots(), SLOTS_EACH * sizes.n_experts);
        let is_small = slots <= few || sizes.tokens <= FEW_TOKENS;
        (1..=MOST_SLOTS).contains(&slots) && is_small && cuda::takes(x, Arch::Sm90)
    }

    /// The weighted outputs of all slots, `[tokens * k, d_model]`, if the kernel is for these
    /// operands.
    pub(super) fn outputs(&self, sizes: Sizes) -> Option<CubeTensor<R>> {
        let Sizes { k, n_experts, d_model, width, d_ff, .. } = sizes;
        let Self { x, chosen, weights, up, up_bias, activation, limit, down, down_bias } = self;
        let together = LOAD / x.dtype.size();
        let rows = |weight: &CubeTensor<R>| {
            let (strides, size) = (weight.meta.strides(), weight.dtype.size());
            weight.dtype == x.dtype
                && strides[1] == 1
                && strides[0] >= weight.meta.shape()[1]
                && (strides[0] * size).is_multiple_of(LOAD)
                && weight.handle.offset_start.unwrap_or(0).is_multiple_of(LOAD as u64)
        };
        let fits = matches!(x.dtype, DType::F32 | DType::BF16 | DType::F16)
            && d_model.is_multiple_of(together)
            && d_ff.is_multiple_of(together)
            && [up, down].into_iter().all(rows)
            && matches!(chosen.dtype, DType::I32 | DType::I64);
        if !fits {
            return None;
        }
        let kernel = |projection, weight: &CubeTensor<R>, columns, rows, biased, limited| ExpertsFewRows {
            projection,
            n_experts,
            k,
            columns,
            pitch: weight.meta.strides()[0],
            rows,
            dtype: x.dtype,
            long: chosen.dtype == DType::I64,
            biased,
            limited,
        };
        let first = kernel(Projection::Up(*activation), up, d_model, width, up_bias.is_some(), limit.is_some());
        let second = kernel(Projection::Down, down, d_ff, d_model, down_bias.is_some(), false);
        let aligned = |x: &CubeTensor<R>| {
            let x = contiguous(x.clone());
            if x.handle.offset_start.unwrap_or(0).is_multiple_of(LOAD as u64) { x } else { contiguous(x.copy()) }
        };
        let (chosen, weights) = (contiguous(chosen.clone()), contiguous(weights.clone()));
        let hidden = self.product(&first, &aligned(x), up, up_bias.as_ref(), [&chosen, &weights], sizes)?;
        self.product(&second, &hidden, down, down_bias.as_ref(), [&chosen, &weights], sizes)
    }

    /// One projection of all slots, if the kernel works.
    fn product(
        &self,
        kernel: &ExpertsFewRows,
        x: &CubeTensor<R>,
        weight: &CubeTensor<R>,
        bias: Option<&CubeTensor<R>>,
        [chosen, weights]: [&CubeTensor<R>; 2],
        sizes: Sizes,
    ) -> Option<CubeTensor<R>> {
        let out = empty(x, [sizes.slots(), kernel.outputs()], x.dtype);
        let bias = bias.map_or_else(|| weights.clone(), |bias| contiguous(bias.clone()));
        let limit = self.limit.map_or(0, |limit| (limit as f32).to_bits());
        let blocks = multiprocessors(x);
        let launch = || {
            let pointers = [x, chosen, weight, &bias, weights, &out];
            let arguments = pointers.into_iter().fold(Arguments::default(), Arguments::pointer);
            let arguments = arguments.word(sizes.slots()).word(limit as usize);
            // SAFETY: the sizes, strides and dtypes of all operands are those that the kernel is
            // compiled for: weights have `n_experts` stacked matrices of `rows` rows by the
            // operands' check, and choices are clamped to these; `x` has a row for each slot, or for
            // each token; rows begin where 16 bytes can be read at once. The result has a row for
            // each slot, of which there are at most as many as the kernel sorts. Checked by the
            // parity tests of experts.
            unsafe { cuda::launch(x, kernel.clone(), blocks, arguments) }
        };
        cuda::works(x, kernel, "experts run the portable kernel", launch).then(|| {
            launch();
            out.clone()
        })
    }
}
