//! The GEMMs for [Hopper](hopper) and for [Ampere and later](ampere), in CUDA C++: for large 16-bit
//! products, with bias, activation and residual in the same launch, and for those of f32. That for
//! few rows is [another](few_rows).

mod ampere;
mod few_rows;
mod hopper;
mod split;
mod tiles;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

pub(crate) use self::few_rows::{FewRowsWeight, few_rows_product};
use self::split::split;
use super::cubecl::gemm_tensor_cores::Added;
use super::cubecl::layout::{k_major, transposed};
use crate::cubecl::empty;
use crate::cubecl::reduce::sum_over_rows;
use crate::cuda::{self, Arch};
use crate::ops::activation::{Activation, ActivationKind};
use crate::ops::dropout::Dropout;
use crate::ops::linear::route;
use crate::products::takes_tf32;

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

    /// Stages of so many of K, as so many bytes each.
    fn stages_of(self, k: usize, bytes: usize) -> usize {
        match self {
            Self::Bf16 | Self::F16 => k.div_ceil(bytes / 2),
            Self::Tf32 => k.div_ceil(bytes / 4),
            Self::SplitF32 => 3 * k.div_ceil(bytes / 4),
        }
    }
}

/// What a kernel computes, of either family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Traits {
    /// What it multiplies.
    numbers: Numbers,
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
    /// Whether a second product is added to the first.
    extended: bool,
}

impl Traits {
    /// A product with nothing behind it, of matrices with K contiguous.
    fn plain(numbers: Numbers) -> Self {
        Self {
            numbers,
            a_major_m: false,
            b_major_n: false,
            out_f32: false,
            row_sums: false,
            activation: 0,
            gated: false,
            dropout: false,
            slopes: 0,
            extended: false,
        }
    }

    /// Those of training in bf16.
    fn of_training() -> [Self; 11] {
        let plain = Self::plain(Numbers::Bf16);
        let (gelu, swiglu) = (Self { activation: 1, ..plain }, Self { activation: 3, gated: true, ..plain });
        let backward = Self { b_major_n: true, ..plain };
        let of_weight = Self { a_major_m: true, out_f32: true, ..backward };
        [
            plain,
            Self { dropout: true, ..plain },
            gelu,
            Self { slopes: 1, ..gelu },
            swiglu,
            Self { slopes: 2, ..swiglu },
            backward,
            Self { slopes: 1, ..backward },
            Self { slopes: 2, ..backward },
            of_weight,
            Self { row_sums: true, ..of_weight },
        ]
    }

    /// Those of training with low-rank adapters in bf16, other than [those](Self::of_training) of training.
    /// The second last is the inference's, which saves no slopes.
    fn of_adapters() -> [Self; 4] {
        let [plain, _, _, _, _, swiglu, backward, ..] = Self::of_training();
        let generating = Self { slopes: 0, ..swiglu };
        [plain, swiglu, generating, backward].map(|traits| Self { extended: true, ..traits })
    }

    /// The macros that both sources have.
    fn defines(&self) -> String {
        let Self { numbers, a_major_m, b_major_n, out_f32, row_sums, activation, gated, dropout, slopes, extended } =
            *self;
        let defined = cuda::defines([
            ("TF32", matches!(numbers, Numbers::Tf32 | Numbers::SplitF32).into()),
            ("SPLIT", (numbers == Numbers::SplitF32).into()),
            ("A_MAJOR_M", a_major_m.into()),
            ("B_MAJOR_N", b_major_n.into()),
            ("OUT_F32", out_f32.into()),
            ("ROW_SUMS", row_sums.into()),
            ("ACTIVATION", activation),
            ("GATED", gated.into()),
            ("DROPOUT", dropout.into()),
            ("SLOPES", slopes),
            ("EXTENDED", extended.into()),
        ]);
        format!("#define HALF \"{}\"\n{defined}", numbers.half_name())
    }

