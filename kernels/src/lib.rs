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

mod autodiff;
mod backend;
#[cfg(feature = "ndarray")]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube_backend;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cubecl;
pub mod devices;
mod ops;
mod packed_heads;
mod random;
pub mod recorder;
mod selection;

#[cfg(feature = "ndarray")]
mod ndarray;

pub use backend::Backend;
pub use ops::activation::{Activation, ActivationKind, activate};
pub use ops::attention::{
    AttentionGradients, AttentionMask, AttentionOptions, AttentionOutput, attention, qkv_attention,
};
pub use ops::cached_attention::{CachedTokens, LayerCache, Placement, cached_attention};
pub use ops::dropout::{Dropout, dropout};
pub use ops::embed::{embed, embed_add};
pub use ops::head_loss::{HeadLossOptions, HeadLossOutput, IGNORED_TARGET, head_loss};
pub use ops::head_sample::{Penalties, SampledRows, Sampling, TokenCounts, head_sample};
pub use ops::linear::{LinearActivateOutput, LinearGradients, linear, linear_add, norm_gate_up, norm_linear};
pub use ops::norm::{Norm, NormGradients, NormKind, NormOutput, norm};
pub use ops::optimizer::{AdamW, AdamWParameter, optimizer_step};
pub use ops::reshape::reshape;
pub use ops::rotary::{RotaryTable, next_positions, qkv_rotary, rotary};
pub use ops::softmax::softmax;
pub use ops::weight::{Int8Weight, Weight, upload};
pub use packed_heads::PackedHeads;
pub use random::{RandomKey, random_bits};
pub use selection::{Kernels, use_kernels};

/// The bodies that every backend starts from: plain Burn operations, generic over any backend.
///
/// Parity tests compare kernels with these; `--set kernels=reference` runs them alone.
pub mod reference {
    pub use crate::ops::activation::reference::{activate, activate_backward};
    pub use crate::ops::attention::reference::{attention_backward, attention_forward};
    pub use crate::ops::cached_attention::reference::{cached_attention, rotary_append};
    pub use crate::ops::dropout::reference::dropout;
    pub use crate::ops::embed::reference::{embed, embed_backward};
    pub use crate::ops::head_loss::reference::head_loss_forward;
    pub use crate::ops::head_sample::reference::head_sample;
    pub use crate::ops::linear::reference::{linear_backward, linear_forward};
    pub use crate::ops::norm::reference::{norm_backward, norm_forward};
    pub use crate::ops::optimizer::reference::optimizer_step;
    pub use crate::ops::rotary::reference::{qkv_rotary, rotary};
    pub use crate::ops::softmax::reference::{softmax, softmax_backward};
    pub use crate::ops::weight::reference::int8_to_float;
    pub use crate::random::reference::random_bits;
}
