//! The products of a mixture, and which kernels compute them: on Hopper those in CUDA C++ if numbers
//! and matrices are of 16 bits, elsewhere the portable ones.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;

use super::product::{CubeMatrix, Extra, grouped_outer, grouped_product};
use super::sort::Order;
use crate::ops::activation::Activation;
#[cfg(feature = "cuda")]
use crate::ops::experts::cuda::Hopper;
use crate::ops::experts::{Pass, Sizes};

/// Rows of a tile of the portable kernels: few if experts have few rows each.
const FEW_ROWS: usize = 16;
const MANY_ROWS: usize = 64;

/// The products of a mixture for its input.
#[derive(Clone, Debug)]
pub(super) struct Products<R: CubeRuntime> {
    x: CubeTensor<R>,
    sizes: Sizes,
    kernels: Kernels<R>,
}

#[expect(clippy::large_enum_variant, reason = "made and taken apart within one call")]
#[derive(Clone, Debug)]
enum Kernels<R: CubeRuntime> {
    Portable {
        up: CubeMatrix<R>,
        down: CubeMatrix<R>,
        order: Order<R>,
    },
    #[cfg(feature = "cuda")]
    Hopper(Hopper<R>),
}

impl<R: CubeRuntime> Products<R> {
    /// Of `x` `[tokens, d_model]` and the experts `[tokens, k]` that its tokens chose.
    pub(super) fn of(
        x: CubeTensor<R>,
        chosen: CubeTensor<R>,
        [up, down]: [CubeMatrix<R>; 2],
        sizes: Sizes,
        pass: Pass,
    ) -> Self {
        #[cfg(feature = "cuda")]
        if let (CubeMatrix::Float(up), CubeMatrix::Float(down)) = (&up, &down)
            && let Some(hopper) = Hopper::of(&x, &chosen, [up, down], sizes).filter(|hopper| hopper.runs(pass))
        {
            return Self { x, sizes, kernels: Kernels::Hopper(hopper) };
        }
        #[cfg(not(feature = "cuda"))]
        let _ = pass;
        let few = sizes.slots() <= FEW_ROWS * sizes.n_experts;
        let order = Order::of(chosen, sizes, if few { FEW_ROWS } else { MANY_ROWS });
        Self { x, sizes, kernels: Kernels::Portable { up, down, order } }
    }

    /// The slots in the order of their experts.
    pub(super) fn order(&self) -> &Order<R> {
        match &self.kernels {
            Kernels::Portable { order, .. } => order,
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => hopper.order(),
        }
    }

    /// The same if the rows between the two products are in that order, and not in that of slots.
    pub(super) fn places(&self) -> Option<&Order<R>> {
        match &self.kernels {
            Kernels::Portable { .. } => None,
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => Some(hopper.order()),
        }
    }

    /// Both products with all that is between and after them: the output of each slot times its
    /// weight, and what the activation got, if it `keeps` that. None if there are no such kernels.
    pub(super) fn fused(
        &self,
        weights: &CubeTensor<R>,
        biases: &[Option<CubeTensor<R>>; 2],
        after: (Activation, Option<f64>),
        keeps: bool,
    ) -> Option<(CubeTensor<R>, Option<CubeTensor<R>>)> {
        match &self.kernels {
            Kernels::Portable { .. } => {
                let _ = (weights, biases, after, keeps);
                None
            }
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => hopper.forward(&self.x, weights.clone(), biases.clone(), after, keeps),
        }
    }

    /// What the activation gets, `[slots, width]`, in the order of slots.
    pub(super) fn up(&self, bias: Option<CubeTensor<R>>) -> CubeTensor<R> {
        match &self.kernels {
            Kernels::Portable { up, order, .. } => {
                let extra = Extra { bias, weights: None };
                grouped_product((self.x.clone(), self.sizes.k), order, self.matrices(up, false), extra)
            }
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => hopper.up(&self.x, bias),
        }
    }

    /// The output of each slot times its weight, from `hidden` `[slots, d_ff]` in the order of slots.
    pub(super) fn down(
        &self,
        hidden: CubeTensor<R>,
        bias: Option<CubeTensor<R>>,
        weights: CubeTensor<R>,
    ) -> CubeTensor<R> {
        match &self.kernels {
            Kernels::Portable { down, order, .. } => {
                let extra = Extra { bias, weights: Some(weights) };
                grouped_product((hidden, 1), order, self.matrices(down, false), extra)
            }
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => hopper.down(hidden, bias, weights),
        }
    }

    /// Rows of tokens as [`Self::d_hidden`] and [`Self::d_down`] take them: one for each place if these
    /// are in the order of [places](Self::places).
    pub(super) fn rows(&self, of_tokens: CubeTensor<R>) -> CubeTensor<R> {
        match &self.kernels {
            Kernels::Portable { .. } => of_tokens,
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => hopper.rows(&of_tokens),
        }
    }

    /// The [rows](Self::rows) of the output's gradient through the second projections: `[slots,
    /// d_ff]`, in the order of slots, or [places](Self::places).
    pub(super) fn d_hidden(&self, grad: &CubeTensor<R>) -> CubeTensor<R> {
        match &self.kernels {
            Kernels::Portable { down, order, .. } => {
                let extra = Extra { bias: None, weights: None };
                grouped_product((grad.clone(), self.sizes.k), order, self.matrices(down, true), extra)
            }
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => hopper.d_hidden(grad),
        }
    }

    /// `d_inner` `[slots, width]`, in the order that [`Self::d_hidden`] has, through the first
    /// projections: `[slots, d_model]`, in the order of slots.
    pub(super) fn d_x(&self, d_inner: &CubeTensor<R>) -> CubeTensor<R> {
        match &self.kernels {
            Kernels::Portable { up, order, .. } => {
                let extra = Extra { bias: None, weights: None };
                grouped_product((d_inner.clone(), 1), order, self.matrices(up, true), extra)
            }
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => hopper.d_x(d_inner),
        }
    }

    /// The gradient of the first projections, f32 `[n_experts * width, d_model]`, added to `sum` if
    /// given; `d_inner` as for [`Self::d_x`].
    pub(super) fn d_up(&self, d_inner: CubeTensor<R>, sum: Option<CubeTensor<R>>) -> CubeTensor<R> {
        match &self.kernels {
            Kernels::Portable { order, .. } => grouped_outer((d_inner, 1), (self.x.clone(), self.sizes.k), order, sum),
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => hopper.d_up(&d_inner, &self.x, sum),
        }
    }

    /// The gradient of the second projections, f32 `[n_experts * d_model, d_ff]`, added to `sum` if
    /// given, from the [rows](Self::rows) of the output's gradient, and `hidden` times its weights in the order that
    /// [`Self::d_hidden`] has.
    pub(super) fn d_down(
        &self,
        grad: &CubeTensor<R>,
        hidden: CubeTensor<R>,
        sum: Option<CubeTensor<R>>,
    ) -> CubeTensor<R> {
        match &self.kernels {
            Kernels::Portable { order, .. } => grouped_outer((grad.clone(), self.sizes.k), (hidden, 1), order, sum),
            #[cfg(feature = "cuda")]
            Kernels::Hopper(hopper) => hopper.d_down(grad, &hidden, sum),
        }
    }

    fn matrices(&self, matrix: &CubeMatrix<R>, back: bool) -> (CubeMatrix<R>, usize, bool) {
        (matrix.clone(), self.sizes.n_experts, back)
    }
}
