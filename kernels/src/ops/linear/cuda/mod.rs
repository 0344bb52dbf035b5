//! The GEMM for Hopper, in CUDA C++ (`gemm.cu`): for large 16-bit products, with bias, activation
//! and residual in the same launch, and for those of f32. That for few rows is [another](few_rows).

mod few_rows;
mod split;
mod tiles;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Mutex;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::device::{Device, DeviceId};
use cubecl::server::Handle;

pub(crate) use self::few_rows::{FewRowsWeight, few_rows_product};
use self::split::split;
use self::tiles::{Tiles, WIDEST, tiles};
use super::cubecl::gemm_tensor_cores::Added;
use super::cubecl::layout::{k_major, transposed};
use crate::cubecl::reduce::sum_over_rows;
use crate::cubecl::{contiguous, empty};
use crate::cuda::{self, Arguments, CudaKernel, HOPPER, HOPPER_SHARED_BYTES, Tried};
use crate::multiprocessors::multiprocessors;
use crate::ops::activation::{Activation, ActivationKind};
use crate::ops::dropout::Dropout;
use crate::ops::linear::route;
use crate::products::takes_tf32;

/// Blocks of a cluster.
const BLOCKS: u32 = 2;
/// Warpgroups of a block that multiply, and rows that each has of a tile.
const CONSUMERS: usize = 2;
const ROWS: usize = 64;
/// Of K in a stage, 128 bytes: of 16 bits, and of f32.
const DEPTH: usize = 64;
const F32_DEPTH: usize = DEPTH / 2;

/// The numbers that are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Numbers {
    Bf16,
    F16,
    /// f32, rounded to TF32.
    Tf32,
    /// f32, [split] into two numbers of TF32 each.
    SplitF32,
}

impl Numbers {
    /// Those of 16 bits.
    fn half(dtype: DType) -> Option<Self> {
        match dtype {
            DType::BF16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            _ => None,
        }
    }

    /// Those of f32, as they were [asked for](crate::F32Products).
    fn f32() -> Self {
        if takes_tf32() { Self::Tf32 } else { Self::SplitF32 }
    }

    /// The name of 16-bit numbers in the source, where such are packed.
    fn half_name(self) -> &'static str {
        if self == Self::F16 { "f16" } else { "bf16" }
    }

    /// Stages of so many of K.
    fn stages(self, k: usize) -> usize {
        match self {
            Self::Bf16 | Self::F16 => k.div_ceil(DEPTH),
            Self::Tf32 => k.div_ceil(F32_DEPTH),
            Self::SplitF32 => 3 * k.div_ceil(F32_DEPTH),
        }
    }
}

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GemmHopper {
    /// What it multiplies.
    numbers: Numbers,
    /// Columns of a tile.
    columns: usize,
    /// Whether `a` is contiguous along M, not K.
    a_major_m: bool,
    /// Whether `b` is contiguous along N, not K.
    b_major_n: bool,
    /// Whether the result is f32.
    out_f32: bool,
    /// Whether the rows of `a` are added up, too.
    row_sums: bool,
    /// The nonlinearity of the result in the source, 0 for none.
    activation: usize,
    /// Whether that gates: of a tile's columns half are gates.
    gated: bool,
    dropout: bool,
    /// Matrices of slopes: that a nonlinearity leaves, or by which the result is multiplied.
    slopes: usize,
}

impl GemmHopper {
    /// A product with nothing behind it, of matrices with K contiguous.
    fn plain(numbers: Numbers, columns: usize) -> Self {
        Self {
            numbers,
            columns,
            a_major_m: false,
            b_major_n: false,
            out_f32: false,
            row_sums: false,
            activation: 0,
            gated: false,
            dropout: false,
            slopes: 0,
        }
    }

    /// A product of f32.
    fn of_f32(numbers: Numbers, columns: usize) -> Self {
        Self { out_f32: true, ..Self::plain(numbers, columns) }
    }

    /// Columns of the result that a tile has.
    fn out_columns(&self) -> usize {
        self.columns / (1 + usize::from(self.gated))
    }

    /// Shared memory besides the stages: the output, the bias, and barriers.
    fn other_bytes(&self) -> usize {
        let out = if self.out_f32 { 0 } else { ROWS * self.out_columns() * 2 };
        CONSUMERS * (out + self.columns * 4) + 256
    }

    fn stage_bytes(&self) -> usize {
        (CONSUMERS * ROWS + self.columns) * DEPTH * 2
    }

