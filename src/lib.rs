//! Train and run transformers in Rust on [Burn](burn): on CUDA, on WGPU or on the CPU, from a
//! terminal or as crates.
//!
//! This crate is the program `fireclay` and its library: recipes, training, checkpoints,
//! generation, chat, evaluation, prediction and downloads. The transformer is in
//! [`fireclay_model`], its operations are in [`fireclay_kernels`], data is in
//! [`fireclay_datasets`].
//!
//! ```
//! use burn::backend::NdArray;
//! use fireclay::recipe::Recipe;
//! use fireclay::training::Trainer;
//!
//! let recipe = Recipe::shipped("stories")?.with("d_model", "16")?.with("n_layers", "1")?.with("batch_size", "2")?;
//! let mut trainer = Trainer::<NdArray>::new(&recipe, recipe.task()?, Default::default())?;
//! let first = trainer.train_step()?.loss()?;
//! assert!(first > 4.0, "an untrained model knows nothing of 394 words: {first}");
//! # Ok::<(), fireclay::Failure>(())
//! ```

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod backend;
pub mod bench;
pub mod ceilings;
mod device_read;
pub mod download;
mod failure;
pub mod inference;
pub mod model_folder;
pub mod plots;
pub mod precision;
mod process_memory;
pub mod profiling;
pub mod progress;
pub mod recipe;
pub mod run_folder;
pub mod runs;
#[cfg(feature = "serve")]
pub mod server;
pub mod stdout;
pub mod tasks;
pub mod token_cache;
pub mod training;

pub use failure::Failure;
