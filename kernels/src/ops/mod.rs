//! The operations, a folder each.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod cached_attention;
pub(crate) mod dropout;
pub(crate) mod embed;
pub(crate) mod head_loss;
pub(crate) mod head_sample;
pub(crate) mod linear;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod reshape;
pub(crate) mod rotary;
pub(crate) mod softmax;
pub(crate) mod weight;
