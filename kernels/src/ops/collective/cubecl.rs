//! Collectives in CubeCL: through NCCL on CUDA, otherwise through host memory.

use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::CollectiveOps;
#[cfg(feature = "cuda")]
use {
    super::nccl::{self, Operation},
    super::{Body, Collective, Exchange, HostExchange, Rank, reference},
    crate::checked::Checked,
    crate::cubecl::{contiguous, empty},
    crate::tensor::{float, primitive},
    burn::tensor::Tensor,
    burn_cubecl::tensor::CubeTensor,
    std::sync::Arc,
};

impl<R, F, I, BT> CollectiveOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    #[cfg(feature = "cuda")]
    fn collective(rank: Rank, exchange: Arc<dyn HostExchange>, device: &R::Device) -> Result<Collective, String> {
        let round = |sends, answer: nccl::Answer<'_>| exchange.round(sends, answer);
        match nccl::communicator(device, rank.rank, rank.ranks, round) {
            Some(communicator) => Ok(Collective::through_nccl(rank, Arc::new(communicator?))),
            None => Ok(Collective::through_host(rank, exchange)),
        }
    }

    #[cfg(feature = "cuda")]
    fn all_reduce(operands: Checked<Exchange<Self>>) -> Vec<Tensor<Self, 1>> {
        exchanged(operands.into_inner(), Operation::AllReduce, |length, _| length, reference::all_reduce)
    }

    #[cfg(feature = "cuda")]
    fn reduce_scatter(operands: Checked<Exchange<Self>>) -> Vec<Tensor<Self, 1>> {
        let length = |length, ranks| length / ranks;
        exchanged(operands.into_inner(), Operation::ReduceScatter, length, reference::reduce_scatter)
    }

    #[cfg(feature = "cuda")]
    fn all_gather(operands: Checked<Exchange<Self>>) -> Vec<Tensor<Self, 1>> {
        let length = |length, ranks| length * ranks;
        exchanged(operands.into_inner(), Operation::AllGather, length, reference::all_gather)
    }
}

/// Runs `operation` through NCCL, or `reference` without a communicator. `length` maps a tensor's
/// length and the number of ranks to the length of its result.
#[cfg(feature = "cuda")]
fn exchanged<R, F, I, BT>(
    operands: Exchange<CubeBackend<R, F, I, BT>>,
    operation: Operation,
    length: impl Fn(usize, usize) -> usize,
    reference: impl FnOnce(Exchange<CubeBackend<R, F, I, BT>>) -> Vec<Tensor<CubeBackend<R, F, I, BT>, 1>>,
) -> Vec<Tensor<CubeBackend<R, F, I, BT>, 1>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let Body::Nccl(communicator) = &operands.collective.body else { return reference(operands) };
    let ranks = operands.collective.rank().ranks;
    let sent: Vec<CubeTensor<R>> = operands.tensors.into_iter().map(|tensor| contiguous(primitive(tensor))).collect();
    let received: Vec<CubeTensor<R>> =
        sent.iter().map(|own| empty(own, [length(own.meta.num_elements(), ranks)], own.dtype)).collect();
    if !sent.is_empty() {
        nccl::submit(communicator, operation, &sent, &received);
    }
    received.into_iter().map(float).collect()
}