    /// Operands to try a kernel on: matrices `[rows, depth]` and `[depth, columns]`, of which half
    /// are gates' where these are, the result, and what is behind the product, with so many sums of
    /// rows.
    fn operands<R: CubeRuntime>(
        &self,
        x: &CubeTensor<R>,
        [rows, columns, depth]: [usize; 3],
        stages: usize,
    ) -> (Operands<R>, CubeTensor<R>, Epilogue<R>) {
        let matrix = |[rows, columns]: [usize; 2], transposed: bool| {
            let mut x = empty(x, if transposed { [columns, rows] } else { [rows, columns] }, x.dtype);
            if transposed {
                x.meta.swap(0, 1);
            }
            x
        };
        let operands = || [matrix([rows, depth], self.a_major_m), matrix([depth, columns], !self.b_major_n)];
        let dtype = if self.out_f32 { DType::F32 } else { x.dtype };
        let out_columns = columns / (1 + usize::from(self.gated));
        let slopes = (self.slopes > 0).then(|| empty(x, [rows, self.slopes * out_columns], dtype));
        let (epilogue, halves) = match slopes {
            _ if self.out_f32 => {
                (Epilogue::Sums(false, self.row_sums.then(|| empty(x, [stages, rows], DType::F32))), 1)
            }
            slopes if self.activation > 0 => (Epilogue::Activation(self.activation, self.gated, slopes), 1),
            Some(slopes) => (Epilogue::Slopes(slopes), self.slopes),
            None => (Epilogue::Residual(None, None), 1),
        };
        let operands = Operands { first: operands(), second: self.extended.then(operands) };
        (operands, empty(x, [rows, halves * out_columns], dtype), epilogue)
    }
}

/// The kernels of training and decoding in bf16: their names and sources.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    hopper::kernels().map(cuda::named).chain(few_rows::kernels().map(cuda::named))
}

/// The kernels of training for Ampere and later, for devices with this shared memory per block; a
/// selection unless `all` are asked for.
pub(crate) fn ampere_sources(most_bytes: usize, all: bool) -> impl Iterator<Item = (String, String)> {
    ampere::kernels(most_bytes, all).map(cuda::named)
}

/// What is multiplied: `a` `[m, k]` and `b` `[k, n]`, and optionally a second pair, `[m, rank]` and
/// `[rank, n]`, whose product is added.
#[derive(Clone)]
struct Operands<R: CubeRuntime> {
    first: [CubeTensor<R>; 2],
    second: Option<[CubeTensor<R>; 2]>,
}

impl<R: CubeRuntime> Operands<R> {
    /// Of one product, or with that of an adapter.
    fn of(a: &CubeTensor<R>, b: &CubeTensor<R>, second: Option<&[CubeTensor<R>; 2]>) -> Self {
        Self { first: [a.clone(), b.clone()], second: second.cloned() }
    }

    /// `[m, n, k]`.
    fn sizes(&self) -> [usize; 3] {
        let [a, b] = &self.first;
        [a.meta.shape()[0], b.meta.shape()[1], a.meta.shape()[1]]
    }

    /// The inner dimension of the second product, 0 for none.
    fn rank(&self) -> usize {
        self.second.as_ref().map_or(0, |[a, _]| a.meta.shape()[1])
    }
}

/// What follows a product in the same launch.
#[derive(Clone)]
enum Epilogue<R: CubeRuntime> {
    /// f32: whether to add to the destination, and where to write the row sums of `a` over each
    /// stage, f32 `[stages, m]`.
    Sums(bool, Option<CubeTensor<R>>),
    /// Optional dropout, and an optional residual `[m, n]` to add.
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

