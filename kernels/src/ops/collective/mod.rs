//! Collective operations between the ranks of a run: all-reduce, reduce-scatter and all-gather.

mod autodiff;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;
#[cfg(feature = "cuda")]
mod nccl;
pub(crate) mod reference;

use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::checked::{Checked, Operands, part};
use crate::mutation::call;
use crate::recorder::{self, Call};
#[cfg(feature = "cuda")]
use nccl::Communicator;

/// The rank of a process, and the world size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    /// Rank, counted from zero.
    pub rank: usize,
    /// World size: the number of ranks.
    pub ranks: usize,
}

impl Rank {
    /// The only rank of a run.
    pub const ONLY: Self = Self { rank: 0, ranks: 1 };
}

/// Exchanges bytes between ranks through host memory.
pub trait HostExchange: Send + Sync + std::fmt::Debug {
    /// Gathers `sends` of every rank on rank 0, in rank order. There `answer` computes one part per
    /// rank, and each rank gets its own. All ranks must call this in the same order.
    ///
    /// If a rank has died, this does not return: the process ends.
    fn round(&self, sends: Vec<u8>, answer: &mut dyn FnMut(Vec<Vec<u8>>) -> Vec<Vec<u8>>) -> Vec<u8>;
}

/// The communicator of a run's ranks.
#[derive(Clone, Debug)]
pub struct Collective {
    rank: Rank,
    pub(crate) body: Body,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// A single rank.
    Only,
    /// Rank 0 computes with what the others send, in rank order: sums have the same bits on every
    /// rank.
    Host(Arc<dyn HostExchange>),
    /// NCCL, from device to device.
    #[cfg(feature = "cuda")]
    Nccl(Arc<Communicator>),
}

impl Collective {
    /// The communicator of a single rank.
    pub fn only() -> Self {
        Self { rank: Rank::ONLY, body: Body::Only }
    }

    /// Exchanges through host memory: slow, but on any backend.
    pub fn through_host(rank: Rank, exchange: Arc<dyn HostExchange>) -> Self {
        let body = if rank.ranks == 1 { Body::Only } else { Body::Host(exchange) };
        Self { rank, body }
    }