    /// As many stages as there is room for.
    fn stages(&self) -> usize {
        (HOPPER_SHARED_BYTES - self.other_bytes()) / self.stage_bytes()
    }
}

impl CudaKernel for GemmHopper {
    fn threads(&self) -> u32 {
        384
    }

    fn entry(&self) -> &'static str {
        "gemm_hopper"
    }

    fn source(&self) -> String {
        let Self { numbers, columns, a_major_m, b_major_n, out_f32, row_sums, activation, gated, dropout, slopes } =
            *self;
        let stages = self.stages();
        let defined = [
            ("TF32", matches!(numbers, Numbers::Tf32 | Numbers::SplitF32).into()),
            ("SPLIT", (numbers == Numbers::SplitF32).into()),
            ("COLUMNS", columns),
            ("STAGES", stages),
            ("A_MAJOR_M", a_major_m.into()),
            ("B_MAJOR_N", b_major_n.into()),
            ("OUT_F32", out_f32.into()),
            ("ROW_SUMS", row_sums.into()),
            ("ACTIVATION", activation),
            ("GATED", gated.into()),
            ("DROPOUT", dropout.into()),
            ("SLOPES", slopes),
        ];
        let defined = cuda::defines(defined);
        format!("#define HALF \"{}\"\n{defined}{HOPPER}{}", numbers.half_name(), include_str!("sm90/gemm.cu"))
    }

    fn shared_bytes(&self) -> usize {
        self.other_bytes() + self.stages() * self.stage_bytes()
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<GemmHopper> = Mutex::new(None);
        &TRIED
    }
}

/// The kernels of training and decoding in bf16: their names and sources.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    training_kernels().map(cuda::named).chain(few_rows::kernels().map(cuda::named))
}

fn training_kernels() -> impl Iterator<Item = impl CudaKernel> {
    let bf16 = |columns| {
        let plain = GemmHopper::plain(Numbers::Bf16, columns);
        let (gelu, swiglu) =
            (GemmHopper { activation: 1, ..plain }, GemmHopper { activation: 3, gated: true, ..plain });
        let backward = GemmHopper { b_major_n: true, ..plain };
        let of_weight = GemmHopper { a_major_m: true, out_f32: true, ..backward };
        let all = [
            plain,
            GemmHopper { dropout: true, ..plain },
            gelu,
            GemmHopper { slopes: 1, ..gelu },
            swiglu,
            GemmHopper { slopes: 2, ..swiglu },
            backward,
            GemmHopper { slopes: 1, ..backward },
            GemmHopper { slopes: 2, ..backward },
            of_weight,
            GemmHopper { row_sums: true, ..of_weight },
        ];
        all.into_iter().filter(|kernel| fits(kernel.columns, kernel.gated, kernel.dropout))
    };
    let of_f32 = |columns| {
        let numbers = [Numbers::Tf32, Numbers::SplitF32].into_iter().filter(move |numbers| fits_f32(columns, *numbers));
        numbers.map(move |numbers| GemmHopper::of_f32(numbers, columns))
    };
    let widths = [128, 192, WIDEST];
    widths.into_iter().flat_map(bf16).chain(widths.into_iter().flat_map(of_f32))
}

/// Whether there are tiles of so many columns: the halves of a gate's are written in blocks of 64
/// columns, and for dropout the widest ones have no registers.
fn fits(columns: usize, gated: bool, dropout: bool) -> bool {
    (!gated || columns.is_multiple_of(128)) && (!dropout || columns < WIDEST)
}

/// Whether there are tiles of so many columns for f32: what is split has sums twice, for which the
/// widest ones have no registers.
fn fits_f32(columns: usize, numbers: Numbers) -> bool {
    numbers != Numbers::SplitF32 || columns < WIDEST
}

/// What follows a product in the same launch.
#[derive(Clone)]
enum Epilogue<R: CubeRuntime> {
    /// f32: whether to add to the destination, and where to write the row sums of `a` over each
    /// stage, f32 `[stages, m]`.
    Sums(bool, Option<CubeTensor<R>>),
    /// Dropout, and a residual `[m, n]` to add, if they are there.
    Residual(Option<Dropout>, Option<CubeTensor<R>>),
    /// A nonlinearity by its number in the source, whether it gates, and where its slopes go, `[m,
    /// columns of b]`.
    Activation(usize, bool, Option<CubeTensor<R>>),
    /// Slopes to multiply by, `[m, n]`, or two of these side by side.
    Slopes(CubeTensor<R>),
}