    /// Whether something is added or multiplied by, and what else is read or written, as large as
    /// the result or as the sums of rows.
    fn other(self) -> (bool, Option<CubeTensor<R>>) {
        match self {
            Self::Sums(adds, row_sums) => (adds, row_sums),
            Self::Residual(_, residual) => (residual.is_some(), residual),
            Self::Activation(.., slopes) => (false, slopes),
            Self::Slopes(slopes) => (true, Some(slopes)),
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

/// `a * b` for `a` `[m, k]` and `b` `[k, n]`, of 16 bits or f32, and what is added to that, as
/// `[m, n]` of `dtype`: f32, or that of the operands. None where no family has a kernel for the
/// device, the product is too small, an operand has a layout that is not read, or something is to be
/// added to f32.
pub(super) fn cuda_product<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    added: &Added<R>,
    dtype: DType,
) -> Option<CubeTensor<R>> {
    let reads = |residual: &CubeTensor<R>| residual.dtype == dtype && tma_axis(residual, 1) == Some(1);
    let nothing =
        added.bias.is_none() && added.dropout.is_none() && added.residual.is_none() && added.low_rank.is_none();
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
    let operands = Operands::of(a, b, added.low_rank.as_ref());
    let plan = plan(&operands, added.bias.as_ref(), dtype, &epilogue)?;
    let out = empty(a, [a.meta.shape()[0], b.meta.shape()[1]], dtype);
    plan.launch(&operands, added.bias.clone(), epilogue, &out);
    Some(out)
}

/// Adds `a * b` to `sum`, f32 `[m, n]`; false where it does not: something else holds `sum`, there
/// are gaps in it, or for the reasons that [`cuda_product`] has.
pub(super) fn cuda_product_into<R: CubeRuntime>(sum: &mut CubeTensor<R>, a: &CubeTensor<R>, b: &CubeTensor<R>) -> bool {
    if !takes_sums(sum, [a.meta.shape()[0], b.meta.shape()[1]]) {
        return false;
    }
    if [a.dtype, b.dtype] == [DType::F32; 2] {
        return f32_product(a, b, Some(sum)).is_some();
    }
    let epilogue = Epilogue::Sums(true, None);
    let operands = Operands::of(a, b, None);
    match plan(&operands, None, DType::F32, &epilogue) {
        Some(plan) => {
            plan.launch(&operands, None, epilogue, sum);
            true
        }
        None => false,
    }
}

/// `a * b` in f32, added to `sum` in its place where there is one, and the sums of the rows of `a`,
/// f32 `[m]`, where `a` is of 16 bits and contiguous along M: the launch computes those over each
/// stage, and another one adds them up. None for the reasons that [`cuda_product_into`] has.
pub(super) fn cuda_product_and_row_sums<R: CubeRuntime>(
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
    if Numbers::half(a.dtype).is_none() || !route::takes_cuda(a, a.dtype, [m, n, k]) {
        return None;
    }
    let depth = if cuda::takes(a, Arch::Sm90) { DEPTH } else { ampere::DEPTH };
    let row_sums = empty(a, [k.div_ceil(depth), m], DType::F32);
    let epilogue = Epilogue::Sums(adds, Some(row_sums.clone()));
    let operands = Operands::of(a, b, None);
    let plan = plan(&operands, None, DType::F32, &epilogue)?;
    let out = sum.unwrap_or_else(|| empty(a, shape, DType::F32));
    plan.launch(&operands, None, epilogue, &out);
    Some([out, sum_over_rows(row_sums)])
}

/// Whether a product is added to these in their place.
fn takes_sums<R: CubeRuntime>(sum: &mut CubeTensor<R>, shape: [usize; 2]) -> bool {
    let fits = sum.dtype == DType::F32 && sum.meta.shape().as_slice() == shape && sum.is_contiguous();
    // Two numbers are read and written at once.
    fits && sum.handle.offset_start.unwrap_or(0).is_multiple_of(8) && sum.can_mut()
}

/// `a * b` for f32 `a` `[m, k]` and `b` `[k, n]` under any strides, f32 `[m, n]`; added to `sum` in
/// its place, where there is one, which has no gaps, begins at a multiple of 8 bytes, and is nobody
/// else's. None where the device is no Hopper GPU, the product is too small, or TMA cannot read the
/// rows.
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
    if !route::takes_cuda(a, DType::F32, [m, n, k]) || !reads || !countable || !n.is_multiple_of(2) {
        return None;
    }
    let traits = Traits { out_f32: true, ..Traits::plain(numbers) };
    let plan = match cuda::takes(a, Arch::Sm90) {
        true => Plan::Hopper(hopper::plan(a, traits, [m, n, k], 0)?),
        // Elsewhere f32 units are faster than three products.
        false if numbers == Numbers::SplitF32 && !cuda::has_fast_tf32(a) => return None,
        false => Plan::Ampere(ampere::plan(a, traits, [m, n, k.next_multiple_of(F32_DEPTH)])?),
    };
    let [a, b] = [a.clone(), transposed(b.clone())].map(|x| match numbers {
        Numbers::SplitF32 => split(in_runs_of_k(x)),
        _ => in_runs_of_k(x),
    });
    let epilogue = Epilogue::Sums(sum.is_some(), None);
    let out = sum.cloned().unwrap_or_else(|| empty(&a, [m, n], DType::F32));
    plan.launch(&Operands::of(&a, &transposed(b), None), None, epilogue, &out);
    Some(out)
}

/// A matrix `[rows, k]` contiguous along K, with rows aligned to 16 bytes where K allows it: copied
/// only if need be.
fn in_runs_of_k<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let mut x = k_major(x.clone(), x.dtype, 1, true);
    x.meta.remove(0);
    x
}

