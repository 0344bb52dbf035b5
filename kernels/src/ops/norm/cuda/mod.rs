//! The gradients of norms in CUDA C++ (`backward.cu`), for Hopper and for Ampere and later.

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use crate::cubecl::empty;
use crate::cuda::{self, AMPERE, Arch, Arguments, CudaKernel, HOPPER, HOPPER_SHARED_BYTES, Tried, shared_bytes};
use crate::multiprocessors::multiprocessors;

/// Warps of a block, with a row each at a time.
const WARPS: usize = 8;
/// Rows per warp in shared memory; two where three have no room.
const STAGES: [usize; 2] = [3, 2];
/// A lane holds sums of both weights' gradients in registers, which limits the width; with narrower
/// rows, not every lane has a part.
const COLUMNS: std::ops::RangeInclusive<usize> = 256..=1280;
/// The source counts rows in 32 bits, with a margin.
const MOST_ROWS: usize = 1 << 30;

/// Compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct NormBackward {
    arch: Arch,
    stages: usize,
    /// The dtype of rows in the source.
    half: &'static str,
    columns: usize,
    /// A layer norm, not an RMS norm.
    layer: bool,
    /// Whether there is a gradient of a shift.
    shifted: bool,
    /// Whether there is a residual.
    adds: bool,
    gamma_f32: bool,
}

impl NormBackward {
    fn stage_bytes(&self) -> usize {
        (2 + usize::from(self.adds)) * self.columns * 2
    }

    /// The weights' gradients.
    fn parts(&self) -> usize {
        1 + usize::from(self.shifted)
    }
}

impl CudaKernel for NormBackward {
    fn threads(&self) -> u32 {
        (32 * WARPS) as u32
    }

    fn entry(&self) -> &'static str {
        if self.arch == Arch::Sm90 { "norm_backward_hopper" } else { "norm_backward_ampere" }
    }

    fn source(&self) -> String {
        let Self { arch, stages, half, columns, layer, shifted, adds, gamma_f32 } = *self;
        let family = if arch == Arch::Sm90 { HOPPER } else { AMPERE };
        let defined = [
            ("COLUMNS", columns),
            ("WARPS", WARPS),
            ("STAGES", stages),
            ("LAYER", layer.into()),
            ("SHIFTED", shifted.into()),
            ("ADDS", adds.into()),
            ("GAMMA_F32", gamma_f32.into()),
        ];
        let defined = cuda::defines(defined);
        format!("#define HALF \"{half}\"\n{defined}{family}{}", include_str!("backward.cu"))
    }

    fn shared_bytes(&self) -> usize {
        // Rows, gamma, and a barrier for each row.
        WARPS * self.stages * (self.stage_bytes() + 8) + self.columns * 4
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<NormBackward> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels of GPT-2 and of an RMS norm, in bf16: their names and sources.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    sources(Arch::Sm90, HOPPER_SHARED_BYTES)
}

/// The same for Ampere and later, where a block has so many bytes of shared memory.
pub(crate) fn ampere_sources(most_bytes: usize, all: bool) -> impl Iterator<Item = (String, String)> {
    sources(Arch::Sm80, most_bytes).take(if all { usize::MAX } else { 1 })
}

fn sources(arch: Arch, most_bytes: usize) -> impl Iterator<Item = (String, String)> {
    let kernel = move |columns, layer, adds| NormBackward {
        arch,
        stages: STAGES[0],
        half: "bf16",
        columns,
        layer,
        shifted: layer,
        adds,
        gamma_f32: true,
    };
    let kernels = [(768, true, true), (768, true, false), (*COLUMNS.end(), true, true), (1024, false, true)];
    let fitting = move |(columns, layer, adds)| kernel(columns, layer, adds).fitting(most_bytes);
    kernels.into_iter().filter_map(fitting).map(cuda::named)
}

