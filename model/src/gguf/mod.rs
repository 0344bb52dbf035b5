//! GGUF: a model in one or several files, with metadata, then tensors, many of them in blocks.
//!
//! ```text
//! file       "GGUF" | version u32 | tensors u64 | keys u64 | key.. | tensor.. | padding | data
//! key        name | type u32 | value
//! tensor     name | dimensions u32 | dimension u64, innermost first.. | type u32 | offset u64
//! name       length u64 | UTF-8
//! ```
//!
//! All numbers are little-endian. Offsets count from the start of the data. The data and every
//! tensor are aligned. [`header`] reads the header of one file, [`parts`] those of a whole model.
//! [`config`] makes a `config.json` from the metadata, for the hub's reader, and [`names`] has the
//! tensor names. [`keys`] and [`writer`] write files, with tensor types from [`kind`]. Weights are
//! read by [`tensor_files`](crate::tensor_files).

mod config;
mod header;
mod keys;
mod kind;
mod metadata;
mod names;
mod parts;
mod writer;

use std::path::Path;

use serde_json::Value;

pub(crate) use self::config::unknown_keys;
pub(crate) use self::keys::of as keys;
pub use self::kind::GgufKind;
pub use self::metadata::Metadata;
pub(crate) use self::names::{EMBEDDING, HEAD, ignores, tensors};
pub use self::writer::GgufValue;
pub(crate) use self::writer::{ALIGNMENT, Planned, front};
use crate::config::ConfigError;
use crate::error::WeightsError;
use crate::tensor_files::{TensorFiles, TensorRow};

/// An opened model of GGUF files. Tensors are read on demand.
pub(crate) struct Gguf {
    pub(crate) metadata: Metadata,
    pub(crate) files: TensorFiles,
}

/// Supported architectures, by their names in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// `gpt2`.
    Gpt2,
    /// `llama`, including Mistral. Rows of queries and keys are interleaved.
    Llama,
    /// `qwen2`.
    Qwen2,
    /// `qwen3`.
    Qwen3,
}

const ARCHITECTURES: [(Architecture, &str); 4] = [
    (Architecture::Gpt2, "gpt2"),
    (Architecture::Llama, "llama"),
    (Architecture::Qwen2, "qwen2"),
    (Architecture::Qwen3, "qwen3"),
];

impl Architecture {
    pub(crate) fn name(self) -> &'static str {
        ARCHITECTURES.iter().find(|(known, _)| *known == self).map_or("", |(_, name)| name)
    }

    fn of(metadata: &Metadata) -> Result<Self, ConfigError> {
        let missing = || ConfigError("general.architecture is missing".into());
        let name = metadata.string("general.architecture")?.ok_or_else(missing)?;
        let known = ARCHITECTURES.iter().find(|(_, known)| *known == name).map(|(architecture, _)| *architecture);
        known.ok_or_else(|| {
            let known: Vec<&str> = ARCHITECTURES.iter().map(|(_, name)| *name).collect();
            ConfigError(format!("architecture '{name}' is not supported; supported are {}", known.join(", ")))
        })
    }
}

/// Whether a path is a GGUF file: any existing file, otherwise any name that ends in `.gguf`.
pub(crate) fn is_gguf(path: &Path) -> bool {
    let named = || path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) && !path.is_dir();
    path.is_file() || named()
}

impl Gguf {
    /// Opens a file, and the other parts of the model if it is the first of several.
    ///
    /// # Errors
    /// If a part is missing, truncated or damaged, or has an unsupported version or type.
    pub(crate) fn open(path: &Path) -> Result<Self, WeightsError> {
        let (metadata, files) = parts::open(path)?;
        Ok(Self { metadata, files })
    }

    /// The architecture and the `config.json` of the model.
    ///
    /// # Errors
    /// Names the key that is missing, has a wrong type, or asks for something unsupported.
    pub(crate) fn config(&self, path: &Path) -> Result<(Architecture, Value), WeightsError> {
        let wrong = |error| WeightsError::Config { path: path.into(), error };
        let architecture = Architecture::of(&self.metadata).map_err(wrong)?;
        let factors = |name: &str| self.values(name);
        let shape = |name: &str| self.files.tensors().get(name).map(|tensor| &tensor.shape[..]);
        match config::of(architecture, &self.metadata, &shape, &factors)? {
            Ok(config) => Ok((architecture, config)),
            Err(error) => Err(wrong(error)),
        }
    }

    /// The values of a small tensor, if it exists.
    fn values(&self, name: &str) -> Result<Option<Vec<f64>>, WeightsError> {
        let Some(tensor) = self.files.tensors().get(name) else { return Ok(None) };
        // At most one per pair of a head's elements.
        let count = tensor.shape.iter().product::<usize>().min(1 << 14);
        let mut bytes = vec![0; 4 * count];
        TensorRow::new(&self.files, std::iter::once(tensor)).read::<f32>(&mut bytes, &mut |_| {})?;
        let value = |bytes: &[u8]| f64::from(f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        Ok(Some(bytes.chunks_exact(4).map(value).collect()))
    }
}
