//! Grouped products for Hopper, in CUDA C++ (`sm90/`), of 16 bits. Rows of tokens are gathered in the
//! order of their experts; results go to slots or stay in that order.

mod kernels;

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use self::kernels::{GroupedOuter, GroupedProduct, number, outer_columns, product_columns};
use super::cubecl::gather::gathered;
use super::cubecl::sort::Order;
use super::{Pass, Sizes};
use crate::cubecl::{cast, contiguous, empty, rows};
use crate::cuda::{self, Arch, Arguments};
use crate::multiprocessors::multiprocessors;
use crate::ops::activation::Activation;

pub(crate) use self::kernels::hopper_sources;

/// Blocks of a cluster, rows of its tile, and of a box of TMA.
const BLOCKS: u32 = 2;
const TILE_ROWS: usize = 256;
const ROWS: usize = 64;
/// What runs if a kernel does not.
const INSTEAD: &str = "mixtures of experts take the portable kernels";
/// Of K in a stage.
const DEPTH: usize = 64;

/// The products of a mixture whose weights are of 16 bits.
#[derive(Clone, Debug)]
pub(super) struct Hopper<R: CubeRuntime> {
    order: Order<R>,
    up: CubeTensor<R>,
    down: CubeTensor<R>,
    sizes: Sizes,
}

/// An activation in the launch of a product.
#[derive(Clone, Copy, Debug)]
struct Fused {
    /// Its number in the source.
    kind: usize,
    gated: bool,
    /// Whether what it gets is saved.
    saves: bool,
}

/// What follows a product, as a kernel knows it.
#[derive(Clone, Copy, Debug, Default)]
struct After {
    biased: bool,
    weighted: bool,
    fused: Option<Fused>,
}

/// What else a product reads.
#[derive(Clone, Debug)]
struct Extra<R: CubeRuntime> {
    /// Added to rows by their expert, `[n_experts * rows of its matrix]`.
    bias: Option<CubeTensor<R>>,
    /// Multiplies rows, `[slots]` of any shape.
    weights: Option<CubeTensor<R>>,
    limit: Option<f64>,
}

impl<R: CubeRuntime> Extra<R> {
    fn none() -> Self {
        Self { bias: None, weights: None, limit: None }
    }
}

impl<R: CubeRuntime> Hopper<R> {
    /// None where the device is no Hopper GPU, or where `x` or a weight is not of 16 bits, or has rows
    /// that are no multiple of 16 bytes.
    pub(super) fn of(
        x: &CubeTensor<R>,
        chosen: &CubeTensor<R>,
        [up, down]: [&CubeTensor<R>; 2],
        sizes: Sizes,
    ) -> Option<Self> {
        let Sizes { n_experts, d_model, width, d_ff, .. } = sizes;
        let whole = [d_model, d_ff].iter().all(|size| size.is_multiple_of(8));
        let alike = [up, down].iter().all(|weight| weight.dtype == x.dtype && begins_whole(weight));
        // Kernels count rows and columns with signs.
        let countable = n_experts * width.max(d_model) < 1 << 31 && sizes.slots() < 1 << 30;
        let takes = cuda::takes(x, Arch::Sm90) && cuda::half_name(x.dtype.into()).is_some();
        if !takes || !whole || !alike || !countable || sizes.slots() == 0 {
            return None;
        }
        let [up, down] = [up, down].map(|weight| whole_rows(weight.clone()));
        let order = Order::of(chosen.clone(), sizes, TILE_ROWS);
        Some(Self { order, up, down, sizes })
    }

    /// The slots in the order of their experts.
    pub(super) fn order(&self) -> &Order<R> {
        &self.order
    }

    /// Whether all kernels of a pass run.
    pub(super) fn runs(&self, pass: Pass) -> bool {
        match pass {
            Pass::Forward { biased, activation, keeps } => {
                let fused = number(activation.kind).map(|kind| Fused { kind, gated: activation.gated, saves: keeps });
                let up = After { biased: biased[0], fused, ..After::default() };
                let down = After { biased: biased[1], weighted: true, ..After::default() };
                self.runs_product(self.kernel(&self.up, false, up))
                    && self.runs_product(self.kernel(&self.down, false, down))
            }
            Pass::Backward { adds } => {
                let products = [&self.down, &self.up].map(|matrices| self.kernel(matrices, true, After::default()));
                let outer =
                    [self.outer_kernel(self.up_shape(), adds[0]), self.outer_kernel(self.down_shape(), adds[1])];
                products.into_iter().all(|kernel| self.runs_product(kernel))
                    && outer.into_iter().all(|kernel| self.runs_outer(kernel))
            }
        }
    }

