//! The GEMM for few rows on Hopper, in CUDA C++ (`gemm_few_rows.cu`): the norm before a projection,
//! the product, and its epilogue in one launch, as in batched decoding.

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use super::{DEPTH, numbered, tma_axis};
use crate::cubecl::{contiguous, empty};
use crate::cuda::{self, Arguments, CudaKernel, HOPPER, HOPPER_SHARED_BYTES, Tried};
use crate::multiprocessors::multiprocessors;
use crate::ops::activation::Activation;
use crate::ops::linear::cubecl::skinny::Epilogue;
use crate::ops::linear::route;
use crate::ops::norm::cubecl::CubeNorm;
use crate::ops::weight::cubecl::CubeQuantized;
use crate::quant::Format;

/// Columns of a warpgroup.
const COLUMNS: usize = 64;
const WARPGROUP: usize = 128;
/// A line of a tile, as TMA swizzles it.
const LINE_BYTES: usize = 128;
/// The rows that it is compiled for.
const TOKENS: [usize; 4] = [16, 32, 64, 128];
/// Bytes of shared memory of a block where two blocks are on a multiprocessor, and of a
/// multiprocessor.
const SHARED_BYTES_OF_TWO: usize = 112_000;
const MULTIPROCESSOR_BYTES: usize = 228 << 10;
/// More stages bring nothing.
const MOST_STAGES: usize = 8;
/// The most rows that are normalised in the same launch: more of them want registers that would
/// keep a second block away.
const NORM_ROWS: usize = 64;
/// Up to so many blocks for each multiprocessor, K is cut further.
const BLOCKS_EACH: f64 = 1.5;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GemmFewRows {
    /// Its dtype in the source.
    half: &'static str,
    /// Rows of a tile.
    tokens: usize,
    /// Warpgroups that have 64 columns each.
    warpgroups: usize,
    /// Blocks that K is cut among.
    split: usize,
    /// Whether the result is f32.
    out_f32: bool,
    /// The nonlinearity in the source, 0 for none.
    activation: usize,
    /// Whether that gates.
    gated: bool,
    /// Whether there is an RMS norm.
    norm: bool,
    /// Whether weights are INT8.
    int8: bool,
}

impl GemmFewRows {
    /// Columns of K in a stage: those of a line of 128 bytes of the weight.
    fn depth(&self) -> usize {
        if self.int8 { 2 * DEPTH } else { DEPTH }
    }

    fn stage_bytes(&self) -> usize {
        self.warpgroups * COLUMNS * LINE_BYTES + self.tokens * self.depth() * 2
    }

    fn sums_bytes(&self) -> usize {
        self.tokens * (self.warpgroups * COLUMNS + 4) * 4
    }

    /// Shared memory besides the stages while these are in use: with split K, sums replace them.
    fn kept_bytes(&self) -> usize {
        if self.split == 1 { self.sums_bytes() } else { 0 }
    }

    /// As many stages as leave room for another block; where these would be too few, as many as
    /// there is room for.
    fn stages(&self) -> usize {
        let room = |bytes: usize| bytes.saturating_sub(self.kept_bytes()) / self.stage_bytes();
        match room(SHARED_BYTES_OF_TWO) {
            few @ 0..2 => room(HOPPER_SHARED_BYTES - 2048).max(few),
            enough => enough,
        }
        .min(MOST_STAGES)
    }

    /// Columns of the result that a tile has.
    fn columns(&self) -> usize {
        self.warpgroups * COLUMNS / (1 + usize::from(self.gated))
    }

    /// Tiles of an `m` x `n` result.
    fn tiles(&self, [m, n]: [usize; 2]) -> usize {
        m.div_ceil(self.tokens) * n.div_ceil(self.columns())
    }

    /// The blocks of all tiles; where K is not cut, as many as run at once.
    fn blocks(&self, sizes: [usize; 2], multiprocessors: usize) -> usize {
        let tiles = self.tiles(sizes);
        match self.split {
            1 => tiles.min(multiprocessors * (MULTIPROCESSOR_BYTES / (self.shared_bytes() + 1024)).max(1)),
            split => tiles * split,
        }
    }
}

impl CudaKernel for GemmFewRows {
    fn threads(&self) -> u32 {
        (self.warpgroups * WARPGROUP + 32) as u32
    }

