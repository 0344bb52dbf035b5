//! How products of f32 matrices are computed: a setting of each operation's operands.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::recorder::{self, PartScope};

/// How products of f32 matrices are computed on tensor cores.
///
/// Operands take the mode of the thread that [checks](crate::operands::Checked) them, and a graph's node that of the forward
/// pass, so that its backward pass has the same: two models in one process need not agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum F32Products {
    /// As accurately as by f32 units: on Hopper large ones are three products in TF32 each, of numbers that are split into
    /// two (Ootomo and Yokota, 2022, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
    /// theoretical peak performance"). There infinities may give NaN, where f32 units would give infinities.
    #[default]
    Exact,
    /// In TF32, which has 11 of the 24 bits, where the device has it: relative errors of 1e-3, in about a third of the time.
    /// Burn's own products, of which the references are made, may be in TF32 on CUDA whatever the mode.
    Tf32,
}

thread_local! {
    static CURRENT: Cell<F32Products> = const { Cell::new(F32Products::Exact) };
}

/// The span in which a thread's operands have a mode.
#[must_use = "the span ends when this is dropped"]
pub struct F32ProductsScope {
    around: F32Products,
    // It must end on the thread that it began on.
    _thread: PhantomData<*const ()>,
}

impl F32Products {
    /// The mode of this thread: exact, unless a span says otherwise.
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// Gives this mode to the operands of this thread's operations, until the span ends.
    ///
    /// ```
    /// use fireclay_kernels::F32Products;
    ///
    /// let span = F32Products::Tf32.enter();
    /// assert_eq!(F32Products::current(), F32Products::Tf32);
    /// drop(span);
    /// assert_eq!(F32Products::current(), F32Products::Exact);
    /// ```
    #[inline]
    pub fn enter(self) -> F32ProductsScope {
        F32ProductsScope { around: CURRENT.replace(self), _thread: PhantomData }
    }
}

impl Drop for F32ProductsScope {
    #[inline]
    fn drop(&mut self) {
        CURRENT.set(self.around);
    }
}

/// Whether products of f32 that this thread launches may be in TF32.
#[cfg(feature = "cubecl")]
pub(crate) fn takes_tf32() -> bool {
    F32Products::current() == F32Products::Tf32
}

/// What a node of a graph keeps of its forward pass for its backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forward {
    part: recorder::Part,
    products: F32Products,
}

impl Forward {
    /// Of the pass that this thread is in.
    pub(crate) fn current() -> Self {
        Self { part: recorder::Part::current(), products: F32Products::current() }
    }

    /// Goes back into it.
    pub(crate) fn enter(self) -> (PartScope, F32ProductsScope) {
        (self.part.enter(), self.products.enter())
    }
}
