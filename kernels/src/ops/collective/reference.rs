//! Collectives through host memory. A single rank returns its tensors unchanged.

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};

use super::{Body, Exchange, HostExchange};

/// Body of [`all_reduce`](crate::all_reduce()).
pub fn all_reduce<B: Backend>(Exchange { tensors, collective, .. }: Exchange<B>) -> Vec<Tensor<B, 1>> {
    let Some(host) = host(&collective.body) else { return tensors };
    let lengths = lengths(&tensors);
    let answer = &mut |parts: Vec<Vec<u8>>| {
        let ranks = parts.len();
        vec![bytes(&sums(parts)); ranks]
    };
    cut(&tensors, &floats(&host.round(sent(&tensors), answer)), &lengths)
}

/// Body of [`reduce_scatter`](crate::reduce_scatter()).
pub fn reduce_scatter<B: Backend>(Exchange { tensors, collective, .. }: Exchange<B>) -> Vec<Tensor<B, 1>> {
    let Some(host) = host(&collective.body) else { return tensors };
    let ranks = collective.rank().ranks;
    let lengths = lengths(&tensors);
    let answer = &mut |parts: Vec<Vec<u8>>| {
        let sums = sums(parts);
        let share = |rank: usize| {
            let mut share = Vec::new();
            let mut begin = 0;
            for length in &lengths {
                let piece = length / ranks;
                share.extend(bytes(&sums[begin + rank * piece..][..piece]));
                begin += length;
            }
            share
        };
        (0..ranks).map(share).collect()
    };
    let shares: Vec<usize> = lengths.iter().map(|length| length / ranks).collect();
    cut(&tensors, &floats(&host.round(sent(&tensors), answer)), &shares)
}

/// Body of [`all_gather`](crate::all_gather()).
pub fn all_gather<B: Backend>(Exchange { tensors, collective, .. }: Exchange<B>) -> Vec<Tensor<B, 1>> {
    let Some(host) = host(&collective.body) else { return tensors };
    let ranks = collective.rank().ranks;
    let lengths = lengths(&tensors);
    let answer = &mut |parts: Vec<Vec<u8>>| {
        let (mut whole, mut begin) = (Vec::new(), 0);
        for length in &lengths {
            parts.iter().for_each(|part| whole.extend_from_slice(&part[4 * begin..][..4 * length]));
            begin += length;
        }
        vec![whole; ranks]
    };
    let wholes: Vec<usize> = lengths.iter().map(|length| length * ranks).collect();
    cut(&tensors, &floats(&host.round(sent(&tensors), answer)), &wholes)
}

/// The host exchange, if there are several ranks.
fn host(body: &Body) -> Option<&dyn HostExchange> {
    match body {
        Body::Host(exchange) => Some(exchange.as_ref()),
        Body::Only => None,
        #[cfg(feature = "cuda")]
        Body::Nccl(_) => unreachable!("CUDA has bodies of its own"),
    }
}

fn lengths<B: Backend>(tensors: &[Tensor<B, 1>]) -> Vec<usize> {
    tensors.iter().map(|tensor| tensor.dims()[0]).collect()
}

/// All elements as f32, concatenated.
fn sent<B: Backend>(tensors: &[Tensor<B, 1>]) -> Vec<u8> {
    let values = tensors.iter().flat_map(|tensor| tensor.to_data().iter::<f32>().collect::<Vec<f32>>());
    values.flat_map(f32::to_le_bytes).collect()
}

/// Sums in rank order.
fn sums(parts: Vec<Vec<u8>>) -> Vec<f32> {
    let mut parts = parts.into_iter();
    let mut sums = floats(&parts.next().unwrap_or_default());
    for part in parts {
        sums.iter_mut().zip(floats(&part)).for_each(|(sum, value)| *sum += value);
    }
    sums
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Splits `values` into tensors of these lengths, with the devices and dtypes of `like`.
fn cut<B: Backend>(like: &[Tensor<B, 1>], values: &[f32], lengths: &[usize]) -> Vec<Tensor<B, 1>> {
    let mut begin = 0;
    let tensor = |(like, length): (&Tensor<B, 1>, &usize)| {
        let data = TensorData::new(values[begin..begin + length].to_vec(), [*length]);
        begin += length;
        Tensor::from_data(data.convert_dtype(like.dtype()), (&like.device(), like.dtype()))
    };
    like.iter().zip(lengths).map(tensor).collect()
}
