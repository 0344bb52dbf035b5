//! A model folder as the hub lays it out: `config.json` and `model.safetensors`.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor, TensorData};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

use fireclay_kernels::Backend;

use crate::config::{ConfigError, TransformerConfig};
use crate::hub::{self, Family, HubTensor, OPTIONAL_PREFIXES};
use crate::parameters::named_parameters;
use crate::transformer::Transformer;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// A folder with a model in it.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    path: PathBuf,
}

/// Why a model folder could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The file system refused.
    #[error("{path}: {error}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What it said.
        error: std::io::Error,
    },
    /// `config.json` is not JSON.
    #[error("{path}: not valid JSON: {error}")]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: serde_json::Error,
    },
    /// `config.json` describes no transformer that can be built.
    #[error("{path}: {error}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: ConfigError,
    },
    /// The weights are truncated, damaged, or do not fit the config.
    #[error("{path}: {reason}")]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl ModelFolder {
    /// The folder at `path`; nothing is read yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Reads `config.json`.
    ///
    /// # Errors
    /// If it is missing, not JSON, or describes nothing that can be built.
    pub fn config(&self) -> Result<(Family, TransformerConfig), WeightsError> {
        let path = self.path.join(CONFIG);
        let text = fs::read_to_string(&path).map_err(|error| WeightsError::Io { path: path.clone(), error })?;
        let json: Value =
            serde_json::from_str(&text).map_err(|error| WeightsError::Json { path: path.clone(), error })?;
        hub::read(&json).map_err(|error| WeightsError::Config { path, error })
    }

    /// Reads the model onto `device`, its parameters as f32.
    ///
    /// # Errors
    /// If a file is missing or damaged, or tensors are missing or of another shape than the config says; the first
    /// few are named.
    pub fn load<B: Backend>(&self, device: &B::Device) -> Result<Transformer<B>, WeightsError> {
        let (_, config) = self.config()?;
        self.load_as(&config, true, 0, device)
    }

    /// Reads the model as one of `config`, which may differ from the folder's in its heads for utterances and in its
    /// dropout. Without `heads`, those for utterances are drawn from `seed`.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_as<B: Backend>(
        &self,
        config: &TransformerConfig,
        heads: bool,
        seed: u64,
        device: &B::Device,
    ) -> Result<Transformer<B>, WeightsError> {
        let (family, _) = self.config()?;
        let path = self.path.join(WEIGHTS);
        let bytes = fs::read(&path).map_err(|error| WeightsError::Io { path: path.clone(), error })?;
        let wrong = |reason: String| WeightsError::Weights { path: path.clone(), reason };
        let file =
            SafeTensors::deserialize(&bytes).map_err(|error| wrong(format!("not a safetensors file: {error}")))?;
        let model =
            config.init::<B>(seed, device).map_err(|error| WeightsError::Config { path: path.clone(), error })?;
        let shapes: HashMap<String, Vec<usize>> =
            named_parameters(&model).into_iter().map(|(path, _, shape, _)| (path, shape)).collect();
        let paths: Vec<String> = named_parameters(&model).into_iter().map(|(path, ..)| path).collect();

        let mut values: HashMap<String, Vec<f32>> = HashMap::new();
        let mut problems = Vec::new();
        for tensor in family.tensors(config, &paths) {
            if tensor.path.starts_with("heads.") && !heads {
                continue;
            }
            let shape = &shapes[&tensor.path];
            match read_tensor(&file, &tensor, shape) {
                Ok(read) => values.entry(tensor.path).or_default().extend(read),
                Err(problem) => problems.push(problem),
            }
        }
        if !problems.is_empty() {
            let more = if problems.len() > 3 { format!(", and {} more", problems.len() - 3) } else { String::new() };
            problems.truncate(3);
            return Err(wrong(format!("does not fit its config.json: {}{more}", problems.join(", "))));
        }
        Ok(fill(model, values))
    }

    /// Writes `config.json` and `model.safetensors` into the folder, which must exist, under the names that the hub
    /// uses for the model's family. Each file is written beside, synced and renamed.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn save<B: Backend>(&self, model: &Transformer<B>) -> Result<(), WeightsError> {
        let config = model.config();
        let family = Family::of(config);
        let json = serde_json::to_string_pretty(&Value::Object(family.write(config))).unwrap_or_default();
        write_synced(&self.path.join(CONFIG), |path| fs::write(path, json))?;

        let parameters = named_parameters(model);
        let paths: Vec<String> = parameters.iter().map(|(path, ..)| path.clone()).collect();
        let parameters: HashMap<String, (Vec<usize>, Tensor<B, 1>)> =
            parameters.into_iter().map(|(path, _, shape, value)| (path, (shape, value))).collect();
        let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = family
            .tensors(config, &paths)
            .into_iter()
            .map(|tensor| {
                let (shape, value) = &parameters[&tensor.path];
                let (shape, bytes) = write_tensor(&tensor, shape, value.clone());
                (tensor.name, shape, bytes)
            })
            .collect();
        let path = self.path.join(WEIGHTS);
        let wrong = |reason: String| WeightsError::Weights { path: path.clone(), reason };
        let mut views = Vec::with_capacity(tensors.len());
        for (name, shape, bytes) in &tensors {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(|error| wrong(error.to_string()))?;
            views.push((name.as_str(), view));
        }
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(|error| wrong(error.to_string()))?;
        write_synced(&path, |path| fs::write(path, bytes))
    }
}

