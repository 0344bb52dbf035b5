//! How products of f32 matrices are computed: a setting of each operation's operands.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::recorder::{self, PartScope};

/// How tensor cores compute products of f32 matrices.
///
/// Operands take the mode of the thread that [checks](crate::operands::Checked) them, and a graph
/// node keeps that of its forward pass for backward: two models in one process may differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum F32Products {
    /// As accurate as f32 units. On Hopper, large products split numbers in two and compute three
    /// TF32 products each (Ootomo and Yokota, 2022, "Recovering single precision accuracy from
    /// Tensor Cores while surpassing the FP32 theoretical peak performance"); infinities may give
    /// NaN there.
    #[default]
    Exact,
    /// TF32, with 11 of 24 bits, if the device has it: relative errors of 1e-3, in about a third of
    /// the time. Burn's own products, which the references use, may be in TF32 on CUDA in any mode.
    Tf32,
}

thread_local! {
    static CURRENT: Cell<F32Products> = const { Cell::new(F32Products::Exact) };
}

/// A scope in which a thread's operands have a mode.
#[must_use = "the span ends when this is dropped"]
pub struct F32ProductsScope {
    around: F32Products,
    // It must end on the thread where it started.
    _thread: PhantomData<*const ()>,
}

impl F32Products {
    /// The mode of this thread; exact by default.
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// Sets the mode of this thread's operations until the scope ends.
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

/// Whether f32 products of this thread may be in TF32.
#[cfg(feature = "cubecl")]
pub(crate) fn takes_tf32() -> bool {
    F32Products::current() == F32Products::Tf32
}

/// State of a graph node's forward pass for its backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forward {
    part: recorder::Part,
    products: F32Products,
}

impl Forward {
    /// The state of this thread's current pass.
    pub(crate) fn current() -> Self {
        Self { part: recorder::Part::current(), products: F32Products::current() }
    }

    /// Restores it.
    pub(crate) fn enter(self) -> (PartScope, F32ProductsScope) {
        (self.part.enter(), self.products.enter())
    }
}
