//! An adapter's folder: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::Value;

use super::config::LoraConfig;
use crate::error::WeightsError;
use crate::hub::Family;
use crate::tensor_files::TensorFiles;

pub(super) const CONFIG: &str = "adapter_config.json";
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
pub(super) const PREFIX: &str = "base_model.model.";

/// An adapter that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraFiles {
    path: PathBuf,
    config: LoraConfig,
    /// By the name of the module's weight in the base model.
    updates: BTreeMap<String, ModuleUpdate>,
}

/// What an adapter does to the weight `[d_output, d_input]` of a module.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ModuleUpdate {
    /// `weight + scale * b a`, or with a magnitude per row, the rows of that with those lengths.
    LowRank {
        /// `[rank, d_input]`.
        a: Matrix,
        /// `[d_output, rank]`.
        b: Matrix,
        scale: f64,
        magnitude: Option<Vec<f32>>,
    },
    /// This one instead.
    Replaced { shape: Vec<usize>, values: Vec<f32> },
}

/// A matrix on the host, row after row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matrix {
    pub(crate) shape: [usize; 2],
    pub(crate) values: Vec<f32>,
}

impl Matrix {
    fn transposed(self) -> Self {
        let [rows, columns] = self.shape;
        let values = (0..rows * columns).map(|at| self.values[at % rows * columns + at / rows]).collect();
        Self { shape: [columns, rows], values }
    }
}

