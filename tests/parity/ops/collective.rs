//! Exchange between ranks.

use burn::tensor::Tensor;
use fireclay_kernels::{Rank, all_reduce};

use crate::backend_test;
use crate::compare::{random, values};

backend_test!(sums_over_one_rank_are_its_own_tensors::<B>(device) {
    let tensors: Vec<Tensor<B, 1>> = [1, 7, 300].map(|size| random::<B, 1>(size as u64, [size], &device)).into();
    let wanted: Vec<_> = tensors.iter().map(values).collect();
    let sums = all_reduce(tensors, Rank::ONLY);
    assert_eq!(sums.iter().map(values).collect::<Vec<_>>(), wanted);
});
