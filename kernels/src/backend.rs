//! The trait that the model is generic over: a list of operation traits.

use crate::ops::activation::ActivationOps;
use crate::ops::attention::AttentionOps;
use crate::ops::cached_attention::CachedAttentionOps;
use crate::ops::collective::CollectiveOps;
use crate::ops::decode_step::DecodeStepOps;
use crate::ops::download::DownloadOps;
use crate::ops::dropout::DropoutOps;
use crate::ops::embed::EmbedOps;
use crate::ops::experts::ExpertsOps;
use crate::ops::feed_forward::FeedForwardOps;
use crate::ops::head_log_probs::HeadLogProbsOps;
use crate::ops::head_loss::HeadLossOps;
use crate::ops::head_sample::HeadSampleOps;
use crate::ops::linear::LinearOps;
use crate::ops::lora::LoraOps;
use crate::ops::norm::NormOps;
use crate::ops::optimizer::OptimizerOps;
use crate::ops::qkv_norm::QkvNormOps;
use crate::ops::reshape::ReshapeOps;
use crate::ops::rotary::RotaryOps;
use crate::ops::share::ShareOps;
use crate::ops::side_loss::SideLossOps;
use crate::ops::upload::UploadOps;
use crate::ops::weight::WeightOps;
use crate::recorder::RecorderOps;

/// Lists the operation traits once, for the trait and its implementation.
macro_rules! backend {
    ($($ops:ident),* $(,)?) => {
        /// A Burn backend with the fused operations of a transformer, one trait per group.
        ///
        /// All methods default to the reference, so that a new backend only needs empty `impl`s,
        /// and overrides methods as its kernels arrive. An operation with a hand-written gradient
        /// has three methods: `op`, `op_forward`, which also returns what the backward pass needs,
        /// and `op_backward`. Kernels override the latter two;
        /// [`Autodiff`](burn::backend::Autodiff) overrides only `op`, and calls them on the inner
        /// backend.
        ///
        /// Call the functions of this crate's root instead of these methods: they construct the
        /// operands.
        pub trait Backend: $($ops +)* {}

        impl<B: $($ops +)*> Backend for B {}
    };
}

backend! {
    ActivationOps,
    AttentionOps,
    CachedAttentionOps,
    CollectiveOps,
    DecodeStepOps,
    DownloadOps,
    DropoutOps,
    EmbedOps,
    ExpertsOps,
    FeedForwardOps,
    HeadLogProbsOps,
    HeadLossOps,
    HeadSampleOps,
    LinearOps,
    LoraOps,
    NormOps,
    OptimizerOps,
    QkvNormOps,
    RecorderOps,
    ReshapeOps,
    RotaryOps,
    ShareOps,
    SideLossOps,
    UploadOps,
    WeightOps,
}
