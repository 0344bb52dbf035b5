//! The operations, one folder each: `mod.rs` has the public function with all checks, the operands
//! and the trait; `reference.rs` the implementation from basic operations; `autodiff.rs` its graph
//! nodes; `cpu.rs` and `cubecl.rs` the implementations of these backends.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod cached_attention;
pub(crate) mod collective;
pub(crate) mod decode_step;
pub(crate) mod download;
pub(crate) mod dropout;
pub(crate) mod embed;
pub(crate) mod experts;
pub(crate) mod feed_forward;
pub(crate) mod head_log_probs;
pub(crate) mod head_loss;
pub(crate) mod head_sample;
#[cfg(feature = "cuda")]
pub(crate) mod kernels;
pub(crate) mod linear;
pub(crate) mod lora;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod qkv_norm;
pub(crate) mod reshape;
pub(crate) mod rotary;
pub(crate) mod share;
pub(crate) mod side_loss;
pub(crate) mod upload;
pub(crate) mod weight;
