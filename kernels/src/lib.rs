//! Fireclay's [`Backend`] trait: the operations of a transformer, at the granularity that one
//! kernel can fuse.
//!
//! Each operation has a folder:
//!
//! - `mod.rs`: the public function on tensors, with shapes, dtypes and the paper, and the
//!   operation's trait;
//! - `reference.rs`: the same from Burn's basic operations, readable, and correct on every backend;
//! - `autodiff.rs`: `op_forward` and `op_backward` as a node of
//!   [`Autodiff`](burn::backend::Autodiff), so that the fused backward belongs to the fused forward;
//! - `cpu.rs` and `cubecl.rs` (or a folder): the fused kernels.
//!
//! A model only calls the public functions. A backend with faster kernels overrides the trait's
//! methods, which the model does not notice.
//!
//! ```
//! use burn::tensor::Tensor;
//! use fireclay_kernels::{Norm, norm};
//! type B = burn::backend::NdArray;
//!
//! let device = Default::default();
//! let x = Tensor::<B, 3>::from_data([[[1.0, 3.0], [2.0, 2.0]]], &device);
//! let gamma = Tensor::<B, 1>::ones([2], &device);
//! let y = norm(x, &Norm::rms(gamma, 1e-6));
//! let rows: Vec<f32> = y.into_data().to_vec().unwrap();
//! assert!((rows[0] - 1.0 / 5.0f32.sqrt()).abs() < 1e-4);
//! ```

mod autodiff;
mod backend;
mod checked;
mod compile_ahead;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(feature = "cubecl")]
mod cubecl;
#[cfg(feature = "cuda")]
mod cuda;
pub mod devices;
mod masked;
#[cfg(feature = "cubecl")]
mod multiprocessors;
mod mutation;
pub mod notices;
mod ops;
mod packed_heads;
mod products;
mod quant;
mod random;
pub mod recorder;
mod rehearsal;
mod selection;
mod tensor;

pub use autodiff::{backward, backward_from};
pub use backend::Backend;
pub use compile_ahead::compile_ahead;
pub use ops::activation::{Activation, ActivationKind, activate};
pub use ops::attention::{
    AttentionGradients, AttentionMask, AttentionOptions, AttentionOutput, attention, attention_weights, qkv_attention,
    sink_attention,
};
pub use ops::cached_attention::{CacheDType, CachedRow, CachedTokens, LayerCache, Placement, cached_attention};
pub use ops::collective::{Collective, HostExchange, Rank, all_gather, all_reduce, reduce_scatter};
pub use ops::decode_step::{
    Declined, DecodeBlock, DecodeModel, DecodePlan, DecodeRouter, Decoded, ExpertChoice, MultiStep, Predicted,
    StepDraw, decode_step,
};
pub use ops::download::{Download, download_float, download_int};
pub use ops::dropout::{Dropout, dropout};
pub use ops::embed::{embed, embed_add};
pub use ops::experts::{
    ExpertsGradients, ExpertsLayer, ExpertsOutput, MOST_EXPERTS, choose_experts, expert_loads, experts,
};
pub use ops::feed_forward::{FeedForwardGradients, FeedForwardLayer, FeedForwardOutput, feed_forward};
pub use ops::head_log_probs::{HeadLogProbsGradients, head_log_probs};
pub use ops::head_loss::{
    HeadLossGradients, HeadLossOptions, HeadLossOutput, HeadLossWanted, IGNORED_TARGET, head_loss,
};
pub use ops::head_sample::{
    Penalties, SampledRow, SampledRows, Sampling, TokenCounts, draw, head_logits, head_sample, head_sample_logits,
};
#[cfg(feature = "cuda")]
pub use ops::kernels::{CudaSource, cuda_sources};
pub use ops::linear::{LinearGradients, LinearOutput, Saved, Wanted, linear, linear_add, norm_gate_up, norm_linear};
pub use ops::lora::{LoraGradients, LoraLayer, LoraOutput, LoraWanted, lora};
pub use ops::norm::{Norm, NormGradients, NormKind, NormOutput, norm};
pub use ops::optimizer::{AdamW, AdamWParameter, gradient_norm, optimizer_step, optimizer_step_of};
pub use ops::qkv_norm::{HeadNorms, QkvNormGradients, QkvNormOutput, qkv_norm};
pub use ops::reshape::reshape;
pub use ops::rotary::{RotaryTable, next_positions, qkv_rotary, rotary};
pub use ops::share::{DeviceTensor, Place, Reader, SharedMemory, reclaim_shared};
pub use ops::side_loss::side_loss;
pub use ops::upload::{upload, upload_pieces};
pub use ops::weight::HostWeight;
pub use packed_heads::PackedHeads;
pub use products::{F32Products, F32ProductsScope};
pub use quant::blocks::BlockFormat;
pub use quant::grouped::GroupedFormat;
pub use quant::{Format, QuantizedWeight, RowLayout, RowOrder, Weight, e4m3_value};
pub use random::RandomKey;
pub use selection::{Kernels, use_kernels, use_wait_seconds};

/// Quantized matrices as checkpoints store them.
pub mod packed {
    pub use crate::quant::packed::awq::Awq;
    pub use crate::quant::packed::bitsandbytes::{Bnb4, Bnb4Scales, int8};
    pub use crate::quant::packed::compressed::Compressed;
    pub use crate::quant::packed::fp8::scaled_blocks;
    pub use crate::quant::packed::gptq::Gptq;
    pub use crate::quant::packed::mxfp4::mxfp4;
    pub use crate::quant::packed::{CodedMatrix, Coding, StoredCodes};
}

