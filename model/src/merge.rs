//! A model folder with an adapter merged into it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

use fireclay_kernels::Backend;
use half::{bf16, f16};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, View};
use serde_json::Value;

use crate::adapter::ModuleUpdate;
use crate::error::WeightsError;
use crate::parameters::parameter_shapes;
use crate::stored_tensor::{Encoding, StoredTensor};
use crate::synced::write_synced;
use crate::tensor_files::TensorFiles;
use crate::weights::{CONFIG, ModelFolder, Part, Plan, WEIGHTS};

/// A tensor that is read and updated when it is written, so that the host holds one at a time.
struct Merged<'a> {
    files: &'a TensorFiles,
    stored: StoredTensor,
    update: Option<&'a ModuleUpdate>,
    shape: Vec<usize>,
    transposed: bool,
    dtype: Dtype,
}

impl View for Merged<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // Everything was checked before the first tensor was written. Only a failing disk gets
        // here, and safetensors' trait cannot return an error.
        let values = self.values().unwrap_or_else(|error| panic!("{error}"));
        let bytes = match self.dtype {
            Dtype::BF16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl Merged<'_> {
    /// Checks that the update fits the tensor.
    fn check(&self) -> Result<(), String> {
        let mut shape = self.shape.clone();
        if self.transposed {
            shape.reverse();
        }
        self.update.map_or(Ok(()), |update| update.check(&shape))
    }

    fn values(&self) -> Result<Vec<f32>, WeightsError> {
        if let Some(ModuleUpdate::Replaced { values, .. }) = self.update {
            return Ok(values.clone());
        }
        let mut values = vec![0.0; self.shape.iter().product()];
        // An unchanged tensor is not transposed.
        self.files.read::<f32>(&self.stored, self.transposed && self.update.is_some(), &mut values, &mut |_| {})?;
        let Some(update) = self.update else { return Ok(values) };
        let mut shape = self.shape.clone();
        if self.transposed {
            shape.reverse();
        }
        let wrong = |reason| WeightsError::Weights { path: WEIGHTS.into(), reason };
        update.apply(&mut values, &shape).map_err(wrong)?;
        Ok(if self.transposed { transpose(&values, shape[0], shape[1]) } else { values })
    }
}

fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..values.len()).map(|at| values[at % rows * columns + at / rows]).collect()
}

impl ModelFolder {
    /// Writes `config.json` and `model.safetensors` of this folder's model with its adapter merged
    /// (see [`with_adapter`](Self::with_adapter)). Each tensor keeps its dtype, of 16 or 32 bits.
    ///
    /// # Errors
    /// If a file is missing or damaged, this is a GGUF file, the adapter does not fit, or the file
    /// system fails.
    pub fn save_merged<B: Backend>(&self, out: &Path, device: &B::Device) -> Result<(), WeightsError> {
        if self.is_gguf() {
            let reason = "an adapter is merged into a model's folder, and not into a GGUF file".into();
            return Err(WeightsError::Weights { path: self.path().to_path_buf(), reason });
        }
        let (family, config) = self.config()?;
        let Plan { files, config, model, mut parts } = self.plan::<B>(family, &config, false, device)?;
        let stacked = |part: &&Part| part.file.packed.is_some() && part.file.shape.len() > 2;
        if let Some(part) = parts.values().flatten().find(stacked) {
            let reason = format!(
                "{} stacks quantized experts, whose floats are laid out otherwise: a merged copy cannot be written; use \
                 the adapter with --adapter",
                part.name
            );
            return Err(WeightsError::Weights { path: self.path().to_path_buf(), reason });
        }
        let parts: Vec<Part> =
            parameter_shapes(&model).into_iter().filter_map(|(path, _)| parts.remove(&path)).flatten().collect();
        let view = |part: &Part| {
            let Part { name, file: stored, transposed, .. } = part;
            let dtype = match stored.encoding {
                Encoding::Float(dtype @ (Dtype::BF16 | Dtype::F16)) => dtype,
                _ => Dtype::F32,
            };
            let view = Merged {
                files: &files,
                stored: stored.clone(),
                update: self.update_of(name),
                shape: stored.shape.clone(),
                transposed: *transposed,
                dtype,
            };
            (name.clone(), view)
        };
        let views: Vec<(String, Merged<'_>)> = parts.iter().map(view).collect();
        for (name, view) in &views {
            view.check().map_err(|reason| WeightsError::Weights {
                path: self.path().join(WEIGHTS),
                reason: format!("{name} {reason}"),
            })?;
        }
        let mut json = self.json()?;
        json["vocab_size"] = config.vocab_size.into();
        json["tie_word_embeddings"] = config.tied_embeddings.into();
        write_synced(&out.join(CONFIG), |path| {
            fs::write(path, serde_json::to_string_pretty::<Value>(&json).unwrap_or_default())
        })?;
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        write_synced(&out.join(WEIGHTS), |path| {
            safetensors::serialize_to_file(views, Some(metadata), path).map_err(|error| match error {
                SafeTensorError::IoError(error) => error,
                error => std::io::Error::other(error.to_string()),
            })
        })
    }
}
