//! Exchange between the ranks of a run: processes that work together, a device each.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;
pub(crate) mod reference;

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::checked::{Checked, Operands, part};
use crate::mutation::call;
use crate::recorder::{self, Call};

/// Which of the processes that work together one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    /// Counted from zero.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
}

impl Rank {
    /// The only one.
    pub const ONLY: Self = Self { rank: 0, ranks: 1 };
}

/// What [`all_reduce`] works on.
#[derive(Clone, Debug)]
pub struct AllReduce<B: Backend> {
    /// This rank's tensors, each of the same length on every rank.
    pub tensors: Vec<Tensor<B, 1>>,
    /// Which rank this is.
    pub rank: Rank,
}

impl<B: Backend> Operands for AllReduce<B> {
    fn check(&self) {
        let op = "all_reduce";
        let Rank { rank, ranks } = self.rank;
        assert!(rank < ranks, "{op}: there is no rank {rank} of {ranks}");
        for tensor in &self.tensors {
            part(op, "a tensor", tensor).float();
        }
    }
}

/// Exchange between ranks on a backend.
pub trait CollectiveOps: Backend {
    /// Body of [`all_reduce`].
    fn all_reduce(operands: Checked<AllReduce<Self>>) -> Vec<Tensor<Self, 1>> {
        reference::all_reduce(operands.into_inner())
    }
}

/// The sums over all ranks of each of `tensors`, the same on every rank. Of one rank these are the
/// tensors as they are.
///
/// # Panics
/// If a tensor is empty, the rank is not there, or there are several: no backend has an exchange
/// between devices yet.
pub fn all_reduce<B: CollectiveOps>(tensors: Vec<Tensor<B, 1>>, rank: Rank) -> Vec<Tensor<B, 1>> {
    let _op = recorder::op("all_reduce", || Call::reads([]));
    call!(B: CollectiveOps::all_reduce(Checked::new(AllReduce { tensors, rank })))
}