    /// The output of each slot times its weight, `[slots, d_model]`, and what the activation got,
    /// `[slots, width]`, if it `keeps` that. None if kernels do not have the activation.
    pub(super) fn forward(
        &self,
        x: &CubeTensor<R>,
        weights: CubeTensor<R>,
        [up_bias, down_bias]: [Option<CubeTensor<R>>; 2],
        (activation, limit): (Activation, Option<f64>),
        keeps: bool,
    ) -> Option<(CubeTensor<R>, Option<CubeTensor<R>>)> {
        let fused = Fused { kind: number(activation.kind)?, gated: activation.gated, saves: keeps };
        let extra = Extra { bias: up_bias, limit, ..Extra::none() };
        let (hidden, inner) = self.product(&self.rows(x), (&self.up, false), Some(fused), extra, false);
        let extra = Extra { bias: down_bias, weights: Some(weights), ..Extra::none() };
        Some((self.product(&hidden, (&self.down, false), None, extra, true).0, inner))
    }

    /// The rows of tokens in the order of places.
    pub(super) fn rows(&self, of_tokens: &CubeTensor<R>) -> CubeTensor<R> {
        gathered(of_tokens.clone(), self.sizes.k, &self.order)
    }

    /// What the activation gets, `[slots, width]`, in the order of slots.
    pub(super) fn up(&self, x: &CubeTensor<R>, bias: Option<CubeTensor<R>>) -> CubeTensor<R> {
        self.product(&self.rows(x), (&self.up, false), None, Extra { bias, ..Extra::none() }, true).0
    }

    /// The output of each slot times its weight, from `hidden` `[slots, d_ff]` in the order of slots.
    pub(super) fn down(
        &self,
        hidden: CubeTensor<R>,
        bias: Option<CubeTensor<R>>,
        weights: CubeTensor<R>,
    ) -> CubeTensor<R> {
        let hidden = gathered(hidden, 1, &self.order);
        let extra = Extra { bias, weights: Some(weights), ..Extra::none() };
        self.product(&hidden, (&self.down, false), None, extra, true).0
    }

    /// The [rows](Self::rows) of a gradient through the second projections: `[slots, d_ff]`, in the
    /// order of places.
    pub(super) fn d_hidden(&self, grad: &CubeTensor<R>) -> CubeTensor<R> {
        self.product(grad, (&self.down, true), None, Extra::none(), false).0
    }

    /// `d_inner` `[slots, width]`, in the order of places, through the first projections: `[slots,
    /// d_model]`, in the order of slots.
    pub(super) fn d_x(&self, d_inner: &CubeTensor<R>) -> CubeTensor<R> {
        self.product(d_inner, (&self.up, true), None, Extra::none(), true).0
    }

    /// The gradient of the first projections, from `d_inner` in the order of places; added to `sum`
    /// if given.
    pub(super) fn d_up(&self, d_inner: &CubeTensor<R>, x: &CubeTensor<R>, sum: Option<CubeTensor<R>>) -> CubeTensor<R> {
        self.outer(self.outer_kernel(self.up_shape(), sum.is_some()), d_inner, &self.rows(x), sum)
    }

    /// The gradient of the second projections, from the [rows](Self::rows) of the output's and
    /// `hidden` times its weights, in the order of places.
    pub(super) fn d_down(
        &self,
        grad: &CubeTensor<R>,
        hidden: &CubeTensor<R>,
        sum: Option<CubeTensor<R>>,
    ) -> CubeTensor<R> {
        self.outer(self.outer_kernel(self.down_shape(), sum.is_some()), grad, hidden, sum)
    }

    fn clusters(&self) -> u32 {
        multiprocessors(&self.up) / BLOCKS
    }

