//! Low-rank adapters in PEFT's files: merged into a model while it is loaded, or added to it and
//! trained, and written.
//!
//! | key in `adapter_model.safetensors` | shape |
//! |---|---|
//! | `base_model.model.<module>.lora_A.weight` | `[rank, d_input]` |
//! | `base_model.model.<module>.lora_B.weight` | `[d_output, rank]` |
//! | `base_model.model.<module>.lora_magnitude_vector` | `[d_output]`, with DoRA |
//! | `base_model.model.<module>.lora_embedding_A`, `_B` | `[rank, vocab_size]`, `[d_model, rank]` |
//! | `base_model.model.<module>.weight` | of a module in `modules_to_save` |

mod config;
mod files;
mod training;

pub use config::{LoraConfig, Targets};
pub use files::LoraFiles;
pub(crate) use files::ModuleUpdate;
pub use training::AdapterSaver;