    /// The fastest exchange that the backend has on `device`: NCCL on CUDA, otherwise host memory.
    /// NCCL is set up through `exchange`. All ranks must call this.
    ///
    /// # Errors
    /// If NCCL is missing or fails; the message says what to do.
    pub fn best<B: CollectiveOps>(
        rank: Rank,
        exchange: Arc<dyn HostExchange>,
        device: &B::Device,
    ) -> Result<Self, String> {
        if rank.ranks == 1 {
            return Ok(Self::only());
        }
        B::collective(rank, exchange, device)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn through_nccl(rank: Rank, communicator: Arc<Communicator>) -> Self {
        Self { rank, body: Body::Nccl(communicator) }
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The first failure since the communicator was created. Any thread may call this at any time.
    pub fn fault(&self) -> Option<String> {
        match &self.body {
            #[cfg(feature = "cuda")]
            Body::Nccl(communicator) => communicator.fault(),
            _ => None,
        }
    }

    /// Aborts running collectives, so that a device does not wait for a dead rank. Later results
    /// are invalid.
    pub fn abort(&self) {
        #[cfg(feature = "cuda")]
        if let Body::Nccl(communicator) = &self.body {
            communicator.abort();
        }
    }
}

/// Operands of a collective: this rank's tensors. Every rank passes as many, with the same lengths
/// and dtype.
#[derive(Clone, Debug)]
pub struct Exchange<B: Backend> {
    /// This rank's tensors.
    pub tensors: Vec<Tensor<B, 1>>,
    /// The communicator.
    pub collective: Collective,
    /// Name of the operation, for messages.
    op: &'static str,
    /// Every length must be a multiple of this.
    multiple: usize,
}

impl<B: Backend> Operands for Exchange<B> {
    fn check(&self) {
        let Self { tensors, collective, op, multiple } = self;
        let Rank { rank, ranks } = collective.rank;
        assert!(rank < ranks, "{op}: rank {rank} is not below the world size {ranks}");
        let dtype = tensors.first().map(Tensor::dtype);
        for tensor in tensors {
            part(op, "a tensor", tensor).float();
            let ([length], own) = (tensor.dims(), tensor.dtype());
            assert!(
                length.is_multiple_of(*multiple),
                "{op}: {length} elements do not divide evenly among {multiple} ranks"
            );
            assert!(Some(own) == dtype, "{op}: tensors have dtypes {own:?} and {dtype:?}");
        }
    }
}

/// Collectives of a backend.
pub trait CollectiveOps: Backend {
    /// Body of [`Collective::best`].
    ///
    /// # Errors
    /// If the devices cannot exchange tensors; the message says what to do.
    fn collective(rank: Rank, exchange: Arc<dyn HostExchange>, _device: &Self::Device) -> Result<Collective, String> {
        Ok(Collective::through_host(rank, exchange))
    }

    /// Body of [`all_reduce`].
    fn all_reduce(operands: Checked<Exchange<Self>>) -> Vec<Tensor<Self, 1>> {
        reference::all_reduce(operands.into_inner())
    }

    /// Body of [`reduce_scatter`].
    fn reduce_scatter(operands: Checked<Exchange<Self>>) -> Vec<Tensor<Self, 1>> {
        reference::reduce_scatter(operands.into_inner())
    }

    /// Body of [`all_gather`].
    fn all_gather(operands: Checked<Exchange<Self>>) -> Vec<Tensor<Self, 1>> {
        reference::all_gather(operands.into_inner())
    }
}

/// All-reduce: the sum of each of `tensors` over all ranks, the same on every rank. With one rank,
/// tensors are returned unchanged.
///
/// All tensors have one dtype: f32, f16 or bf16. NCCL sums in that dtype; the exchange through
/// hosts sums in f32.
///
/// # Panics
/// If a tensor is empty, dtypes differ, or the rank is not below the world size.
pub fn all_reduce<B: CollectiveOps>(tensors: Vec<Tensor<B, 1>>, collective: &Collective) -> Vec<Tensor<B, 1>> {
    let _op = recorder::op("all_reduce", || read(&tensors));
    call!(B: CollectiveOps::all_reduce(exchange("all_reduce", tensors, collective, 1)))
}

/// Reduce-scatter: of tensors `[ranks * n]`, elements `rank * n` to `(rank + 1) * n` of the sums
/// over all ranks.
///
/// # Panics
/// As [`all_reduce`], and if a length is not a multiple of the number of ranks.
pub fn reduce_scatter<B: CollectiveOps>(tensors: Vec<Tensor<B, 1>>, collective: &Collective) -> Vec<Tensor<B, 1>> {
    let ranks = collective.rank.ranks;
    let _op = recorder::op("reduce_scatter", || read(&tensors));
    call!(B: CollectiveOps::reduce_scatter(exchange("reduce_scatter", tensors, collective, ranks)))
}

/// All-gather: concatenates the tensors `[n]` of all ranks, in rank order, to `[ranks * n]`.
///
/// # Panics
/// As [`all_reduce`].
pub fn all_gather<B: CollectiveOps>(tensors: Vec<Tensor<B, 1>>, collective: &Collective) -> Vec<Tensor<B, 1>> {
    let _op = recorder::op("all_gather", || read(&tensors));
    call!(B: CollectiveOps::all_gather(exchange("all_gather", tensors, collective, 1)))
}

fn read<B: Backend>(tensors: &[Tensor<B, 1>]) -> Call {
    Call::reads(tensors.iter().map(recorder::operand).collect::<Vec<_>>())
}

fn exchange<B: Backend>(
    op: &'static str,
    tensors: Vec<Tensor<B, 1>>,
    collective: &Collective,
    multiple: usize,
) -> Checked<Exchange<B>> {
    Checked::new(Exchange { tensors, collective: collective.clone(), op, multiple })
}