/// The traits of the operations, one per group, which backends implement.
pub mod traits {
    pub use crate::ops::activation::ActivationOps;
    pub use crate::ops::attention::AttentionOps;
    pub use crate::ops::cached_attention::CachedAttentionOps;
    pub use crate::ops::collective::CollectiveOps;
    pub use crate::ops::decode_step::DecodeStepOps;
    pub use crate::ops::download::DownloadOps;
    pub use crate::ops::dropout::DropoutOps;
    pub use crate::ops::embed::EmbedOps;
    pub use crate::ops::experts::ExpertsOps;
    pub use crate::ops::feed_forward::FeedForwardOps;
    pub use crate::ops::head_log_probs::HeadLogProbsOps;
    pub use crate::ops::head_loss::HeadLossOps;
    pub use crate::ops::head_sample::HeadSampleOps;
    pub use crate::ops::linear::LinearOps;
    pub use crate::ops::lora::LoraOps;
    pub use crate::ops::norm::NormOps;
    pub use crate::ops::optimizer::{OptimizerOps, Stepped};
    pub use crate::ops::qkv_norm::QkvNormOps;
    pub use crate::ops::reshape::ReshapeOps;
    pub use crate::ops::rotary::RotaryOps;
    pub use crate::ops::share::ShareOps;
    pub use crate::ops::side_loss::SideLossOps;
    pub use crate::ops::upload::UploadOps;
    pub use crate::ops::weight::WeightOps;
    pub use crate::recorder::RecorderOps;
}

/// Operands of the traits' methods, checked on construction.
///
/// Kernels launch without bounds checks, so their assumptions are checked before: each method takes
/// a [`Checked`](operands::Checked) struct, which can only be constructed by its checks.
pub mod operands {
    pub use crate::checked::{Checked, Operands};
    pub use crate::ops::activation::{ActivateBackward, ActivateForward};
    pub use crate::ops::attention::{
        AttentionBackward, AttentionForward, QkvAttentionBackward, QkvAttentionForward, SinkAttention,
    };
    pub use crate::ops::cached_attention::CachedAttention;
    pub use crate::ops::collective::Exchange;
    pub use crate::ops::decode_step::{DecodeBody, DecodePlanned, DecodeStep};
    pub use crate::ops::dropout::DropoutForward;
    pub use crate::ops::embed::{EmbedBackward, EmbedForward};
    pub use crate::ops::experts::{ChooseExperts, ExpertLoads, ExpertsBackward, ExpertsForward};
    pub use crate::ops::feed_forward::{FeedForwardBackward, FeedForwardForward};
    pub use crate::ops::head_log_probs::{HeadLogProbsBackward, HeadLogProbsForward};
    pub use crate::ops::head_loss::{HeadLossBackward, HeadLossForward};
    pub use crate::ops::head_sample::{Draw, Logits};
    pub use crate::ops::linear::{LinearBackward, LinearForward};
    pub use crate::ops::lora::{LoraBackward, LoraForward};
    pub use crate::ops::norm::{NormBackward, NormForward};
    pub use crate::ops::optimizer::{GradientNorm, OptimizerStep};
    pub use crate::ops::qkv_norm::{QkvNormBackward, QkvNormForward};
    pub use crate::ops::rotary::{NextPositions, QkvRotaryForward, RotaryForward};
    pub use crate::ops::side_loss::SideLoss;
    pub use crate::ops::weight::{Dequantize, Rounded};
}

/// The reference implementations: Burn's basic operations, generic over any backend.
///
/// Parity tests compare kernels with these; `--set kernels=reference` runs only these.
pub mod reference {
    pub use crate::ops::activation::reference::{activate_backward, activate_forward};
    pub use crate::ops::attention::reference::{
        attention_backward, attention_forward, qkv_attention_backward, qkv_attention_forward,
    };
    pub use crate::ops::cached_attention::reference::cached_attention;
    pub use crate::ops::collective::reference::{all_gather, all_reduce, reduce_scatter};
    pub use crate::ops::dropout::reference::dropout_forward;
    pub use crate::ops::embed::reference::{embed_backward, embed_forward};
    pub use crate::ops::experts::reference::{choose_experts, expert_loads, experts_backward, experts_forward};
    pub use crate::ops::feed_forward::reference::{feed_forward, feed_forward_backward, feed_forward_forward};
    pub use crate::ops::head_loss::reference::{head_loss_backward, head_loss_forward};
    pub use crate::ops::head_sample::reference::{draw, logits};
    pub use crate::ops::linear::reference::{linear_backward, linear_forward};
    pub use crate::ops::lora::reference::{lora_backward, lora_forward};
    pub use crate::ops::norm::reference::{norm_backward, norm_forward};
    pub use crate::ops::optimizer::reference::{gradient_norm, optimizer_step};
    pub use crate::ops::qkv_norm::reference::{qkv_norm_backward, qkv_norm_forward};
    pub use crate::ops::rotary::reference::{next_positions, qkv_rotary_forward, rotary_forward};
    pub use crate::ops::weight::reference::dequantize;
}