/// Writes a file beside `path`, syncs it and renames it over `path`.
fn write_synced(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<(), WeightsError> {
    let beside = path.with_extension("partial");
    let written =
        write(&beside).and_then(|()| File::open(&beside)?.sync_all()).and_then(|()| fs::rename(&beside, path));
    written.map_err(|error| {
        // The first error is the one to tell; what is left beside may not be there at all.
        let _ = fs::remove_file(&beside);
        WeightsError::Io { path: path.to_path_buf(), error }
    })
}

/// A hub tensor's values in our layout, or what is wrong with it.
fn read_tensor(file: &SafeTensors<'_>, tensor: &HubTensor, shape: &[usize]) -> Result<Vec<f32>, String> {
    let name = &tensor.name;
    let view = file.tensor(name).ok().or_else(|| {
        let bare = OPTIONAL_PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
        let prefixed = OPTIONAL_PREFIXES.iter().find_map(|prefix| file.tensor(&format!("{prefix}{name}")).ok());
        bare.and_then(|bare| file.tensor(bare).ok()).or(prefixed)
    });
    let view = view.ok_or_else(|| format!("{name} is missing"))?;
    let mut wanted = shape.to_vec();
    if let Some(rows) = &tensor.rows {
        wanted[0] = rows.len();
    }
    if tensor.transposed {
        wanted.reverse();
    }
    if view.shape() != wanted {
        return Err(format!("{name} has shape {:?} instead of {wanted:?}", view.shape()));
    }
    let values = to_f32(&view).ok_or_else(|| format!("{name} has dtype {:?}", view.dtype()))?;
    Ok(if tensor.transposed { transpose(&values, wanted[0], wanted[1]) } else { values })
}

fn to_f32(view: &TensorView<'_>) -> Option<Vec<f32>> {
    let data = view.data();
    Some(match view.dtype() {
        Dtype::F32 => data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::F16 => data.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::BF16 => data.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        _ => return None,
    })
}

/// `[rows, columns]` as `[columns, rows]`.
fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}

/// A parameter's part for the hub: its shape there and its bytes, f32.
fn write_tensor<B: Backend>(tensor: &HubTensor, shape: &[usize], value: Tensor<B, 1>) -> (Vec<usize>, Vec<u8>) {
    let mut shape = shape.to_vec();
    let mut value = value;
    if let Some(rows) = &tensor.rows {
        let row = shape[1..].iter().product::<usize>();
        value = value.narrow(0, rows.start * row, rows.len() * row);
        shape[0] = rows.len();
    }
    let data = value.cast(DType::F32).into_data();
    let mut values: Vec<f32> = data.iter::<f32>().collect();
    if tensor.transposed {
        values = transpose(&values, shape[0], shape[1]);
        shape.reverse();
    }
    (shape, values.into_iter().flat_map(f32::to_le_bytes).collect())
}

/// The model with the parameters that `values` holds, by path.
fn fill<B: Backend>(model: Transformer<B>, values: HashMap<String, Vec<f32>>) -> Transformer<B> {
    struct Filler {
        path: Vec<String>,
        values: HashMap<String, Vec<f32>>,
    }
    impl<B: Backend> ModuleMapper<B> for Filler {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let values = self.values.remove(&self.path.join("."));
            param.map(|tensor| match values {
                Some(values) => {
                    let data = TensorData::new(values, tensor.shape());
                    Tensor::from_data(data, &tensor.device()).set_require_grad(tensor.is_require_grad())
                }
                None => tensor,
            })
        }
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_string());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
    }
    model.map(&mut Filler { path: Vec::new(), values })
}