impl<R: CubeRuntime> Epilogue<R> {
    fn activation(&self) -> (usize, bool) {
        match self {
            Self::Activation(kind, gated, _) => (*kind, *gated),
            _ => (0, false),
        }
    }

    fn dropout(&self) -> Option<Dropout> {
        match self {
            Self::Residual(dropout, _) => *dropout,
            _ => None,
        }
    }

    /// Matrices of slopes, where `b` has `n` columns.
    fn slopes(&self, n: usize) -> usize {
        match self {
            Self::Activation(_, gated, slopes) if slopes.is_some() => 1 + usize::from(*gated),
            Self::Slopes(slopes) => slopes.meta.shape()[1] / n,
            _ => 0,
        }
    }
}

/// `a * b` for `a` `[m, k]` and `b` `[k, n]`, of 16 bits or f32, and what is added to that, as `[m, n]` of `dtype`: f32, or that of the
/// operands. None where the device is no Hopper GPU, the product is too small, an operand has a
/// layout that TMA cannot read, or something is to be added to f32.
pub(super) fn hopper_product<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    added: &Added<R>,
    dtype: DType,
) -> Option<CubeTensor<R>> {
    let reads = |residual: &CubeTensor<R>| residual.dtype == dtype && tma_axis(residual, 1) == Some(1);
    let nothing = added.bias.is_none() && added.dropout.is_none() && added.residual.is_none();
    if !added.residual.as_ref().is_none_or(reads) || !(dtype == a.dtype || dtype == DType::F32 && nothing) {
        return None;
    }
    if [a.dtype, b.dtype] == [DType::F32; 2] {
        return if nothing { f32_product(a, b, None) } else { None };
    }
    let epilogue = match dtype {
        DType::F32 => Epilogue::Sums(false, None),
        _ => Epilogue::Residual(added.dropout, added.residual.clone()),
    };
    let (kernel, whole_rounds) = plan(a, b, added.bias.as_ref(), dtype, &epilogue)?;
    let out = empty(a, [a.meta.shape()[0], b.meta.shape()[1]], dtype);
    kernel.launch(a, b, added.bias.clone(), epilogue, whole_rounds, &out);
    Some(out)
}

/// Adds `a * b` to `sum`, f32 `[m, n]`; false where it does not: something else holds `sum`, there
/// are gaps in it, or for the reasons that [`hopper_product`] has.
pub(super) fn hopper_product_into<R: CubeRuntime>(
    sum: &mut CubeTensor<R>,
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
) -> bool {
    if !takes_sums(sum, [a.meta.shape()[0], b.meta.shape()[1]]) {
        return false;
    }
    if [a.dtype, b.dtype] == [DType::F32; 2] {
        return f32_product(a, b, Some(sum)).is_some();
    }
    let epilogue = Epilogue::Sums(true, None);
    match plan(a, b, None, DType::F32, &epilogue) {
        Some((kernel, whole_rounds)) => {
            kernel.launch(a, b, None, epilogue, whole_rounds, sum);
            true
        }
        None => false,
    }
}

/// `a * b` in f32, added to `sum` in its place where there is one, and the sums of the rows of `a`, f32 `[m]`, where `a` is of 16 bits and contiguous along M:
/// the launch computes those over each stage, and another one adds them up. None for the reasons
/// that [`hopper_product_into`] has.
pub(super) fn hopper_product_and_row_sums<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    sum: Option<&mut CubeTensor<R>>,
) -> Option<[CubeTensor<R>; 2]> {
    let shape = [a.meta.shape()[0], b.meta.shape()[1]];
    let adds = sum.is_some();
    let sum = match sum {
        Some(sum) => Some(takes_sums(sum, shape).then_some(sum.clone())?),
        None => None,
    };
    let [m, k, n] = [shape[0], a.meta.shape()[1], shape[1]];
    if Numbers::half(a.dtype).is_none() || !route::takes_hopper(a, a.dtype, [m, n, k]) {
        return None;
    }
    let row_sums = empty(a, [k.div_ceil(DEPTH), m], DType::F32);
    let epilogue = Epilogue::Sums(adds, Some(row_sums.clone()));
    let (kernel, whole_rounds) = plan(a, b, None, DType::F32, &epilogue)?;
    let out = sum.unwrap_or_else(|| empty(a, shape, DType::F32));
    kernel.launch(a, b, None, epilogue, whole_rounds, &out);
    Some([out, sum_over_rows(row_sums)])
}

