//! The gradients of norms on Hopper, in CUDA C++ (`backward.cu`).

use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use crate::cubecl::{empty, multiprocessors};
use crate::cuda::{self, Arguments, CudaKernel, HOPPER, HOPPER_SHARED_BYTES, Tried};

/// Warps of a block, which have a row each at a time.
const WARPS: usize = 8;
/// Rows that a warp has in shared memory at the most.
const MOST_STAGES: usize = 3;
/// A lane has a row's sums for both weights in registers, which would be too many for wider ones.
const MOST_COLUMNS: usize = 1280;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct NormBackwardHopper {
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

impl NormBackwardHopper {
    fn stage_bytes(&self) -> usize {
        (2 + usize::from(self.adds)) * self.columns * 2
    }

    /// Gamma, and a barrier for each stage.
    fn other_bytes(&self) -> usize {
        self.columns * 4 + WARPS * MOST_STAGES * 8
    }

    fn stages(&self) -> usize {
        ((HOPPER_SHARED_BYTES - self.other_bytes()) / (WARPS * self.stage_bytes())).min(MOST_STAGES)
    }

    /// The weights' gradients.
    fn parts(&self) -> usize {
        1 + usize::from(self.shifted)
    }
}

impl CudaKernel for NormBackwardHopper {
    fn threads(&self) -> u32 {
        (32 * WARPS) as u32
    }

    fn entry(&self) -> &'static str {
        "norm_backward_hopper"
    }

    fn source(&self) -> String {
        let Self { half, columns, layer, shifted, adds, gamma_f32 } = *self;
        let defined = [
            ("COLUMNS", columns),
            ("WARPS", WARPS),
            ("STAGES", self.stages()),
            ("LAYER", layer.into()),
            ("SHIFTED", shifted.into()),
            ("ADDS", adds.into()),
            ("GAMMA_F32", gamma_f32.into()),
        ];
        let defined: String = defined.map(|(name, value)| format!("#define {name} {value}\n")).concat();
        format!("#define HALF \"{half}\"\n{defined}{HOPPER}{}", include_str!("backward.cu"))
    }

    fn shared_bytes(&self) -> usize {
        WARPS * self.stages() * self.stage_bytes() + self.other_bytes()
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<NormBackwardHopper> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels of GPT-2 and of an RMS norm, in bf16: their names and sources.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    let kernel = |columns, layer, adds| NormBackwardHopper {
        half: "bf16",
        columns,
        layer,
        shifted: layer,
        adds,
        gamma_f32: true,
    };
    let kernels = [(768, true, true), (768, true, false), (MOST_COLUMNS, true, true), (1024, false, true)];
    kernels.into_iter().map(move |(columns, layer, adds)| cuda::named(kernel(columns, layer, adds)))
}

/// Rows and what is known of them: `x`, `grad` and `residual` `[rows, columns]` of one dtype, rows apart by so many elements; `inverse` and, of layer norms,
/// `mean` `[rows, 1]`, f32; and gamma `[columns]`.
pub(super) struct NormedRows<'a, R: CubeRuntime> {
    pub(super) x: (&'a CubeTensor<R>, usize),
    pub(super) grad: (&'a CubeTensor<R>, usize),
    pub(super) residual: Option<(&'a CubeTensor<R>, usize)>,
    pub(super) mean: Option<&'a CubeTensor<R>>,
    pub(super) inverse: &'a CubeTensor<R>,
    pub(super) gamma: &'a CubeTensor<R>,
    /// Whether there is a shift, whose gradient is wanted.
    pub(super) shifted: bool,
}

/// The gradient of `x`, and parts of those of the weights, `[blocks, columns]` or `[blocks, 2 columns]`, f32, which are yet to be added up. None where
/// the device is no Hopper GPU, rows are too few or too wide, or are not whole vectors of 16 bytes: the caller has another kernel.
pub(super) fn norm_backward<R: CubeRuntime>(rows: &NormedRows<R>) -> Option<(CubeTensor<R>, CubeTensor<R>)> {
    let NormedRows { x: (x, _), residual, mean, gamma, shifted, .. } = rows;
    let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
    let half = cuda::half_name(x.dtype.into())?;
    let gamma_f32 = gamma.dtype == DType::F32;
    let fits = n_rows >= multiprocessors(x) as usize * WARPS
        && columns <= MOST_COLUMNS
        && (gamma_f32 || gamma.dtype == x.dtype)
        && rows.matrices().all(|(x, stride)| {
            let begin = x.handle.offset_start.unwrap_or(0);
            stride.is_multiple_of(8) && begin.is_multiple_of(16)
        });
    if !fits || !columns.is_multiple_of(8) || !cuda::on_hopper(x) {
        return None;
    }
    let (layer, adds) = (mean.is_some(), residual.is_some());
    let kernel = NormBackwardHopper { half, columns, layer, shifted: *shifted, adds, gamma_f32 };
    works(x, kernel, gamma.dtype).then(|| kernel.launch(rows, multiprocessors(x) as usize))
}

impl<'a, R: CubeRuntime> NormedRows<'a, R> {
    fn matrices(&self) -> impl Iterator<Item = (&'a CubeTensor<R>, usize)> {
        [self.x, self.grad].into_iter().chain(self.residual)
    }
}

impl NormBackwardHopper {
    fn launch<R: CubeRuntime>(self, rows: &NormedRows<R>, blocks: usize) -> (CubeTensor<R>, CubeTensor<R>) {
        let NormedRows { x: (x, stride), grad, residual, mean, inverse, gamma, .. } = *rows;
        let [n_rows, columns] = [x.meta.shape()[0], x.meta.shape()[1]];
        let each_row =
            |x: &CubeTensor<R>| x.dtype == DType::F32 && x.meta.num_elements() == n_rows && x.is_contiguous();
        let same = rows.matrices().all(|(other, _)| other.dtype == x.dtype && other.meta.shape() == x.meta.shape());
        assert!(same, "norm backward: a gradient and a residual are {n_rows} rows of {columns}, as the input is");
        assert!(each_row(inverse) && mean.is_none_or(each_row), "norm backward: a number for each of {n_rows} rows");
        assert!(gamma.meta.num_elements() == columns && gamma.is_contiguous(), "norm backward: a scale of {columns}");
        let d_x = empty(x, [n_rows, columns], x.dtype);
        let partial = empty(x, [blocks, self.parts() * columns], DType::F32);
        let residual = residual.unwrap_or(grad);
        let pointers = [x, grad.0, residual.0, mean.unwrap_or(inverse), inverse, gamma, &d_x, &partial];
        let arguments = pointers.into_iter().fold(Arguments::default(), Arguments::pointer);
        let words = [n_rows, stride, grad.1, residual.1];
        let arguments = words.into_iter().fold(arguments, Arguments::word);
        // SAFETY: a warp reads rows below `n_rows` of matrices that have so many, and their mean and inverse, and writes its own rows of `d_x`; a block
        // writes its own row of `partial`. Rows are whole vectors that begin at multiples of 16 bytes, as the caller sees to.
        unsafe { cuda::launch(x, self, blocks as u32, arguments) };
        (d_x, partial)
    }
}

/// Whether the kernel runs on the device of `x`: it is tried on a row for each warp of a block.
fn works<R: CubeRuntime>(x: &CubeTensor<R>, kernel: NormBackwardHopper, gamma: DType) -> bool {
    cuda::works(x, &kernel, "gradients of norms take the portable kernel", || {
        let columns = kernel.columns;
        let matrix = empty(x, [WARPS, columns], x.dtype);
        let (inverse, gamma) = (empty(x, [WARPS, 1], DType::F32), empty(x, [columns], gamma));
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
        for columns in (8..=MOST_COLUMNS).step_by(8) {
            for shifted in [false, true] {
                for adds in [false, true] {
                    let kernel =
                        NormBackwardHopper { half: "bf16", columns, layer: true, shifted, adds, gamma_f32: true };
                    assert!(kernel.stages() >= 2, "{kernel:?}: {} stages", kernel.stages());
                    assert!(kernel.shared_bytes() <= HOPPER_SHARED_BYTES, "{kernel:?}: {}", kernel.shared_bytes());
                    let sums = WARPS * kernel.parts() * columns * 4;
                    assert!(sums <= WARPS * kernel.stages() * kernel.stage_bytes(), "{kernel:?}: {sums} bytes of sums");
                }
            }
        }
    }
}
