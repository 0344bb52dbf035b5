//! Fireclay's [`Backend`] trait: the operations of a transformer, cut at the size that one kernel can fuse.
//!
//! Every operation lives in a folder of its own:
//!
//! - `reference.rs` composes it from Burn's small operations: readable, and right on every backend;
//! - `backward.rs`, where the operation has a hand-written backward, ties `op_forward` and `op_backward` together for
//!   [`Autodiff`](burn::backend::Autodiff), once, so that a fused backward is used wherever the fused forward is;
//! - `mod.rs` holds the public function on tensors, with shapes, dtypes and the paper.
//!
//! A model calls the public functions only. A backend that has a faster kernel overrides the trait's methods, and the
//! model never knows.
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

mod activation;
mod attention;
mod autodiff;
mod backend;
mod cached_attention;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube_backend;
pub mod devices;
mod dropout;
mod embed;
mod head_loss;
mod head_sample;
#[cfg(feature = "ndarray")]
mod host;
mod linear;
mod norm;
mod optimizer;
mod packed_heads;
mod random;
pub mod recorder;
mod reshape;
mod rotary;
mod selection;
mod softmax;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod team;
mod weight;

#[cfg(feature = "ndarray")]
mod ndarray;

pub use activation::{Activation, ActivationKind, activate};
pub use attention::{AttentionGradients, AttentionMask, AttentionOptions, AttentionOutput, attention, qkv_attention};
pub use backend::Backend;
pub use cached_attention::{CachedTokens, LayerCache, Placement, cached_attention};
pub use dropout::{Dropout, dropout};
pub use embed::{embed, embed_add};
pub use head_loss::{HeadLossOptions, HeadLossOutput, IGNORED_TARGET, head_loss};
pub use head_sample::{Penalties, SampledRows, Sampling, TokenCounts, head_sample};
pub use linear::{LinearActivateOutput, LinearGradients, linear, linear_add, norm_gate_up, norm_linear};
pub use norm::{Norm, NormGradients, NormKind, NormOutput, norm};
pub use optimizer::{AdamW, AdamWParameter, optimizer_step};
pub use packed_heads::PackedHeads;
pub use random::{RandomKey, random_bits};
pub use reshape::reshape;
pub use rotary::{RotaryTable, next_positions, qkv_rotary, rotary};
pub use selection::{Kernels, use_kernels};
pub use softmax::softmax;
pub use weight::{Int8Weight, Weight, upload};

/// The bodies that every backend starts from: plain Burn operations, generic over any backend.
///
/// Parity tests compare kernels with these; `--set kernels=reference` runs them alone.
pub mod reference {
    pub use crate::activation::reference::{activate, activate_backward};
    pub use crate::attention::reference::{attention_backward, attention_forward};
    pub use crate::cached_attention::reference::{cached_attention, rotary_append};
    pub use crate::dropout::reference::dropout;
    pub use crate::embed::reference::{embed, embed_backward};
    pub use crate::head_loss::reference::head_loss_forward;
    pub use crate::head_sample::reference::head_sample;
    pub use crate::linear::reference::{linear_backward, linear_forward};
    pub use crate::norm::reference::{norm_backward, norm_forward};
    pub use crate::optimizer::reference::optimizer_step;
    pub use crate::random::reference::random_bits;
    pub use crate::rotary::reference::{qkv_rotary, rotary};
    pub use crate::softmax::reference::{softmax, softmax_backward};
    pub use crate::weight::reference::int8_to_float;
}
