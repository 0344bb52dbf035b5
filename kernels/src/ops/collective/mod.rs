//! Exchange between the ranks of a run: processes that work together, a device each.

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

/// Moves bytes between ranks through the memory of their hosts.
pub trait HostExchange: Send + Sync + std::fmt::Debug {
    /// Gives rank 0 what every rank `sends`, in the order of the ranks, and gives each rank its part of what rank 0 makes of
    /// that with `answer`, which has one part for each rank. All ranks call it, in the same order.
    ///
    /// Where a rank is gone this does not return: the process ends, as the sums that others wait for cannot be had.
    fn round(&self, sends: Vec<u8>, answer: &mut dyn FnMut(Vec<Vec<u8>>) -> Vec<Vec<u8>>) -> Vec<u8>;
}

/// What the ranks of a run exchange tensors through.
#[derive(Clone, Debug)]
pub struct Collective {
    rank: Rank,
    pub(crate) body: Body,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// There is nobody else.
    Only,
    /// Rank 0 computes with what the others send, in the order of the ranks: sums have the same bits on every rank.
    Host(Arc<dyn HostExchange>),
    /// NVIDIA's library, from device to device.
    #[cfg(feature = "cuda")]
    Nccl(Arc<Communicator>),
}

impl Collective {
    /// Of one rank.
    pub fn only() -> Self {
        Self { rank: Rank::ONLY, body: Body::Only }
    }

    /// Through the memory of the hosts: on any backend, and slow.
    pub fn through_host(rank: Rank, exchange: Arc<dyn HostExchange>) -> Self {
        let body = if rank.ranks == 1 { Body::Only } else { Body::Host(exchange) };
        Self { rank, body }
    }

    /// As a backend does it best on `device`: through NCCL on CUDA, which it sets up by `exchange`, and else through the
    /// memory of the hosts. All ranks call it.
    ///
    /// # Errors
    /// If NCCL is missing or fails, with what to do about it.
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

    /// Which rank this is.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// What went wrong since the exchange began, if something did. It may be asked on any thread, at any time.
    pub fn fault(&self) -> Option<String> {
        match &self.body {
            #[cfg(feature = "cuda")]
            Body::Nccl(communicator) => communicator.fault(),
            _ => None,
        }
    }

    /// Ends what is under way, so that a device does not wait for a rank that is gone. Results are of no use from then on.
    pub fn abort(&self) {
        #[cfg(feature = "cuda")]
        if let Body::Nccl(communicator) = &self.body {
            communicator.abort();
        }
    }
}

/// What an exchange works on: this rank's tensors, as many on every rank, each of the length and dtype that it has there.
#[derive(Clone, Debug)]
pub struct Exchange<B: Backend> {
    /// Of this rank.
    pub tensors: Vec<Tensor<B, 1>>,
    /// Who exchanges them.
    pub collective: Collective,
    /// The operation, for its messages.
    op: &'static str,
    /// What the tensors' lengths are multiples of.
    multiple: usize,
}

impl<B: Backend> Operands for Exchange<B> {
    fn check(&self) {
        let Self { tensors, collective, op, multiple } = self;
        let Rank { rank, ranks } = collective.rank;
        assert!(rank < ranks, "{op}: there is no rank {rank} of {ranks}");
        let dtype = tensors.first().map(Tensor::dtype);
        for tensor in tensors {
            part(op, "a tensor", tensor).float();
            let ([length], own) = (tensor.dims(), tensor.dtype());
            assert!(
                length.is_multiple_of(*multiple),
                "{op}: {length} elements are not to be shared by {multiple} ranks"
            );
            assert!(Some(own) == dtype, "{op}: a tensor is {own:?}, and others {dtype:?}");
        }
    }
}

/// Exchange between ranks on a backend.
pub trait CollectiveOps: Backend {
    /// Body of [`Collective::best`].
    ///
    /// # Errors
    /// If there is no way between the devices, with what to do about it.
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

/// The sums over all ranks of each of `tensors`, the same on every rank. Of one rank these are the
/// tensors as they are.
///
/// All are of one dtype, f32, f16 or bf16, in which NCCL adds them; through hosts they are added in f32.
///
/// # Panics
/// If a tensor is empty, they are of several dtypes, or the rank does not exist.
pub fn all_reduce<B: CollectiveOps>(tensors: Vec<Tensor<B, 1>>, collective: &Collective) -> Vec<Tensor<B, 1>> {
    let _op = recorder::op("all_reduce", || read(&tensors));
    call!(B: CollectiveOps::all_reduce(exchange("all_reduce", tensors, collective, 1)))
}

/// This rank's part of the sums over all ranks: of tensors `[ranks * n]` the elements from `rank * n` to `(rank + 1) * n`.
///
/// # Panics
/// As [`all_reduce`], and if a length is no multiple of the number of ranks.
pub fn reduce_scatter<B: CollectiveOps>(tensors: Vec<Tensor<B, 1>>, collective: &Collective) -> Vec<Tensor<B, 1>> {
    let ranks = collective.rank.ranks;
    let _op = recorder::op("reduce_scatter", || read(&tensors));
    call!(B: CollectiveOps::reduce_scatter(exchange("reduce_scatter", tensors, collective, ranks)))
}

/// The tensors of all ranks one behind the other: of tensors `[n]` the wholes `[ranks * n]`, the same on every rank.
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