    /// The kernel of a product with a stack of matrices, with their transposes unless `back`.
    fn kernel(&self, matrices: &CubeTensor<R>, back: bool, after: After) -> GroupedProduct {
        let After { biased, weighted, fused } = after;
        let Fused { kind: activation, gated, saves } = fused.unwrap_or(Fused { kind: 0, gated: false, saves: false });
        let n_experts = self.sizes.n_experts;
        let [all, across] = [matrices.meta.shape()[0], matrices.meta.shape()[1]];
        let (n, k) = if back { (across, all / n_experts) } else { (all / n_experts, across) };
        let rows = self.sizes.slots().div_ceil(TILE_ROWS) + n_experts / 2;
        let columns = product_columns([rows, n, k], self.clusters() as usize, gated);
        let half = half(matrices);
        GroupedProduct { half, columns, b_major_n: back, activation, gated, saves, biased, weighted }
    }

    /// Rows and columns of the gradient of an expert's first and second projection.
    fn up_shape(&self) -> [usize; 2] {
        [self.sizes.width, self.sizes.d_model]
    }

    fn down_shape(&self) -> [usize; 2] {
        [self.sizes.d_model, self.sizes.d_ff]
    }

    fn outer_kernel(&self, [m, n]: [usize; 2], adds: bool) -> GroupedOuter {
        let columns = outer_columns([m, n, self.sizes.n_experts], self.clusters() as usize);
        GroupedOuter { half: half(&self.up), columns, adds }
    }

    /// Rows `a`, in the order of places, times the matrices of their experts, and what the activation
    /// got if it is saved.
    fn product(
        &self,
        a: &CubeTensor<R>,
        (matrices, back): (&CubeTensor<R>, bool),
        fused: Option<Fused>,
        extra: Extra<R>,
        to_slots: bool,
    ) -> (CubeTensor<R>, Option<CubeTensor<R>>) {
        let after = After { biased: extra.bias.is_some(), weighted: extra.weights.is_some(), fused };
        self.launch_product(self.kernel(matrices, back, after), a, matrices, extra, to_slots)
    }

    fn launch_product(
        &self,
        kernel: GroupedProduct,
        a: &CubeTensor<R>,
        matrices: &CubeTensor<R>,
        Extra { bias, weights, limit }: Extra<R>,
        to_slots: bool,
    ) -> (CubeTensor<R>, Option<CubeTensor<R>>) {
        let (slots, n_experts) = (self.sizes.slots(), self.sizes.n_experts);
        let [all, across] = [matrices.meta.shape()[0], matrices.meta.shape()[1]];
        let b_rows = all / n_experts;
        let (n, k) = if kernel.b_major_n { (across, b_rows) } else { (b_rows, across) };
        let n = if kernel.gated { n / 2 } else { n };
        let out = empty(a, [slots, n], a.dtype);
        let inner = kernel.saves.then(|| empty(a, [slots, b_rows], a.dtype));
        let bias = bias.map(|bias| contiguous(cast(bias, DType::F32)));
        let weights = weights.map(|weights| {
            let CubeTensor { client, device, handle, .. } = contiguous(cast(weights, DType::F32));
            let of_slots = CubeTensor::new_contiguous(client, device, [slots, 1].into(), handle, DType::F32);
            gathered(of_slots, 1, &self.order)
        });
        let Order { slots, tiles, most_tiles, .. } = &self.order;
        let arguments = Arguments::default()
            .map(a, 1, ROWS)
            .map(matrices, 1, if kernel.b_major_n { DEPTH / 2 } else { kernel.columns / 2 })
            .pointer(&out)
            .pointer(inner.as_ref().unwrap_or(&out))
            .pointer(bias.as_ref().unwrap_or(&out))
            .pointer(weights.as_ref().unwrap_or(&out))
            .pointer(slots)
            .pointer(tiles);
        let words = [n, k, n_experts, b_rows, *most_tiles, to_slots.into(), limit.is_some().into()];
        let limit = (limit.unwrap_or(0.0) as f32).to_bits();
        let arguments = words.into_iter().fold(arguments, Arguments::word).word(limit as usize);
        // SAFETY: TMA reads within `a` and the matrices; rows of results are written at the slots or
        // places of an expert's tiles, of which there is one row each, below n, which is a multiple of
        // 8, as rows begin at multiples of 16 bytes; the bias is read at the rows of an expert's
        // matrix, and weights at places.
        unsafe { cuda::launch(&out, kernel, self.clusters() * BLOCKS, arguments) };
        (out, inner)
    }