/// Whether a product is added to these in their place.
fn takes_sums<R: CubeRuntime>(sum: &mut CubeTensor<R>, shape: [usize; 2]) -> bool {
    let fits = sum.dtype == DType::F32 && sum.meta.shape().as_slice() == shape && sum.is_contiguous();
    // Two numbers are read and written at once.
    fits && sum.handle.offset_start.unwrap_or(0).is_multiple_of(8) && sum.can_mut()
}

/// `a * b` for f32 `a` `[m, k]` and `b` `[k, n]` under any strides, f32 `[m, n]`; added to `sum` in its place, where there is one, which has no gaps,
/// begins at a multiple of 8 bytes, and is nobody else's. None where the device is no Hopper GPU,
/// the product is too small, or rows lie as TMA cannot read them.
fn f32_product<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    sum: Option<&CubeTensor<R>>,
) -> Option<CubeTensor<R>> {
    let [m, k, n] = [a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]];
    // What is split has rows of its own. Two results are written at once.
    let numbers = Numbers::f32();
    let reads = numbers == Numbers::SplitF32 || k.is_multiple_of(4);
    // Kernels count elements in 32 bits, also those of what is split, which are twice as many.
    let countable = m.max(n).saturating_mul(2 * k.next_multiple_of(F32_DEPTH)) < 1 << 32;
    if !route::takes_hopper(a, DType::F32, [m, n, k]) || !reads || !countable || !n.is_multiple_of(2) {
        return None;
    }
    let clusters = (multiprocessors(a) / BLOCKS) as usize;
    let depth = DEPTH * numbers.stages(k);
    let Tiles { columns, whole_rounds } = tiles([m, n, depth], clusters, false, |columns| fits_f32(columns, numbers))?;
    let kernel = GemmHopper::of_f32(numbers, columns);
    if !works(a, kernel) {
        return None;
    }
    let [a, b] = [a.clone(), transposed(b.clone())].map(|x| match numbers {
        Numbers::SplitF32 => split(in_runs_of_k(x)),
        _ => in_runs_of_k(x),
    });
    let epilogue = Epilogue::Sums(sum.is_some(), None);
    let out = sum.cloned().unwrap_or_else(|| empty(&a, [m, n], DType::F32));
    kernel.launch(&a, &transposed(b), None, epilogue, whole_rounds, &out);
    Some(out)
}

/// A matrix `[rows, k]` contiguous along K, with rows aligned to 16 bytes where K allows it: copied
/// only if need be.
fn in_runs_of_k<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let mut x = k_major(x.clone(), x.dtype, 1, true);
    x.meta.remove(0);
    x
}

/// `activation(a * b + bias)` in the dtype of `a`, and its slopes where they are to be saved; otherwise as [`hopper_product`].
pub(super) fn hopper_activate<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    bias: Option<&CubeTensor<R>>,
    activation: Activation,
    saves: bool,
) -> Option<(CubeTensor<R>, Option<CubeTensor<R>>)> {
    let (kind, gated) = numbered(activation)?;
    let [m, k, n] = [a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]];
    if Numbers::half(a.dtype).is_none() || !route::takes_hopper(a, a.dtype, [m, n, k]) {
        return None;
    }
    let slopes = saves.then(|| empty(a, [m, n], a.dtype));
    let epilogue = Epilogue::Activation(kind, gated, slopes.clone());
    let (kernel, whole_rounds) = plan(a, b, bias, a.dtype, &epilogue)?;
    let out = empty(a, [m, activation.output_width(n)], a.dtype);
    kernel.launch(a, b, bias.cloned(), epilogue, whole_rounds, &out);
    Some((out, slopes))
}

/// `(a * b) * slopes` in their dtype, for slopes `[m, n]`, or `[m, 2 n]` of a gated activation, by both halves of which the product is
/// multiplied; otherwise as [`hopper_product`].
pub(super) fn hopper_product_by_slopes<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    slopes: &CubeTensor<R>,
) -> Option<CubeTensor<R>> {
    if slopes.dtype != a.dtype || tma_axis(slopes, 1) != Some(1) {
        return None;
    }
    let epilogue = Epilogue::Slopes(slopes.clone());
    let (kernel, whole_rounds) = plan(a, b, None, a.dtype, &epilogue)?;
    let out = empty(a, [a.meta.shape()[0], slopes.meta.shape()[1]], a.dtype);
    kernel.launch(a, b, None, epilogue, whole_rounds, &out);
    Some(out)
}