/// The operands of a norm's backward pass: `x`, `grad` and `residual` `[rows, columns]` of one
/// dtype, with row strides in elements; `inverse` and, for layer norms, `mean` `[rows, 1]`, f32;
/// and gamma `[columns]`.
pub(super) struct NormedRows<'a, R: CubeRuntime> {
    pub(super) x: (&'a CubeTensor<R>, usize),
    pub(super) grad: (&'a CubeTensor<R>, usize),
    pub(super) residual: Option<(&'a CubeTensor<R>, usize)>,
    pub(super) mean: Option<&'a CubeTensor<R>>,
    pub(super) inverse: &'a CubeTensor<R>,
    pub(super) gamma: &'a CubeTensor<R>,
    /// Whether there is a shift that needs a gradient.
    pub(super) shifted: bool,
}

/// The gradient of `x`, and partial gradients of the weights, `[blocks, columns]` or `[blocks, 2
/// columns]`, f32, to be summed. None if the device has no family of kernels, [no
/// kernel](NormBackward::for_rows) supports the operands or it does not run, or there are too
/// few rows to fill the warps.
pub(super) fn norm_backward<R: CubeRuntime>(rows: &NormedRows<R>) -> Option<(CubeTensor<R>, CubeTensor<R>)> {
    let (x, _) = rows.x;
    let kernel = NormBackward::for_rows(rows)?;
    let blocks = multiprocessors(x) as usize;
    let worth = x.meta.shape()[0] >= blocks * WARPS;
    (worth && works(x, kernel)).then(|| kernel.launch(rows, blocks))
}

impl NormBackward {
    /// The kernel for these operands: 16-bit rows of whole 16-byte vectors, not too narrow or wide,
    /// and gamma in f32 or their dtype.
    fn for_rows<R: CubeRuntime>(rows: &NormedRows<R>) -> Option<Self> {
        let NormedRows { x: (x, _), grad, residual, mean, inverse, gamma, shifted } = *rows;
        let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
        let half = cuda::half_name(x.dtype.into())?;
        let gamma_f32 = gamma.dtype == DType::F32;
        let matrix = |(other, stride): (&CubeTensor<R>, usize)| {
            other.dtype == x.dtype
                && other.meta.shape() == x.meta.shape()
                && stride.is_multiple_of(8)
                && other.handle.offset_start.unwrap_or(0).is_multiple_of(16)
        };
        let each_row =
            |x: &CubeTensor<R>| x.dtype == DType::F32 && x.meta.num_elements() == n_rows && x.is_contiguous();
        let fits = n_rows < MOST_ROWS
            && COLUMNS.contains(&columns)
            && columns.is_multiple_of(8)
            && [rows.x, grad].into_iter().chain(residual).all(matrix)
            && each_row(inverse)
            && mean.is_none_or(each_row)
            && (gamma_f32 || gamma.dtype == x.dtype)
            && gamma.meta.num_elements() == columns
            && gamma.is_contiguous();
        let (layer, adds) = (mean.is_some(), residual.is_some());
        let arch = cuda::family(x)?;
        let kernel = Self { arch, stages: STAGES[0], half, columns, layer, shifted, adds, gamma_f32 };
        if fits { kernel.fitting(shared_bytes(x)) } else { None }
    }

    /// With as many stages as so many bytes of shared memory have room for.
    fn fitting(self, most_bytes: usize) -> Option<Self> {
        let kernels = STAGES.into_iter().map(|stages| Self { stages, ..self });
        let sums = WARPS * self.parts() * self.columns * 4;
        // In the end sums take the place of rows.
        let fits =
            |kernel: &Self| kernel.shared_bytes() <= most_bytes && sums <= WARPS * kernel.stages * kernel.stage_bytes();
        kernels.into_iter().find(fits)
    }

    fn launch<R: CubeRuntime>(self, rows: &NormedRows<R>, blocks: usize) -> (CubeTensor<R>, CubeTensor<R>) {
        assert_eq!(Self::for_rows(rows), Some(self), "norm backward: the kernel is for other operands");
        let NormedRows { x: (x, stride), grad, residual, mean, inverse, gamma, .. } = *rows;
        let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
        let d_x = empty(x, [n_rows, columns], x.dtype);
        let partial = empty(x, [blocks, self.parts() * columns], DType::F32);
        let residual = residual.unwrap_or(grad);
        let pointers = [x, grad.0, residual.0, mean.unwrap_or(inverse), inverse, gamma, &d_x, &partial];
        let arguments = pointers.into_iter().fold(Arguments::default(), Arguments::pointer);
        let words = [n_rows, stride, grad.1, residual.1];
        let arguments = words.into_iter().fold(arguments, Arguments::word);
        // SAFETY: the kernel was compiled for these operands. A warp reads rows below `n_rows`, in
        // whole vectors aligned to 16 bytes, with their mean and inverse, and writes its own rows
        // of `d_x`. A block writes its own row of `partial`.
        unsafe { cuda::launch(x, self, blocks as u32, arguments) };
        (d_x, partial)
    }
}

/// Whether the kernel runs on the device of `x`: it is tried on a row for each warp of a block.
fn works<R: CubeRuntime>(x: &CubeTensor<R>, kernel: NormBackward) -> bool {
    cuda::works(x, &kernel, "gradients of norms take the portable kernel", || {
        let columns = kernel.columns;
        let matrix = empty(x, [WARPS, columns], x.dtype);
        let inverse = empty(x, [WARPS, 1], DType::F32);
        let gamma = empty(x, [columns], if kernel.gamma_f32 { DType::F32 } else { x.dtype });
        let rows = NormedRows {
            x: (&matrix, columns),
            grad: (&matrix, columns),
            residual: kernel.adds.then_some((&matrix, columns)),
            mean: kernel.layer.then_some(&inverse),
            inverse: &inverse,
            gamma: &gamma,
            shifted: kernel.shifted,
        };
        kernel.launch(&rows, 1);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn rows_and_sums_fit_into_shared_memory() {
        for columns in COLUMNS.step_by(8) {
            for shifted in [false, true] {
                for adds in [false, true] {
                    let kernel = NormBackward {
                        arch: Arch::Sm90,
                        stages: STAGES[0],
                        half: "bf16",
                        columns,
                        layer: true,
                        shifted,
                        adds,
                        gamma_f32: true,
                    };
                    assert_eq!(kernel.fitting(HOPPER_SHARED_BYTES), Some(kernel), "{}", kernel.shared_bytes());
                    // A100's, and those of an RTX 4090.
                    assert!(kernel.fitting(163 << 10).is_some(), "{kernel:?}");
                    assert!(columns > 768 || kernel.fitting(99 << 10).is_some(), "{kernel:?}");
                }
            }
        }
    }
}
