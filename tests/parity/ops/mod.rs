//! One file per operation, with its name in `kernels/src/ops`.

mod activation;
mod attention;
mod cached_attention;
mod collective;
mod download;
mod dropout;
mod embed;
mod experts;
mod feed_forward;
mod head_log_probs;
mod head_loss;
mod head_sample;
mod linear;
mod lora;
mod norm;
mod optimizer;
mod qkv_norm;
mod reshape;
mod rotary;
mod share;
mod side_loss;
mod weight;