/// An activation's number in the sources, and whether it gates; none if they lack it.
fn numbered(activation: Activation) -> Option<(usize, bool)> {
    let Activation { kind, gated } = activation;
    match kind {
        ActivationKind::GeluTanh => Some((1, gated)),
        ActivationKind::Relu => Some((2, gated)),
        ActivationKind::Silu => Some((3, gated)),
        ActivationKind::GeluErf | ActivationKind::QuickGelu | ActivationKind::ReluSquared => None,
    }
}

/// The kernel for a product, if there is one that works, and how many tiles each cluster computes
/// as a whole.
fn plan<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    bias: Option<&CubeTensor<R>>,
    dtype: DType,
    epilogue: &Epilogue<R>,
) -> Option<(GemmHopper, usize)> {
    let [m, k, n] = [a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]];
    if a.dtype != b.dtype || !route::takes_hopper(a, a.dtype, [m, n, k]) {
        return None;
    }
    let out_f32 = dtype == DType::F32;
    let (activation, gated) = epilogue.activation();
    // Rows of the result begin where they can be written.
    let stores = n.is_multiple_of(if out_f32 { 2 } else { 8 });
    assert!(bias.is_none_or(|bias| bias.meta.num_elements() == n), "linear: a bias for {n} columns");
    let adds = bias.is_none_or(|bias| [DType::F32, dtype].contains(&bias.dtype));
    let (a_axis, b_axis) = (tma_axis(a, 1)?, tma_axis(b, 0)?);
    if !stores || !adds || gated && b_axis == 1 {
        return None;
    }
    let (dropout, slopes) = (epilogue.dropout().is_some(), epilogue.slopes(n));
    let row_sums = matches!(epilogue, Epilogue::Sums(_, Some(_)));
    if row_sums && a_axis != 0 {
        return None;
    }
    // Of what has two halves all tiles are whole.
    let halves = gated || slopes == 2;
    // Columns of a tile that drops have one high half.
    let one_half = |columns: usize| n <= 1 << 17 || (1usize << 17).is_multiple_of(columns);
    let allowed = |columns: usize| {
        fits(columns, gated, dropout) && (!halves || n.is_multiple_of(columns)) && (!dropout || one_half(columns))
    };
    let Tiles { columns, whole_rounds } = tiles([m, n, k], (multiprocessors(a) / BLOCKS) as usize, row_sums, allowed)?;
    let numbers = Numbers::half(a.dtype)?;
    let (a_major_m, b_major_n) = (a_axis == 0, b_axis == 1);
    let kernel =
        GemmHopper { numbers, columns, a_major_m, b_major_n, out_f32, row_sums, activation, gated, dropout, slopes };
    works(a, kernel).then_some((kernel, whole_rounds))
}

impl GemmHopper {
    fn launch<R: CubeRuntime>(
        self,
        a: &CubeTensor<R>,
        b: &CubeTensor<R>,
        bias: Option<CubeTensor<R>>,
        epilogue: Epilogue<R>,
        whole_rounds: usize,
        out: &CubeTensor<R>,
    ) {
        let [m, mut k, mut n] = [a.meta.shape()[0], a.meta.shape()[1], out.meta.shape()[1]];
        if self.activation == 0 {
            n /= self.slopes.max(1);
        }
        if self.numbers == Numbers::SplitF32 {
            k /= 2;
        }
        let clusters = multiprocessors(a) / BLOCKS;
        let (a_axis, a_box) = if self.a_major_m { (0, DEPTH) } else { (1, CONSUMERS * ROWS) };
        let (b_axis, b_box) = if self.b_major_n { (1, DEPTH / 2) } else { (0, self.columns / 2) };
        let arguments = Arguments::default().map(a, a_axis, a_box).map(b, b_axis, b_box);
        let bias = bias.map(contiguous);
        let bias_kind = bias.as_ref().map_or(0, |bias| if bias.dtype == DType::F32 { 1 } else { 2 });
        let dropout = epilogue.dropout();
        // What else is read or written, as large as the result or as the sums of rows.
        let (adds, other) = match epilogue {
            Epilogue::Sums(adds, row_sums) => (adds, row_sums),
            Epilogue::Residual(_, residual) => (residual.is_some(), residual),
            Epilogue::Activation(.., slopes) => (false, slopes),
            Epilogue::Slopes(slopes) => (true, Some(slopes)),
        };
        let arguments = match self.out_f32 {
            true => arguments.pointer(out).pointer(other.as_ref().unwrap_or(out)),
            false => {
                let arguments = arguments.map(out, 1, ROWS).map(other.as_ref().unwrap_or(out), 1, ROWS);
                arguments.pointer(bias.as_ref().unwrap_or(out))
            }
        };
        let tiles = m.div_ceil(BLOCKS as usize * CONSUMERS * ROWS) * n.div_ceil(self.out_columns());
        let [partial, ready] = match tiles > whole_rounds * clusters as usize {
            true => cut_buffers(a, clusters as usize),
            false => [out.clone(), out.clone()],
        };
        let arguments = arguments.pointer(&partial).pointer(&ready);
        let words = [m, n, k, whole_rounds, bias_kind, adds.into()];
        let arguments = words.into_iter().fold(arguments, Arguments::word).words(Dropout::words(dropout));
        // SAFETY: TMA reads and writes within the matrices that its maps were made of; f32 results
        // are read and written in pairs below m and n, where n is even and
        // `out` has no gaps and begins at a pair, the sums of rows over each stage below m, of which there are as many, and the bias is read below the columns of `b`, of which `plan` found it to have
        // as many; each consumer of each block has a place of its own for what it leaves of a tile.
        unsafe { cuda::launch(a, self, clusters * BLOCKS, arguments) };
    }
}