    fn entry(&self) -> &'static str {
        "gemm_few_rows_hopper"
    }

    fn source(&self) -> String {
        let Self { half, tokens, warpgroups, split, out_f32, activation, gated, norm, int8 } = *self;
        let defined = [
            ("TOKENS", tokens),
            ("WARPGROUPS", warpgroups),
            ("SPLIT", split),
            ("STAGES", self.stages()),
            ("OUT_F32", out_f32.into()),
            ("ACTIVATION", activation),
            ("GATED", gated.into()),
            ("NORM", norm.into()),
            ("INT8", int8.into()),
        ];
        let defined = cuda::defines(defined);
        format!("#define HALF \"{half}\"\n{defined}{HOPPER}{}", include_str!("sm90/gemm_few_rows.cu"))
    }

    fn shared_bytes(&self) -> usize {
        let ring = self.stages() * self.stage_bytes();
        (ring + self.kept_bytes()).max(self.sums_bytes()) + 16 * self.stages() + 4 * self.tokens
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<GemmFewRows> = Mutex::new(None);
        &TRIED
    }
}

/// Those that decoding in bf16 takes, with weights in bf16 and in INT8.
pub(super) fn kernels() -> impl Iterator<Item = impl CudaKernel> {
    let kernel = |tokens, warpgroups, split, gated: bool, norm, int8| GemmFewRows {
        half: "bf16",
        tokens,
        warpgroups,
        split,
        out_f32: split == 1 && !gated,
        activation: if gated { 3 } else { 0 },
        gated,
        norm,
        int8,
    };
    TOKENS.into_iter().flat_map(move |tokens| {
        [
            kernel(tokens, 1, 2, false, true, false),
            kernel(tokens, 1, 4, false, false, false),
            kernel(tokens, 2, 2, true, true, false),
            kernel(tokens, 2, 1, false, false, false),
            kernel(tokens, 2, 2, false, false, false),
            kernel(tokens, 1, 4, false, false, true),
            kernel(tokens, 2, 2, true, false, true),
            kernel(tokens, 2, 1, false, false, true),
        ]
    })
}

/// `activation(norm(x) * weight^T + bias)`, or `norm(x) * weight^T + bias + residual`, as far as
/// these are there, for 16-bit `x` `[m, k]` and `weight` `[n, k]`, also in INT8 for bf16 `x`. None
/// where the device is no Hopper GPU, or the product is not one for this kernel: the caller has
/// others.
///
/// None as well where there is a norm, and it is not an RMS norm of up to 64 rows in bf16: it is
/// another launch then.
pub(crate) fn few_rows_product<R: CubeRuntime>(
    x: &CubeTensor<R>,
    norm: Option<&CubeNorm<R>>,
    weight: FewRowsWeight<'_, R>,
    epilogue: &Epilogue<R>,
) -> Option<CubeTensor<R>> {
    let ([m, k], [n, _]) = ([x.meta.shape()[0], x.meta.shape()[1]], weight.dims());
    let Epilogue { bias, activation, residual, dtype } = epilogue;
    let outputs = activation.map_or(n, |activation| activation.output_width(n));
    let k_contiguous = |x: &CubeTensor<R>| tma_axis(x, 1) == Some(1);
    // They are read four at a time.
    let whole = |x: &CubeTensor<R>| x.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    let floats = |numbers: &CubeTensor<R>| [DType::F32, x.dtype].contains(&numbers.dtype) && whole(numbers);
    // f16 might not hold what has not been divided yet.
    let late = |x: &CubeTensor<R>| x.dtype == DType::BF16;
    let out_f32 = *dtype == DType::F32;
    let stored = match &weight {
        FewRowsWeight::Float(weight) => x.dtype == weight.dtype && k_contiguous(weight),
        FewRowsWeight::Int8(weight) => {
            x.dtype == DType::BF16 && norm.is_none() && weight.format == Format::Int8 && k.is_multiple_of(16)
        }
    };
    let fits = stored
        && route::takes_few_rows(x, [m, n, k])
        && outputs.is_multiple_of(8)
        && k_contiguous(x)
        && (out_f32 || *dtype == x.dtype)
        && norm
            .is_none_or(|norm| m <= NORM_ROWS && late(x) && !norm.layer && norm.beta.is_none() && floats(&norm.gamma))
        && bias.as_ref().is_none_or(floats)
        && residual.as_ref().is_none_or(|residual| residual.dtype == x.dtype && whole(residual) && !out_f32);
    if !fits {
        return None;
    }
    let int8 = matches!(weight, FewRowsWeight::Int8(_));
    let kernel = kernel([m, n, k], *activation, out_f32, [norm.is_some(), int8], x)?;
    works(x, kernel).then(|| {
        let out = empty(x, [m, outputs], *dtype);
        kernel.launch(x, norm, &weight.lines()?, epilogue, &out);
        Some(out)
    })?
}

