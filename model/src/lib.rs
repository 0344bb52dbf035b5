//! One transformer, written once against Fireclay's [`Backend`](fireclay_kernels::Backend) trait.
//!
//! A [`TransformerConfig`] alone makes it GPT-2, Llama, Mixtral, Qwen3 or BERT. The same
//! blocks serve training, prefill and decode.
//!
//! ```
//! use burn::tensor::{Int, Tensor};
//! use fireclay_model::{Transformer, TransformerConfig};
//! type B = burn::backend::NdArray;
//!
//! let device = Default::default();
//! let config = TransformerConfig::llama(100, 32, 16, 2, 4).with_n_kv_heads(2);
//! let model: Transformer<B> = config.init(7, &device)?;
//! let tokens = Tensor::<B, 2, Int>::from_ints([[1, 2, 3], [4, 5, 6]], &device);
//! let hidden = model.forward(tokens);
//! assert_eq!(hidden.dims(), [2, 3, 16]);
//! assert_eq!(model.logits(hidden).dims(), [2, 3, 100]);
//! # Ok::<(), fireclay_model::ConfigError>(())
//! ```
//!
//! Prompts of different lengths share a batch, and token ids stay on the device:
//!
//! ```
//! use burn::backend::NdArray;
//! use fireclay_kernels::{SampledRows, Sampling};
//! use fireclay_model::{Transformer, TransformerConfig};
//!
//! let device = Default::default();
//! let config = TransformerConfig::qwen3(1000, 64, 32, 2, 4, 16).with_n_kv_heads(2);
//! let model: Transformer<NdArray> = config.init(1, &device)?;
//! let mut cache = model.cache(256); // room for 256 tokens in all
//! let rows = [cache.add_row(), cache.add_row()];
//! let greedy = SampledRows::new(&[Sampling::greedy().into(); 2], &device);
//! let hidden = model.prefill(&[(rows[0], &[5, 6, 7][..]), (rows[1], &[8][..])], &mut cache);
//! let tokens = model.sample(hidden, &greedy, None, &cache);
//! let hidden = model.decode(tokens, &rows, &mut cache);
//! assert_eq!(hidden.states().dims(), [2, 32]);
//! # Ok::<(), fireclay_model::ConfigError>(())
//! ```

mod adapter;
mod attention;
mod block;
mod cache;
mod checkpoints;
mod classifier;
mod classifier_config;
mod classifier_files;
mod config;
mod convolution;
mod error;
mod export;
mod feed_forward;
mod gguf;
mod heads;
mod hub;
mod inspection;
mod layer;
mod linear;
mod matrix;
mod merge;
mod mixture;
mod mixture_checks;
mod packed_tensors;
mod parameter_count;
mod parameters;
mod pass;
mod presets;
mod rotary;
mod stored_tensor;
mod synced;
mod tensor_files;
mod transformer;
mod weights;

pub use adapter::{AdapterSaver, LoraConfig, LoraFiles, Targets};
pub use attention::Attention;
pub use block::Block;
pub use cache::{Cache, CacheFull, PAGE_TOKENS, RowId};
pub use checkpoints::Checkpoints;
pub use classifier::{ClassifierHead, class_loss};
pub use classifier_config::{ClassifierConfig, ClassifierPooling};
pub use config::{AttentionDirection, ConfigError, NormPlacement, Positions, TransformerConfig};
pub use error::WeightsError;
pub use export::WrittenGguf;
pub use feed_forward::{Dense, Experts, FeedForward, RouterLosses, Routing};
pub use fireclay_kernels::{ActivationKind, NormKind};
pub use gguf::{GgufKind, GgufValue, Metadata as GgufMetadata};
pub use heads::{UtteranceHeads, UtteranceTargets};
pub use hub::Family;
pub use inspection::Inspection;
pub use layer::LayerConfig;
pub use linear::{Adapter, Linear, Magnitude};
pub use matrix::Matrix;
pub use mixture::{ExpertsConfig, RouterScores};
pub use parameters::{LayerNorm, named_parameters, trained_parameters};
pub use rotary::RotaryScaling;
pub use transformer::{Hidden, MultiStepTokens, NextTokens, Tokens, Transformer};
pub use weights::{MatrixDtype, MatrixDtypes, ModelFolder, StoredValues, f32_chunks};