/// The axis along which TMA reads a matrix: `first` where both would do. None where neither is
/// contiguous, or runs do not begin at multiples of 16 bytes.
fn tma_axis<R: CubeRuntime>(x: &CubeTensor<R>, first: usize) -> Option<usize> {
    let (shape, strides, size) = (x.meta.shape(), x.meta.strides(), x.dtype.size());
    let aligned = |bytes: usize| bytes.is_multiple_of(16);
    let along = |axis: &usize| {
        let (run, length) = (strides[1 - *axis], shape[*axis]);
        strides[*axis] == 1 && run >= length && aligned(run * size)
    };
    let begin = x.handle.offset_start.unwrap_or(0) as usize;
    [first, 1 - first].into_iter().find(along).filter(|_| aligned(begin))
}

/// What is left of tiles that are cut along K, and marks of where that is ready.
///
/// Kept per thread, as one stream of launches has them in turn.
fn cut_buffers<R: CubeRuntime>(like: &CubeTensor<R>, clusters: usize) -> [CubeTensor<R>; 2] {
    thread_local! {
        static KEPT: RefCell<HashMap<DeviceId, Handle>> = RefCell::new(HashMap::new());
    }
    let places = clusters * BLOCKS as usize * CONSUMERS;
    let elements = places * ROWS * WIDEST;
    let handle = KEPT.with_borrow_mut(|kept| {
        kept.entry(like.device.to_id()).or_insert_with(|| like.client.empty(elements * 4)).clone()
    });
    let (client, device) = (like.client.clone(), like.device.clone());
    let partial = CubeTensor::new_contiguous(client, device, [elements].into(), handle, DType::F32);
    [partial, cuda::marks(like, places)]
}

/// Whether the kernel runs on the device of `x`: tried on a product of one tile.
fn works<R: CubeRuntime>(x: &CubeTensor<R>, kernel: GemmHopper) -> bool {
    cuda::works(x, &kernel, "products take the portable kernels", || {
        let matrix = |[rows, columns]: [usize; 2], transposed: bool| {
            let mut x = empty(x, if transposed { [columns, rows] } else { [rows, columns] }, x.dtype);
            if transposed {
                x.meta.swap(0, 1);
            }
            x
        };
        let a = matrix([BLOCKS as usize * CONSUMERS * ROWS, DEPTH], kernel.a_major_m);
        let b = matrix([DEPTH, kernel.columns], !kernel.b_major_n);
        let dtype = if kernel.out_f32 { DType::F32 } else { x.dtype };
        let GemmHopper { activation, gated, .. } = kernel;
        let rows = a.meta.shape()[0];
        let slopes = (kernel.slopes > 0).then(|| empty(x, [rows, kernel.slopes * kernel.out_columns()], dtype));
        let (epilogue, halves) = match slopes {
            _ if kernel.out_f32 => (Epilogue::Sums(false, kernel.row_sums.then(|| empty(x, [1, rows], DType::F32))), 1),
            slopes if activation > 0 => (Epilogue::Activation(activation, gated, slopes), 1),
            Some(slopes) => (Epilogue::Slopes(slopes), kernel.slopes),
            None => (Epilogue::Residual(None, None), 1),
        };
        let out = empty(x, [rows, halves * kernel.out_columns()], dtype);
        kernel.launch(&a, &b, None, epilogue, 1, &out);
    })
}