/// A weight that the kernel reads as it is stored.
#[derive(Clone, Copy)]
pub(crate) enum FewRowsWeight<'a, R: CubeRuntime> {
    /// `[d_output, d_input]` in the dtype of `x`.
    Float(&'a CubeTensor<R>),
    /// Quantized; in INT8, or the kernel declines.
    Int8(&'a CubeQuantized<R>),
}

impl<R: CubeRuntime> FewRowsWeight<'_, R> {
    /// `[d_output, d_input]`.
    fn dims(&self) -> [usize; 2] {
        match self {
            Self::Float(weight) => [weight.meta.shape()[0], weight.meta.shape()[1]],
            Self::Int8(weight) => weight.dims,
        }
    }

    /// What TMA reads, and the scales of rows. Two columns of INT8 are one of 16 bits.
    fn lines(self) -> Option<Lines<R>> {
        match self {
            Self::Float(weight) => Some(Lines { weight: weight.clone(), scales: None }),
            Self::Int8(CubeQuantized { packed, scales, dims: [rows, columns], .. }) => {
                let packed = contiguous(packed.clone());
                let shape = [*rows, columns / 2].into();
                let weight =
                    CubeTensor::new_contiguous(packed.client, packed.device, shape, packed.handle, DType::BF16);
                Some(Lines { weight, scales: Some(contiguous(scales.clone()?)) })
            }
        }
    }
}

/// A weight in lines of 16-bit numbers, or of pairs of bytes with a scale for each row.
struct Lines<R: CubeRuntime> {
    weight: CubeTensor<R>,
    scales: Option<CubeTensor<R>>,
}

/// What the kernel is compiled for, by size.
fn kernel<R: CubeRuntime>(
    [m, n, k]: [usize; 3],
    activation: Option<Activation>,
    out_f32: bool,
    [norm, int8]: [bool; 2],
    x: &CubeTensor<R>,
) -> Option<GemmFewRows> {
    let half = cuda::half_name(x.dtype.into())?;
    let (activation, gated) = activation.map_or(Some((0, false)), numbered)?;
    let tokens = TOKENS.into_iter().find(|tokens| m <= *tokens).unwrap_or(TOKENS[TOKENS.len() - 1]);
    let processors = multiprocessors(x) as usize;
    let (many, narrow) = (m > 2 * tokens, m.div_ceil(tokens) * n.div_ceil(COLUMNS));
    // Wide tiles read `x` less often: for many columns, and for many rows where narrow ones would
    // be too many to halve K.
    let wide = gated || n.div_ceil(COLUMNS) >= 2 * processors || many && 2 * narrow > processors;
    let mut kernel = GemmFewRows {
        half,
        tokens,
        warpgroups: 1 + usize::from(wide),
        split: 1,
        out_f32,
        activation,
        gated,
        norm,
        int8,
    };
    // Sums of many rows cost more than a longer run of K. Racecheck fails where blocks read each
    // other's shared memory.
    let most = match tokens {
        _ if cuda::for_racecheck() => 1,
        128 => 4,
        _ => 8,
    };
    let tiles = kernel.tiles([m, if gated { n / 2 } else { n }]);
    let each = if wide && many { 1.0 } else { BLOCKS_EACH };
    let allowed =
        |split: &usize| (tiles * split) as f64 <= each * processors as f64 && k.div_ceil(kernel.depth()) >= 2 * split;
    kernel.split = [8, 4, 2].into_iter().filter(|split| *split <= most).find(allowed).unwrap_or(1);
    Some(kernel)
}