impl ModuleUpdate {
    /// Whether it fits a weight of `shape`.
    pub(crate) fn check(&self, shape: &[usize]) -> Result<(), String> {
        match self {
            Self::Replaced { shape: own, .. } if own == shape => Ok(()),
            Self::Replaced { shape: own, .. } => Err(format!("has shape {own:?} instead of {shape:?}")),
            Self::LowRank { a, b, magnitude, .. } => {
                let ([rank, d_input], [d_output, b_rank]) = (a.shape, b.shape);
                if [d_output, d_input] != *shape || rank != b_rank || rank == 0 {
                    return Err(format!("has matrices {:?} and {:?} for a weight {shape:?}", a.shape, b.shape));
                }
                match magnitude {
                    Some(magnitude) if magnitude.len() != d_output => {
                        Err(format!("has a magnitude that is not one for each of {d_output} rows"))
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    /// Applies it to a weight of `shape`.
    pub(crate) fn apply(&self, weight: &mut [f32], shape: &[usize]) -> Result<(), String> {
        match self {
            Self::Replaced { values, .. } => {
                self.check(shape)?;
                weight.copy_from_slice(values);
            }
            Self::LowRank { a, b, scale, magnitude } => {
                self.check(shape)?;
                let ([rank, d_input], _) = (a.shape, b.shape);
                weight.par_chunks_mut(d_input).enumerate().for_each(|(row, weight)| {
                    for (b, a) in b.values[row * rank..][..rank].iter().zip(a.values.chunks_exact(d_input)) {
                        let factor = (scale * f64::from(*b)) as f32;
                        weight.iter_mut().zip(a).for_each(|(weight, a)| *weight += factor * a);
                    }
                    if let Some(magnitude) = magnitude {
                        let length = weight.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
                        let factor = (f64::from(magnitude[row]) / length) as f32;
                        weight.iter_mut().for_each(|weight| *weight *= factor);
                    }
                });
            }
        }
        Ok(())
    }
}

impl LoraFiles {
    /// Whether a folder holds an adapter.
    pub fn are_in(folder: &Path) -> bool {
        folder.join(CONFIG).is_file()
    }

    /// Whether a folder holds an adapter, and no model.
    pub fn are_alone_in(folder: &Path) -> bool {
        Self::are_in(folder) && !folder.join("config.json").exists()
    }

    /// Reads the adapter in a folder.
    ///
    /// # Errors
    /// If a file is missing or damaged, or says something that is not supported: it is named.
    pub fn open(folder: &Path) -> Result<Self, WeightsError> {
        let config = Self::read_config(folder)?;
        let path = folder.join(WEIGHTS);
        let wrong = |reason: String| WeightsError::Weights { path: path.clone(), reason };
        let files = TensorFiles::open_one(&path)?;
        let mut tensors: BTreeMap<&str, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
        for (name, stored) in files.tensors() {
            if !stored.encoding.is_readable() {
                return Err(wrong(format!("{name} has dtype {}, which is not supported", stored.encoding.name())));
            }
            let bare =
                name.strip_prefix(PREFIX).ok_or_else(|| wrong(format!("{name} does not begin with {PREFIX}")))?;
            let mut values = vec![0.0; stored.shape.iter().product()];
            files.read::<f32>(stored, false, &mut values, &mut |_| {})?;
            tensors.insert(bare, (stored.shape.clone(), values));
        }
        let updates = updates(&config, tensors).map_err(wrong)?;
        Ok(Self { path: folder.to_path_buf(), config, updates })
    }

    /// Reads its `adapter_config.json` alone.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn read_config(folder: &Path) -> Result<LoraConfig, WeightsError> {
        let path = folder.join(CONFIG);
        let text = fs::read_to_string(&path).map_err(|error| WeightsError::Io { path: path.clone(), error })?;
        let json: Value =
            serde_json::from_str(&text).map_err(|error| WeightsError::Json { path: path.clone(), error })?;
        LoraConfig::parse(&json).map_err(|reason| WeightsError::Weights { path, reason })
    }

    /// What it says of itself.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it does to the weight of a name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub(crate) fn update(&self, weight: &str) -> Option<&ModuleUpdate> {
        self.updates.get(weight)
    }

    /// How many tokens it knows, where it saves the embedding table.
    pub fn vocab_size(&self, family: Family) -> Option<usize> {
        match self.update(family.embedding_name()?)? {
            ModuleUpdate::Replaced { shape, .. } => shape.first().copied(),
            ModuleUpdate::LowRank { .. } => None,
        }
    }

    /// A weight that it saves whole, if any.
    pub fn saved_module(&self) -> Option<&str> {
        let mut saved = self.updates.iter().filter(|(_, update)| matches!(update, ModuleUpdate::Replaced { .. }));
        saved.next().map(|(name, _)| name.as_str())
    }

    /// Without its matrices: the modules that it saves whole.
    pub(crate) fn saved_modules(&self) -> Self {
        let mut saved = self.clone();
        saved.updates.retain(|_, update| matches!(update, ModuleUpdate::Replaced { .. }));
        saved
    }

    /// The names of the weights that it changes.
    pub(crate) fn weights(&self) -> impl Iterator<Item = &str> {
        self.updates.keys().map(String::as_str)
    }

    pub(crate) fn wrong(&self, reason: String) -> WeightsError {
        WeightsError::Weights { path: self.path.join(WEIGHTS), reason }
    }
}

fn updates(
    config: &LoraConfig,
    mut tensors: BTreeMap<&str, (Vec<usize>, Vec<f32>)>,
) -> Result<BTreeMap<String, ModuleUpdate>, String> {
    let mut updates = BTreeMap::new();
    let names: Vec<&str> = tensors.keys().copied().collect();
    for name in names {
        let (module, is_embedding) = match (name.strip_suffix(".lora_A.weight"), name.strip_suffix(".lora_embedding_A"))
        {
            (Some(module), _) => (module, false),
            (None, Some(module)) => (module, true),
            (None, None) => continue,
        };
        let b_name =
            if is_embedding { format!("{module}.lora_embedding_B") } else { format!("{module}.lora_B.weight") };
        let a = matrix(name, tensors.remove(name))?;
        let b = matrix(&b_name, tensors.remove(b_name.as_str()))?;
        // An embedding adds the transpose: its weight is [vocab_size, d_model].
        let (a, b) = if is_embedding { (b.transposed(), a.transposed()) } else { (a, b) };
        let rank = a.shape[0];
        let magnitude = ["lora_magnitude_vector", "lora_magnitude_vector.weight"]
            .iter()
            .find_map(|kind| tensors.remove(format!("{module}.{kind}").as_str()))
            .map(|(_, values)| values);
        if magnitude.is_some() != config.dora {
            return Err(format!(
                "{module} has {} magnitude, and use_dora is {}",
                if config.dora { "no" } else { "a" },
                config.dora
            ));
        }
        let scale = config.scale_of(module, rank)?;
        updates.insert(format!("{module}.weight"), ModuleUpdate::LowRank { a, b, scale, magnitude });
    }
    for (name, (shape, values)) in tensors {
        if name.contains(".lora_") || !(name.ends_with(".weight") || name.ends_with(".bias")) {
            return Err(format!("nothing is known of {name}"));
        }
        updates.insert(name.to_string(), ModuleUpdate::Replaced { shape, values });
    }
    Ok(updates)
}

fn matrix(name: &str, tensor: Option<(Vec<usize>, Vec<f32>)>) -> Result<Matrix, String> {
    let (shape, values) = tensor.ok_or_else(|| format!("{name} is missing"))?;
    let shape =
        <[usize; 2]>::try_from(&shape[..]).map_err(|_| format!("{name} has shape {shape:?}, and is no matrix"))?;
    Ok(Matrix { shape, values })
}
