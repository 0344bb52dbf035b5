//! Operands of backend methods, checked on construction.
//!
//! Kernels launch without bounds checks, so their assumptions are checked before: each method of an
//! operation's trait takes a [`Checked`] struct, which can only be constructed by its checks.
//! Operands that do not fit panic with the operation's name and the two shapes.

use std::ops::Deref;

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, DType, Int, Tensor};

use crate::products::F32Products;

/// Operands with checks.
pub trait Operands {
    /// Panics, with the operation's name, if the operands do not fit together.
    fn check(&self);
}

/// Operands whose shapes, dtypes and devices fit together.
///
/// ```should_panic
/// use burn::tensor::Tensor;
/// use fireclay_kernels::Norm;
/// use fireclay_kernels::operands::{Checked, NormForward};
/// type B = burn::backend::NdArray;
///
/// let device = Default::default();
/// let (x, gamma) = (Tensor::<B, 2>::ones([2, 8], &device), Tensor::<B, 1>::ones([9], &device));
/// Checked::new(NormForward { x, norm: Norm::rms(gamma, 1e-6) }); // norm: gamma [9] does not fit x [2, 8]
/// ```
#[derive(Clone, Debug)]
pub struct Checked<T> {
    operands: T,
    products: F32Products,
}

impl<T: Operands> Checked<T> {
    /// Checks the operands.
    ///
    /// # Panics
    /// If they do not fit, with the operation's name and the two shapes, dtypes or devices.
    #[track_caller]
    pub fn new(operands: T) -> Self {
        operands.check();
        Self { operands, products: F32Products::current() }
    }
}

impl<T> Checked<T> {
    /// The operands.
    pub fn into_inner(self) -> T {
        self.operands
    }

    /// How products of f32 are computed.
    pub fn products(&self) -> F32Products {
        self.products
    }
}

impl<T> Deref for Checked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.operands
    }
}

/// A tensor under check: its name and properties.
pub(crate) struct Part<'a, D> {
    op: &'static str,
    name: &'a str,
    dims: [usize; 4],
    rank: usize,
    dtype: DType,
    device: D,
}

/// Starts the check of an operand of `op`, which must not be empty.
#[track_caller]
pub(crate) fn part<'a, B, const D: usize, K>(
    op: &'static str,
    name: &'a str,
    tensor: &Tensor<B, D, K>,
) -> Part<'a, B::Device>
where
    B: Backend,
    K: BasicOps<B>,
{
    let own: [usize; D] = tensor.dims();
    assert!(own.iter().all(|size| *size > 0), "{op}: {name} {own:?} is empty");
    let mut dims = [1; 4];
    dims[..D].copy_from_slice(&own);
    Part { op, name, dims, rank: D, dtype: tensor.dtype(), device: tensor.device() }
}

impl<D: PartialEq + std::fmt::Debug> Part<'_, D> {
    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Sets the logical dims of packed elements.
    pub(crate) fn unpacked(self, dims: [usize; 4]) -> Self {
        Self { dims, rank: 4, ..self }
    }

    /// Checks that kernels support the dtype.
    #[track_caller]
    pub(crate) fn float(self) -> Self {
        let Self { op, name, dtype, .. } = &self;
        assert!(
            matches!(dtype, DType::F32 | DType::F16 | DType::BF16),
            "{op}: {name} is {dtype:?} but must be f32, f16 or bf16"
        );
        self
    }

    /// Checks the dtype.
    #[track_caller]
    pub(crate) fn of(self, wanted: DType) -> Self {
        let Self { op, name, dtype, .. } = &self;
        assert!(*dtype == wanted, "{op}: {name} is {dtype:?} but must be {wanted:?}");
        self
    }

    /// Checks for integers of 32 or 64 bits.
    #[track_caller]
    pub(crate) fn integer(self) -> Self {
        let Self { op, name, dtype, .. } = &self;
        assert!(
            matches!(dtype, DType::I32 | DType::I64 | DType::U32 | DType::U64),
            "{op}: {name} is {dtype:?} but must be integers of 32 or 64 bits"
        );
        self
    }

    /// Checks the shape, which follows from `other`, and the device.
    #[track_caller]
    pub(crate) fn shaped(self, wanted: &[usize], other: &Part<'_, D>) -> Self {
        let holds = self.dims() == wanted;
        self.fits(holds, other)
    }

    /// Checks that both are on one device, and that the shapes fit, as `holds` says.
    #[track_caller]
    pub(crate) fn fits(self, holds: bool, other: &Part<'_, D>) -> Self {
        let Self { op, name, .. } = &self;
        assert!(holds, "{op}: {name} {:?} does not fit {} {:?}", self.dims(), other.name, other.dims());
        let (own, others) = (&self.device, &other.device);
        assert!(own == others, "{op}: {name} is on {own:?}, {} on {others:?}", other.name);
        self
    }

    /// Checks for the dtype of `other`.
    #[track_caller]
    pub(crate) fn alike(self, other: &Part<'_, D>) -> Self {
        let Self { op, name, dtype, .. } = &self;
        assert!(*dtype == other.dtype, "{op}: {name} is {dtype:?}, {} is {:?}", other.name, other.dtype);
        self
    }
}

/// Clamps integers to `0..=last`: the same behaviour for invalid ids and positions on every
/// backend.
///
/// Values outside, on either side, become `last`.
pub(crate) fn clamp_index<B: Backend, const D: usize>(ids: Tensor<B, D, Int>, last: usize) -> Tensor<B, D, Int> {
    let last = i32::try_from(last).unwrap_or(i32::MAX);
    let outside = ids.clone().lower_elem(0).bool_or(ids.clone().greater_elem(last));
    ids.mask_fill(outside, last)
}