impl GemmFewRows {
    fn launch<R: CubeRuntime>(
        self,
        x: &CubeTensor<R>,
        norm: Option<&CubeNorm<R>>,
        Lines { weight, scales }: &Lines<R>,
        Epilogue { bias, residual, .. }: &Epilogue<R>,
        out: &CubeTensor<R>,
    ) {
        let [m, k, n] = [x.meta.shape()[0], x.meta.shape()[1], weight.meta.shape()[0]];
        assert_eq!(self.int8, scales.is_some(), "linear: INT8 has scales");
        assert!(scales.as_ref().is_none_or(|scales| scales.meta.num_elements() == n), "linear: scales for {n} rows");
        let [bias, residual] = [bias, residual].map(|x| x.clone().map(contiguous));
        // There is no norm where there are scales.
        let gamma = norm.map(|norm| contiguous(norm.gamma.clone()));
        let weighs = if self.int8 { scales } else { &gamma };
        let kind = |numbers: &Option<CubeTensor<R>>| {
            numbers.as_ref().map_or(0, |numbers| if numbers.dtype == DType::F32 { 1 } else { 2 })
        };
        let arguments = Arguments::default().map(x, 1, self.tokens).map(weight, 1, self.columns()).pointer(out);
        let others = [&bias, &residual, weighs];
        let arguments = others.into_iter().fold(arguments, |all, x| all.pointer(x.as_ref().unwrap_or(out)));
        let epsilon = norm.map_or(0, |norm| (norm.epsilon as f32).to_bits() as usize);
        let words = [m, n, k, kind(&bias), residual.is_some().into(), kind(&gamma), epsilon];
        let arguments = words.into_iter().fold(arguments, Arguments::word);
        let outputs = out.meta.shape()[1];
        assert!(bias.is_none_or(|bias| bias.meta.num_elements() == n), "linear: a bias for {n} columns");
        assert!(gamma.is_none_or(|gamma| gamma.meta.num_elements() == k), "linear: a norm of {k} columns");
        assert!(residual.is_none_or(|x| *x.meta.shape() == [m, outputs].into()), "linear: a residual [{m}, {outputs}]");
        let blocks = self.blocks([m, outputs], multiprocessors(x) as usize);
        // SAFETY: TMA reads within the matrices that its maps were made of; `out` and the residual
        // are read and written below m and their columns, the bias below n and gamma below k, which
        // were just compared; all are without gaps, and vectors of four are whole, as the numbers
        // of columns are multiples of eight.
        unsafe { cuda::launch(x, self, blocks as u32, arguments) };
    }
}

/// Whether the kernel runs on the device of `x`: tried on one tile.
fn works<R: CubeRuntime>(x: &CubeTensor<R>, kernel: GemmFewRows) -> bool {
    cuda::works(x, &kernel, "products of few rows take the portable kernels", || {
        let k = kernel.depth() * kernel.split;
        let a = empty(x, [kernel.tokens, k], x.dtype);
        let rows = kernel.warpgroups * COLUMNS;
        let weight = empty(x, [rows, if kernel.int8 { k / 2 } else { k }], x.dtype);
        let scales = kernel.int8.then(|| empty(x, [rows], DType::F32));
        let weight = Lines { weight, scales };
        let dtype = if kernel.out_f32 { DType::F32 } else { x.dtype };
        let out = empty(x, [kernel.tokens, kernel.columns()], dtype);
        let gamma = || CubeNorm { layer: false, gamma: empty(x, [k], x.dtype), beta: None, epsilon: 1e-6 };
        let norm = kernel.norm.then(gamma);
        kernel.launch(&a, norm.as_ref(), &weight, &Epilogue::none(dtype), &out);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_and_sums_fit_into_shared_memory() {
        for tokens in TOKENS {
            for (warpgroups, split) in [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (2, 8)] {
                let kernel = GemmFewRows {
                    half: "bf16",
                    tokens,
                    warpgroups,
                    split,
                    out_f32: false,
                    activation: 0,
                    gated: false,
                    norm: false,
                    int8: tokens == 32,
                };
                assert!(kernel.stages() >= 2, "{kernel:?}: {} stages", kernel.stages());
                assert!(kernel.shared_bytes() <= HOPPER_SHARED_BYTES, "{kernel:?}: {} bytes", kernel.shared_bytes());
            }
        }
    }
}