    /// Of each expert `a^T b` over its places: f32 `[n_experts * columns of a, columns of b]`, added to
    /// `sum` if given.
    fn outer(
        &self,
        kernel: GroupedOuter,
        a: &CubeTensor<R>,
        b: &CubeTensor<R>,
        sum: Option<CubeTensor<R>>,
    ) -> CubeTensor<R> {
        let n_experts = self.sizes.n_experts;
        let (m, n) = (a.meta.shape()[1], b.meta.shape()[1]);
        let out = match sum.map(contiguous) {
            Some(sum) if sum.can_mut() && begins_whole(&sum) => sum,
            // A copy may have padded rows.
            Some(sum) => contiguous(sum.copy()),
            None => empty(a, [n_experts * m, n], DType::F32),
        };
        let arguments = Arguments::default().map(a, 1, DEPTH).map(b, 1, DEPTH / 2);
        let arguments = arguments.pointer(&out).pointer(&self.order.starts);
        let arguments = [m, n, n_experts].into_iter().fold(arguments, Arguments::word);
        // SAFETY: TMA reads within `a` and `b`; each expert's matrix has one row and column for each
        // column of both, which are multiples of 8.
        unsafe { cuda::launch(&out, kernel, self.clusters() * BLOCKS, arguments) };
        out
    }

    /// A mixture of one expert and one tile of rows, to try kernels on.
    fn trial(&self, columns: usize, gated: bool) -> Self {
        let x = &self.up;
        let width = columns;
        let d_ff = if gated { columns / 2 } else { columns };
        let sizes = Sizes { tokens: TILE_ROWS, k: 1, n_experts: 1, d_model: DEPTH, width, d_ff };
        // All of any numbers are the only expert's.
        let order = Order::of(empty(x, [TILE_ROWS, 1], DType::I32), sizes, TILE_ROWS);
        let [up, down] = [[width, DEPTH], [DEPTH, d_ff]].map(|shape| empty(x, shape, x.dtype));
        Self { order, up, down, sizes }
    }

    /// Whether a kernel runs on this device.
    fn runs_product(&self, kernel: GroupedProduct) -> bool {
        cuda::works(&self.up, &kernel, INSTEAD, || {
            let trial = self.trial(kernel.columns, kernel.gated);
            let f32s = |wanted: bool, length: usize| wanted.then(|| empty(&self.up, [length], DType::F32));
            let extra = Extra {
                bias: f32s(kernel.biased, kernel.columns),
                weights: f32s(kernel.weighted, TILE_ROWS),
                limit: None,
            };
            // Back, a matrix has K rows.
            let k = if kernel.b_major_n { kernel.columns } else { DEPTH };
            let a = empty(&self.up, [TILE_ROWS, k], self.up.dtype);
            trial.launch_product(kernel, &a, &trial.up, extra, true);
        })
    }

    fn runs_outer(&self, kernel: GroupedOuter) -> bool {
        cuda::works(&self.up, &kernel, INSTEAD, || {
            let trial = self.trial(kernel.columns, false);
            let [a, b] = [DEPTH, kernel.columns].map(|columns| empty(&self.up, [TILE_ROWS, columns], self.up.dtype));
            let sum = kernel.adds.then(|| empty(&self.up, [DEPTH, kernel.columns], DType::F32));
            trial.outer(kernel, &a, &b, sum);
        })
    }
}

/// The name of a dtype of 16 bits in sources.
fn half<R: CubeRuntime>(x: &CubeTensor<R>) -> &'static str {
    cuda::half_name(x.dtype.into()).expect("numbers of 16 bits")
}

/// Whether the first element of a tensor begins at a multiple of 16 bytes.
fn begins_whole<R: CubeRuntime>(x: &CubeTensor<R>) -> bool {
    x.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

/// A matrix whose rows are contiguous and begin at multiples of 16 bytes: copied only if need be.
fn whole_rows<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let (x, stride) = rows(x);
    if (stride * x.dtype.size()).is_multiple_of(16) && stride >= x.meta.shape()[1] { x } else { contiguous(x) }
}