/// `activation(a * b + low_rank + bias)` in the dtype of `a`, and its slopes where they are to be
/// saved; otherwise as [`cuda_product`].
pub(super) fn cuda_product_activate<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    low_rank: Option<&[CubeTensor<R>; 2]>,
    bias: Option<&CubeTensor<R>>,
    activation: Activation,
    saves: bool,
) -> Option<(CubeTensor<R>, Option<CubeTensor<R>>)> {
    let (kind, gated) = numbered(activation)?;
    let [m, k, n] = [a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]];
    if Numbers::half(a.dtype).is_none() || !route::takes_cuda(a, a.dtype, [m, n, k]) {
        return None;
    }
    let slopes = saves.then(|| empty(a, [m, n], a.dtype));
    let epilogue = Epilogue::Activation(kind, gated, slopes.clone());
    let operands = Operands::of(a, b, low_rank);
    let plan = plan(&operands, bias, a.dtype, &epilogue)?;
    let out = empty(a, [m, activation.output_width(n)], a.dtype);
    plan.launch(&operands, bias.cloned(), epilogue, &out);
    Some((out, slopes))
}

/// `(a * b) * slopes` in their dtype, for slopes `[m, n]`, or `[m, 2 n]` of a gated activation, by
/// both halves of which the product is multiplied; otherwise as [`cuda_product`].
pub(super) fn cuda_product_by_slopes<R: CubeRuntime>(
    a: &CubeTensor<R>,
    b: &CubeTensor<R>,
    slopes: &CubeTensor<R>,
) -> Option<CubeTensor<R>> {
    if slopes.dtype != a.dtype || tma_axis(slopes, 1) != Some(1) {
        return None;
    }
    let epilogue = Epilogue::Slopes(slopes.clone());
    let operands = Operands::of(a, b, None);
    let plan = plan(&operands, None, a.dtype, &epilogue)?;
    let out = empty(a, [a.meta.shape()[0], slopes.meta.shape()[1]], a.dtype);
    plan.launch(&operands, None, epilogue, &out);
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

/// The kernel for a product, and how it is cut.
enum Plan {
    Hopper(hopper::HopperPlan),
    Ampere(ampere::AmperePlan),
}

impl Plan {
    fn launch<R: CubeRuntime>(
        self,
        operands: &Operands<R>,
        bias: Option<CubeTensor<R>>,
        epilogue: Epilogue<R>,
        out: &CubeTensor<R>,
    ) {
        match self {
            Self::Hopper(plan) => plan.launch(operands, bias, epilogue, out),
            Self::Ampere(plan) => {
                let [a, b] = &operands.first;
                plan.launch(a, b, bias, epilogue, out)
            }
        }
    }
}

/// The kernel for a product, if there is one that works.
fn plan<R: CubeRuntime>(
    operands: &Operands<R>,
    bias: Option<&CubeTensor<R>>,
    dtype: DType,
    epilogue: &Epilogue<R>,
) -> Option<Plan> {
    let (Operands { first: [a, b], second }, [m, n, k]) = (operands, operands.sizes());
    if a.dtype != b.dtype || !route::takes_cuda(a, a.dtype, [m, n, k]) {
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
    let numbers = Numbers::half(a.dtype)?;
    let (a_major_m, b_major_n, extended) = (a_axis == 0, b_axis == 1, second.is_some());
    let own = Traits { numbers, a_major_m, b_major_n, out_f32, ..Traits::plain(numbers) };
    let traits = Traits { row_sums, activation, gated, dropout, slopes, extended, ..own };
    if let Some([a2, b2]) = second {
        let (rank, alike) = (a2.meta.shape()[1], [a2.dtype, b2.dtype] == [a.dtype; 2]);
        let fits = [a2.meta.shape()[0], b2.meta.shape()[0], b2.meta.shape()[1]] == [m, rank, n];
        let axes = [tma_axis(a2, a_axis), tma_axis(b2, b_axis)] == [Some(a_axis), Some(b_axis)];
        if out_f32 || !alike || !fits || !axes || !cuda::takes(a, Arch::Sm90) {
            return None;
        }
    }
    if !cuda::takes(a, Arch::Sm90) {
        // Chunks of 16 bytes are in the matrix or not.
        let whole = |x: &CubeTensor<R>, axis: usize| (x.meta.shape()[axis] * x.dtype.size()).is_multiple_of(16);
        let n = if gated { n / 2 } else { n };
        let plan = || ampere::plan(a, traits, [m, n, k]).map(Plan::Ampere);
        return if whole(a, a_axis) && whole(b, b_axis) { plan() } else { None };
    }
    hopper::plan(a, traits, [m, n, k], operands.rank()).map(Plan::Hopper)
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
