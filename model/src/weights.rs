//! A model folder as the hub lays it out, `config.json` and `model.safetensors`, or a GGUF file,
//! which is both.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Element, Float, FloatDType, Tensor, TensorData};
use half::{bf16, f16};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, View};
use serde_json::Value;

use fireclay_kernels::packed::StoredCodes;
use fireclay_kernels::{Backend, Format, HostWeight, QuantizedWeight, upload, upload_pieces};

use crate::adapter::{LoraFiles, ModuleUpdate};
use crate::classifier::ClassifierHead;
use crate::config::{ConfigError, TransformerConfig};
use crate::error::WeightsError;
use crate::gguf::{self, Architecture, Gguf};
use crate::hub::{self, Family, HubTensor, OPTIONAL_PREFIXES, Quantization};
use crate::packed_tensors::gather;
use crate::parameters::{Initializer, named_parameters, parameter_shapes, path_of, segment};
use crate::synced::write_synced;
use crate::tensor_files::{Encoding, Stored, StoredTensor, TensorFiles, TensorRow, gguf_instead, interleaved_row};
use crate::transformer::Transformer;

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";

/// A folder with a model in it, or the GGUF file of one.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    path: PathBuf,
    /// Merged into the weights while they are read.
    adapter: Option<Arc<LoraFiles>>,
}

/// What matrices are loaded as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixDtype {
    /// Floats.
    Float(FloatDType),
    /// Quantized: projections, the head and the embedding table, where the format stores rows of
    /// their length. Other matrices are f32.
    Quantized(Format),
    /// As they are stored: blocks of GGUF files as blocks, codes of quantized checkpoints with
    /// their scales, and floats of 16 bits as such, in their own dtype where the device has it.
    /// What is stored as other floats, and matrices with a part that is, are f32.
    Stored,
}

impl From<FloatDType> for MatrixDtype {
    fn from(dtype: FloatDType) -> Self {
        Self::Float(dtype)
    }
}

impl From<Format> for MatrixDtype {
    fn from(format: Format) -> Self {
        Self::Quantized(format)
    }
}

/// What the matrices of a model are loaded as, by their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixDtypes {
    /// The linear layers of the blocks.
    pub blocks: MatrixDtype,
    /// All others: embeddings and the output projection.
    pub outer: MatrixDtype,
}

impl<T: Into<MatrixDtype>> From<T> for MatrixDtypes {
    fn from(dtype: T) -> Self {
        let dtype = dtype.into();
        Self { blocks: dtype, outer: dtype }
    }
}

impl MatrixDtypes {
    fn of(self, path: &str) -> MatrixDtype {
        if path.starts_with("blocks.") { self.blocks } else { self.outer }
    }
}

impl ModelFolder {
    /// The folder or the GGUF file at `path`, of several parts the first; nothing is read yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), adapter: None }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// With an adapter that is merged into the weights when they are read.
    pub fn with_adapter(self, adapter: LoraFiles) -> Self {
        Self { adapter: Some(Arc::new(adapter)), ..self }
    }

    /// Reads `config.json`, or the metadata of a GGUF file.
    ///
    /// # Errors
    /// If it is missing, damaged, or describes nothing that can be built.
    pub fn config(&self) -> Result<(Family, TransformerConfig), WeightsError> {
        let (family, mut config) = match self.gguf()? {
            None => self.parsed(&self.json()?)?,
            Some(gguf) => self.parsed(&gguf.config(&self.path)?.1)?,
        };
        // An adapter may bring new tokens.
        if let Some(adapter) = &self.adapter {
            let grown = adapter.vocab_size(family).filter(|size| *size != config.vocab_size);
            config.vocab_size = grown.unwrap_or(config.vocab_size);
            let update = |name: Option<&str>| name.and_then(|name| adapter.update(name));
            // A tied table is changed for both uses if new tokens come with it, or if both have the
            // same values.
            config.tied_embeddings &= match (update(family.embedding_name()), update(family.head_name())) {
                (Some(table), Some(head)) => table == head,
                (None, None) => true,
                _ => grown.is_some(),
            };
        }
        Ok((family, config))
    }

    /// The keys of `config.json`, or of a GGUF file's metadata, that are passed over since nothing
    /// is known of them: they may change what the model computes.
    ///
    /// # Errors
    /// As [`config`](Self::config).
    pub fn unknown_keys(&self) -> Result<Vec<String>, WeightsError> {
        if let Some(gguf) = self.gguf()? {
            return Ok(gguf::unknown_keys(&gguf.metadata));
        }
        let (family, _) = self.config()?;
        Ok(hub::unknown_keys(family, &self.json()?))
    }

    /// Whether it is a GGUF file and no folder.
    pub fn is_gguf(&self) -> bool {
        gguf::is_gguf(&self.path)
    }

    /// The metadata of a GGUF file; none of a folder.
    ///
    /// # Errors
    /// If the file is missing, truncated, damaged, or of a version or with a tensor of a type that
    /// is not read.
    pub fn gguf_metadata(&self) -> Result<Option<gguf::Metadata>, WeightsError> {
        Ok(self.gguf()?.map(|gguf| gguf.metadata))
    }

    /// How the model's matrices are stored, as messages call it, and the bytes that each way takes,
    /// the most first.
    ///
    /// # Errors
    /// If a file is missing, truncated or damaged.
    pub fn encodings(&self) -> Result<Vec<(String, u64)>, WeightsError> {
        let files = match self.gguf()? {
            Some(gguf) => gguf.files,
            None => self.tensor_files()?,
        };
        let mut bytes = BTreeMap::<String, u64>::new();
        for tensor in files.tensors().values().filter(|tensor| tensor.shape.len() >= 2) {
            *bytes.entry(tensor.encoding.name()).or_default() += tensor.bytes();
        }
        let mut bytes: Vec<_> = bytes.into_iter().collect();
        bytes.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        Ok(bytes)
    }

    fn gguf(&self) -> Result<Option<Gguf>, WeightsError> {
        self.is_gguf().then(|| Gguf::open(&self.path)).transpose()
    }

    fn parsed(&self, json: &Value) -> Result<(Family, TransformerConfig), WeightsError> {
        hub::read(json).map_err(|error| self.wrong_config(error))
    }

    pub(crate) fn wrong_config(&self, error: ConfigError) -> WeightsError {
        let path = if self.is_gguf() { self.path.clone() } else { self.path.join(CONFIG) };
        WeightsError::Config { path, error }
    }

    pub(crate) fn json(&self) -> Result<Value, WeightsError> {
        let path = self.path.join(CONFIG);
        let text = fs::read_to_string(&path).map_err(|error| match gguf_instead(&self.path, CONFIG) {
            Some(reason) if error.kind() == ErrorKind::NotFound => self.wrong(reason),
            _ => WeightsError::Io { path: path.clone(), error },
        })?;
        serde_json::from_str(&text).map_err(|error| WeightsError::Json { path, error })
    }

    /// Whether its matrices are quantized, as `config.json` says.
    ///
    /// # Errors
    /// If it is missing, damaged, or quantized in a way that is not read.
    pub fn is_quantized(&self) -> Result<bool, WeightsError> {
        Ok(!self.is_gguf() && self.quantization()?.is_some())
    }

    fn quantization(&self) -> Result<Option<Quantization>, WeightsError> {
        Quantization::read(&self.json()?).map_err(|error| self.wrong_config(error))
    }

    /// The files of a folder, each quantized matrix under its own name.
    pub(crate) fn tensor_files(&self) -> Result<TensorFiles, WeightsError> {
        let mut files = TensorFiles::open(&self.path)?;
        // A folder of tensors alone may have no config.
        if self.path.join(CONFIG).exists()
            && let Some(quantization) = self.quantization()?
        {
            gather(&mut files, &quantization)?;
        }
        Ok(files)
    }

    /// The model's files, and how they name tensors.
    fn open(&self, family: Family) -> Result<(TensorFiles, Names), WeightsError> {
        let Some(gguf) = self.gguf()? else { return Ok((self.tensor_files()?, Names::Hub(family))) };
        let (architecture, _) = gguf.config(&self.path)?;
        Ok((gguf.files, Names::Gguf(architecture)))
    }

    /// Reads the model onto `device`, its parameters as f32.
    ///
    /// # Errors
    /// If a file is missing, truncated or damaged, or if tensors are missing, more, of another
    /// shape or of another kind than the config says: the first few are named, before any is read.
    pub fn load<B: Backend>(&self, device: &B::Device) -> Result<Transformer<B>, WeightsError> {
        self.load_in(FloatDType::F32, &mut |_, _| {}, device)
    }

    /// Reads the model onto `device`, its matrices as `dtype` or quantized, and its vectors as f32:
    /// for everything but training. `progress` is told, as it goes on, how many bytes of how many
    /// are read.
    ///
    /// Tensors are read one after the other, so that the host holds one at a time.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_in<B: Backend>(
        &self,
        dtype: impl Into<MatrixDtype>,
        progress: &mut dyn FnMut(u64, u64),
        device: &B::Device,
    ) -> Result<Transformer<B>, WeightsError> {
        let (family, config) = self.config()?;
        self.read(family, &config, None, dtype.into().into(), progress, device)
    }

    /// Reads the model as one of `config`, which may differ from the folder's in its heads and
    /// in its dropout, its matrices as `dtype`. Without `heads`, those for utterances are drawn
    /// from `seed`, and so is the one for sequences, except for what an encoder pretrained of it.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_as<B: Backend>(
        &self,
        config: &TransformerConfig,
        heads: bool,
        seed: u64,
        dtype: impl Into<MatrixDtypes>,
        device: &B::Device,
    ) -> Result<Transformer<B>, WeightsError> {
        let (family, _) = self.config()?;
        self.read(family, config, (!heads).then_some(seed), dtype.into(), &mut |_, _| {}, device)
    }

    /// The model for [`Transformer::with_lora`], its parameters as f32: of the adapter, only the
    /// modules that it saves whole are merged.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_base<B: Backend>(&self, device: &B::Device) -> Result<Transformer<B>, WeightsError> {
        let adapter = self.adapter.as_ref().map(|adapter| Arc::new(adapter.saved_modules()));
        Self { path: self.path.clone(), adapter }.load(device)
    }

    fn read<B: Backend>(
        &self,
        family: Family,
        config: &TransformerConfig,
        fresh_heads: Option<u64>,
        dtype: MatrixDtypes,
        progress: &mut dyn FnMut(u64, u64),
        device: &B::Device,
    ) -> Result<Transformer<B>, WeightsError> {
        let Plan { files, config, mut model, parts } = self.plan::<B>(family, config, fresh_heads.is_some(), device)?;
        let config = &config;

        let total = parts.values().flatten().map(|part| part.stored.bytes()).sum();
        let mut done = 0;
        let mut told = |bytes: u64| {
            done += bytes;
            progress(done, total);
        };
        let matrices = model.matrices_mut().map(|(path, _)| path).collect();
        let (path, quantized) = (Vec::new(), HashMap::new());
        let progress = &mut told;
        let reader =
            Reader { folder: self, files: &files, parts, dtype, progress, path, matrices, quantized, failure: None };
        let mut model = reader.fill(model)?;
        if let (Some(seed), true) = (fresh_heads, config.tags > 0) {
            model.heads = Some(crate::heads::UtteranceHeads::new(config, &mut Initializer::new(seed, device)));
        }
        if let (Some(seed), Some(settings)) = (fresh_heads, &config.classifier) {
            let mut head = ClassifierHead::new(config, settings, &mut Initializer::new(seed, device));
            self.read_pretrained_head(&mut head, family, config)?;
            model.classifier = Some(head);
        }
        Ok(model)
    }

    /// Opens the files, and finds what fills each parameter; without heads for utterances if these
    /// are to be fresh.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub(crate) fn plan<B: Backend>(
        &self,
        family: Family,
        config: &TransformerConfig,
        fresh_heads: bool,
        device: &B::Device,
    ) -> Result<Plan<B>, WeightsError> {
        let (files, names) = self.open(family)?;
        // What is stored counts: an output projection of its own, whatever the config says of it.
        let [table, head] = [names.embedding(), names.head()].map(|name| stored_as(files.tensors(), name?));
        let config = match (table, head) {
            // One of another shape is no such projection, and passed over.
            (Some((_, table)), Some((_, head)))
                if config.tied_embeddings && table.shape == head.shape && !files.are_same([table, head])? =>
            {
                TransformerConfig { tied_embeddings: false, ..config.clone() }
            }
            _ => config.clone(),
        };
        let blank = config.init_with(&mut Initializer::<B>::blank(device));
        let mut model = blank.map_err(|error| self.wrong_config(error))?;
        if fresh_heads {
            model.heads = None;
            model.classifier = None;
        }
        let parts = self.parts(&files, names, &config, &model)?;
        Ok(Plan { files, config, model, parts })
    }

    /// A tensor that the folder has beyond the transformer's own, such as a head for
    /// classification. None if there is no tensor of this name.
    ///
    /// # Errors
    /// If the file is missing or damaged, or the tensor has another number of dimensions than `D`,
    /// or a dtype that cannot be read.
    pub fn tensor<const D: usize>(&self, name: &str) -> Result<Option<StoredValues<D>>, WeightsError> {
        let files = self.tensor_files()?;
        let Some((name, stored)) = stored_as(files.tensors(), name) else { return Ok(None) };
        let wrong = |reason: String| WeightsError::Weights { path: self.path.clone(), reason };
        let shape = <[usize; D]>::try_from(&stored.shape[..])
            .map_err(|_| wrong(format!("{name} has shape {:?} instead of {D} dimensions", stored.shape)))?;
        if !stored.encoding.is_readable() {
            return Err(wrong(format!("{name} has dtype {}, which is not supported", stored.encoding.name())));
        }
        let mut values = vec![0.0; shape.iter().product()];
        files.read::<f32>(stored, false, &mut values, &mut |_| {})?;
        Ok(Some((shape, values)))
    }

    /// What the adapter, if any, does to the weight of a name.
    pub(crate) fn update_of(&self, name: &str) -> Option<&ModuleUpdate> {
        self.adapter.as_ref()?.update(name)
    }

    /// Which stored tensors fill each parameter, after a check that they do.
    fn parts<B: Backend>(
        &self,
        files: &TensorFiles,
        names: Names,
        config: &TransformerConfig,
        model: &Transformer<B>,
    ) -> Result<HashMap<String, Vec<Part>>, WeightsError> {
        let shapes = parameter_shapes(model);
        let paths: Vec<String> = shapes.iter().map(|(path, _)| path.clone()).collect();
        let shapes: HashMap<String, Vec<usize>> = shapes.into_iter().collect();
        let mut parts: HashMap<String, Vec<Part>> = HashMap::new();
        let mut used = BTreeSet::new();
        let (mut problems, mut updated) = (Vec::new(), BTreeSet::new());
        let tensors = names.tensors(config, &paths).map_err(|reason| self.wrong(reason))?;
        for mut tensor in tensors {
            let mut found = stored_as(files.tensors(), &tensor.name);
            // Of a pair that is one, either may be stored.
            if found.is_none() && config.tied_embeddings && tensor.path == "embedding" {
                found = names.head().and_then(|name| stored_as(files.tensors(), name));
            }
            // An adapter unties them, but only one is stored.
            if found.is_none() && self.adapter.is_some() && tensor.path == "head" {
                found = names.embedding().and_then(|name| stored_as(files.tensors(), name));
            }
            let Some((name, stored)) = found else {
                problems.push(format!("{} is missing", tensor.name));
                continue;
            };
            used.insert(name);
            // Quantized, stacked matrices are stored as operations read them.
            tensor.transposed &= tensor.stacked.is_none() || stored.packed.is_none();
            let replaced = match self.update_of(&tensor.name) {
                Some(ModuleUpdate::Replaced { shape, .. }) => Some(stored.clone().with_shape(shape.clone())),
                _ => None,
            };
            match check(&tensor, replaced.as_ref().unwrap_or(stored), &shapes[&tensor.path]) {
                None => {
                    let file = replaced.unwrap_or_else(|| stored.clone());
                    let stored = file.clone().with_interleaved(tensor.interleaved);
                    let stored = match (tensor.stacked, tensor.transposed) {
                        (Some(stacked), false) => {
                            let rows = stored.shape[..2].iter().product();
                            let inner = stored.shape[2..].to_vec();
                            debug_assert!(stored.shape[0] == stacked, "checked with its shape");
                            stored.with_shape([vec![rows], inner].concat())
                        }
                        _ => stored,
                    };
                    let update = self.update_of(&tensor.name);
                    updated.extend(update.is_some().then(|| tensor.name.clone()));
                    let HubTensor { name, transposed, offset, .. } = tensor;
                    let part = Part { name, stored, file, transposed, updated: update.is_some(), offset };
                    parts.entry(tensor.path).or_default().push(part);
                }
                Some(problem) => problems.push(problem),
            }
        }
        // The update of a tied table is both uses'.
        updated.extend(names.head().filter(|_| config.tied_embeddings).map(str::to_string));
        let unknown = files.tensors().keys().filter(|name| !used.contains(*name) && !names.ignores(name));
        problems.extend(unknown.map(|name| format!("{name} is not part of such a model")));
        if let Some(adapter) = &self.adapter
            && let Some(unknown) = adapter.weights().find(|name| !updated.contains(*name))
        {
            return Err(adapter.wrong(format!("it changes {unknown}, which {} does not have", self.path.display())));
        }
        if problems.is_empty() {
            return Ok(parts);
        }
        let more = if problems.len() > 3 { format!(", and {} more", problems.len() - 3) } else { String::new() };
        problems.truncate(3);
        let described = if self.is_gguf() { "the metadata" } else { CONFIG };
        let reason = format!("the weights do not fit {described}: {}{more}", problems.join(", "));
        Err(WeightsError::Weights { path: self.path.clone(), reason })
    }

    /// Writes `config.json` and `model.safetensors` into the folder, which must exist, under the
    /// names that the hub uses for the model's family. Each file is written under a temporary name,
    /// synced and renamed.
    ///
    /// # Errors
    /// If the file system refuses, or the model is quantized or has adapters.
    pub fn save<B: Backend>(&self, model: &Transformer<B>) -> Result<(), WeightsError> {
        if model.is_quantized() {
            let reason = "a quantized model cannot be saved".to_string();
            return Err(WeightsError::Weights { path: self.path.clone(), reason });
        }
        if model.has_adapters() {
            let reason = "a model with adapters is saved by an AdapterSaver".to_string();
            return Err(WeightsError::Weights { path: self.path.clone(), reason });
        }
        let config = model.config();
        let family = Family::of(config);
        let json = serde_json::to_string_pretty(&Value::Object(family.write(config))).unwrap_or_default();
        write_synced(&self.path.join(CONFIG), |path| fs::write(path, json))?;

        let parameters = named_parameters(model);
        let paths: Vec<String> = parameters.iter().map(|(path, ..)| path.clone()).collect();
        let parameters: HashMap<String, (Vec<usize>, Tensor<B, 1>)> =
            parameters.into_iter().map(|(path, _, shape, value)| (path, (shape, value))).collect();
        let tensors = family.tensors(config, &paths).map_err(|reason| self.wrong(reason))?;
        let views = tensors.into_iter().map(|tensor| {
            let (shape, value) = &parameters[&tensor.path];
            (tensor.name.clone(), SavedTensor { shape: stored_shape(&tensor, shape), tensor, own: shape, value })
        });
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        write_synced(&self.path.join(WEIGHTS), |path| {
            safetensors::serialize_to_file(views, Some(metadata), path).map_err(|error| match error {
                SafeTensorError::IoError(error) => error,
                error => std::io::Error::other(error.to_string()),
            })
        })
    }

    pub(crate) fn wrong(&self, reason: String) -> WeightsError {
        WeightsError::Weights { path: self.path.clone(), reason }
    }
}

/// How files name the tensors of a model.
#[derive(Clone, Copy)]
enum Names {
    Hub(Family),
    Gguf(Architecture),
}

impl Names {
    fn tensors(self, config: &TransformerConfig, paths: &[String]) -> Result<Vec<HubTensor>, String> {
        match self {
            Self::Hub(family) => family.tensors(config, paths),
            Self::Gguf(architecture) => gguf::tensors(architecture, config, paths),
        }
    }

    fn ignores(self, name: &str) -> bool {
        match self {
            Self::Hub(family) => family.ignores(name),
            Self::Gguf(_) => gguf::ignores(name),
        }
    }

    fn embedding(self) -> Option<&'static str> {
        match self {
            Self::Hub(family) => family.embedding_name(),
            Self::Gguf(_) => Some(gguf::EMBEDDING),
        }
    }

    fn head(self) -> Option<&'static str> {
        match self {
            Self::Hub(family) => family.head_name(),
            Self::Gguf(_) => Some(gguf::HEAD),
        }
    }
}

/// A stored tensor that fills a parameter or some of its rows.
pub(crate) struct Part {
    pub(crate) name: String,
    /// As it is read: stacked matrices that are not transposed are one.
    pub(crate) stored: StoredTensor,
    /// As the file has it.
    pub(crate) file: StoredTensor,
    pub(crate) transposed: bool,
    /// Whether an adapter changes it.
    pub(crate) updated: bool,
    /// What is added to its values.
    pub(crate) offset: f32,
}

/// A model that is to be read, and where each parameter is stored.
pub(crate) struct Plan<B: Backend> {
    pub(crate) files: TensorFiles,
    pub(crate) config: TransformerConfig,
    /// Its parameters know their shapes, and hold nothing.
    pub(crate) model: Transformer<B>,
    pub(crate) parts: HashMap<String, Vec<Part>>,
}

/// The stored tensor of a name, under which it may be with or without the prefix that some
/// checkpoints have.
pub(crate) fn stored_as<'a>(
    stored: &'a BTreeMap<String, StoredTensor>,
    name: &str,
) -> Option<(&'a String, &'a StoredTensor)> {
    let bare = OPTIONAL_PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
    let prefixed = || OPTIONAL_PREFIXES.iter().find_map(|prefix| stored.get_key_value(&format!("{prefix}{name}")));
    let found = stored.get_key_value(name).or_else(|| stored.get_key_value(bare?)).or_else(prefixed);
    // As TensorFlow calls a norm's weights, and with it the oldest checkpoints.
    let older = || {
        let norm = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")];
        norm.into_iter().find_map(|(now, then)| Some(format!("{}{then}", name.strip_suffix(now)?)))
    };
    found.or_else(|| stored_as(stored, &older()?))
}

/// A tensor's shape, and its values row after row.
pub type StoredValues<const D: usize> = ([usize; D], Vec<f32>);

/// What is wrong with a stored tensor for a parameter of `shape`.
fn check(tensor: &HubTensor, stored: &StoredTensor, shape: &[usize]) -> Option<String> {
    let name = &tensor.name;
    let wanted = stored_shape(tensor, shape);
    if stored.shape != wanted {
        return Some(format!("{name} has shape {:?} instead of {wanted:?}", stored.shape));
    }
    let encoding = stored.encoding;
    (!encoding.is_readable()).then(|| format!("{name} has dtype {}, which is not supported", encoding.name()))
}

/// Reads parameters one after the other.
struct Reader<'a, B: Backend> {
    folder: &'a ModelFolder,
    files: &'a TensorFiles,
    parts: HashMap<String, Vec<Part>>,
    /// Of matrices; vectors are f32.
    dtype: MatrixDtypes,
    progress: &'a mut dyn FnMut(u64),
    path: Vec<String>,
    /// Paths of the matrices that may be quantized.
    matrices: BTreeSet<String>,
    /// Those that are.
    quantized: HashMap<String, Vec<QuantizedWeight<B>>>,
    failure: Option<WeightsError>,
}

impl<B: Backend> Reader<'_, B> {
    fn fill(mut self, model: Transformer<B>) -> Result<Transformer<B>, WeightsError> {
        let mut model = model.map(&mut self);
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        for (path, matrix) in model.matrices_mut() {
            if let Some(parts) = self.quantized.remove(&path) {
                matrix.store_quantized(parts);
            }
        }
        Ok(model)
    }

    /// The matrix quantized, or as floats where the format does not store rows of its length.
    fn read_quantized(
        &mut self,
        format: Format,
        parts: &[Part],
        shape: [usize; 2],
        device: &B::Device,
    ) -> Result<Result<QuantizedWeight<B>, TensorData>, WeightsError> {
        let all =
            |dtype: Dtype| parts.iter().all(|part| part.stored.encoding == Encoding::Float(dtype) && !part.updated);
        // As it is stored, which may be half the memory.
        if all(Dtype::BF16) {
            return self.quantized(format, parts, shape, bf16::ZERO, device);
        }
        if all(Dtype::F16) {
            return self.quantized(format, parts, shape, f16::ZERO, device);
        }
        self.quantized(format, parts, shape, 0f32, device)
    }

    fn quantized<T: Stored + Element>(
        &mut self,
        format: Format,
        parts: &[Part],
        shape: [usize; 2],
        zero: T,
        device: &B::Device,
    ) -> Result<Result<QuantizedWeight<B>, TensorData>, WeightsError> {
        let values = self.values(parts, &shape, zero)?;
        let weight = QuantizedWeight::quantize_rows(format, shape, device, |row, out| {
            let row = &values[row * shape[1]..][..shape[1]];
            out.iter_mut().zip(row).for_each(|(out, value)| *out = value.elem());
        })?;
        Ok(weight.ok_or_else(|| TensorData::new(values, shape).convert::<f32>()))
    }

    /// The parts of a matrix as they are stored, those of one format together. None where one of
    /// them is in no format.
    fn read_stored(
        &mut self,
        parts: &[Part],
        columns: usize,
        device: &B::Device,
    ) -> Result<Option<Vec<QuantizedWeight<B>>>, WeightsError> {
        if parts.iter().any(|part| part.stored.packed.is_some()) {
            return self.read_packed(parts, columns, device).map(Some);
        }
        let format = |part: &Part| {
            let format = part.stored.encoding.format().filter(|_| !part.transposed);
            format.and_then(|format| Some((format, format.layout(columns)?.words)))
        };
        let Some(formats) = parts.iter().map(format).collect::<Option<Vec<_>>>() else { return Ok(None) };
        let parts: Vec<_> = formats.into_iter().zip(parts).collect();
        let mut weights = Vec::new();
        for alike in parts.chunk_by(|(a, _), (b, _)| a == b) {
            let [((format, words_each), _), ..] = *alike else { continue };
            let rows = alike.iter().map(|(_, part)| part.stored.shape[0]).sum();
            let mut words = vec![0; rows * words_each];
            let mut rest = &mut words[..];
            for (_, part) in alike {
                let (own, behind) = rest.split_at_mut(part.stored.shape[0] * words_each);
                self.files.read_rows(&part.stored, words_each, own, self.progress)?;
                rest = behind;
            }
            let host = HostWeight { format, shape: [rows, columns], words, scales: Vec::new(), device: device.clone() };
            weights.push(QuantizedWeight::stored(host)?);
        }
        Ok(Some(weights))
    }

    /// The parts of a matrix of which some are quantized: with their codes and scales where a
    /// format has these, and as f16 otherwise, to which the packages that make them dequantize
    /// them, too.
    fn read_packed(
        &mut self,
        parts: &[Part],
        columns: usize,
        device: &B::Device,
    ) -> Result<Vec<QuantizedWeight<B>>, WeightsError> {
        let mut weights: Vec<HostWeight<B>> = Vec::new();
        for part in parts {
            let rows = part.stored.shape[0];
            let stored = match part.stored.packed.as_deref() {
                // Rows in another order are put in theirs as they are dequantized.
                Some(packed) if part.stored.interleaved.is_none() => {
                    self.files.unpack(packed, [rows, columns])?.stored()
                }
                _ => None,
            };
            let (format, words, scales) = match stored {
                Some(StoredCodes { format, words, scales }) => {
                    (self.progress)(part.stored.bytes());
                    (format, words, scales)
                }
                None => {
                    let values = self.values(std::slice::from_ref(part), &[rows, columns], f16::ZERO)?;
                    let pairs = values.chunks_exact(2);
                    let words =
                        pairs.map(|pair| (u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16) as i32);
                    (Format::F16, words.collect(), Vec::new())
                }
            };
            match weights.last_mut().filter(|last| last.format == format) {
                Some(last) => {
                    last.shape[0] += rows;
                    last.words.extend(words);
                    last.scales.extend(scales);
                }
                None => {
                    weights.push(HostWeight { format, shape: [rows, columns], words, scales, device: device.clone() });
                }
            }
        }
        Ok(weights.into_iter().map(QuantizedWeight::stored).collect::<Result<_, _>>()?)
    }

    /// The dtype that all parts have and the device, too, if it is one of 16 bits.
    fn common_half(&self, parts: &[Part], device: &B::Device) -> Option<FloatDType> {
        let all = |dtype: Dtype| parts.iter().all(|part| part.stored.encoding == Encoding::Float(dtype));
        let halves = [(Dtype::F16, FloatDType::F16), (Dtype::BF16, FloatDType::BF16)];
        let half = halves.into_iter().find(|(dtype, _)| all(*dtype)).map(|(_, half)| half);
        half.filter(|half| B::supports_dtype(device, DType::from(*half)))
    }

    /// The values of a parameter on the device, in one row.
    fn read(
        &mut self,
        dtype: MatrixDtype,
        parts: &[Part],
        shape: &[usize],
        device: &B::Device,
    ) -> Result<Tensor<B, 1>, WeightsError> {
        match dtype {
            MatrixDtype::Float(FloatDType::F16) if shape.len() > 1 => self.read_as(parts, shape, f16::ZERO, device),
            MatrixDtype::Float(FloatDType::BF16) if shape.len() > 1 => self.read_as(parts, shape, bf16::ZERO, device),
            _ => self.read_as(parts, shape, 0f32, device),
        }
    }

    fn read_as<T: Stored + Element>(
        &mut self,
        parts: &[Part],
        shape: &[usize],
        zero: T,
        device: &B::Device,
    ) -> Result<Tensor<B, 1>, WeightsError> {
        if parts.iter().any(|part| part.updated || part.offset != 0.0) {
            let values = self.values(parts, shape, 0f32)?.into_iter().map(T::of).collect();
            return Ok(upload::<B, Float>(TensorData::new::<T, _>(values, shape), device)?);
        }
        if parts.iter().any(|part| part.transposed) {
            return Ok(upload::<B, Float>(TensorData::new(self.values(parts, shape, zero)?, shape), device)?);
        }
        let mut row = TensorRow::new(self.files, parts.iter().map(|part| &part.stored));
        upload_pieces::<B, Float, _>(shape.iter().product(), T::dtype(), device, |piece| {
            row.read::<T>(piece, self.progress)
        })
    }

    fn values<T: Stored>(&mut self, parts: &[Part], shape: &[usize], zero: T) -> Result<Vec<T>, WeightsError> {
        let mut values = vec![zero; shape.iter().product()];
        let mut rest = &mut values[..];
        for Part { name, stored, transposed, offset, .. } in parts {
            let (own, behind) = rest.split_at_mut(stored.shape.iter().product());
            let update = self.folder.update_of(name);
            if !matches!(update, Some(ModuleUpdate::Replaced { .. })) {
                self.files.read(stored, *transposed, own, self.progress)?;
            }
            if let (Some(update), Some(adapter)) = (update, &self.folder.adapter) {
                let mut shape = stored.shape.clone();
                if *transposed {
                    shape.reverse();
                }
                let mut updated: Vec<f32> = own.iter().map(|value| value.value()).collect();
                update.apply(&mut updated, &shape).map_err(|reason| adapter.wrong(format!("{name} {reason}")))?;
                own.iter_mut().zip(updated).for_each(|(own, value)| *own = T::of(value));
            }
            if *offset != 0.0 {
                own.iter_mut().for_each(|own| *own = T::of(own.value() + offset));
            }
            rest = behind;
        }
        Ok(values)
    }
}

impl<B: Backend> ModuleMapper<B> for Reader<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let path = path_of(&self.path);
        let parts = self.parts.remove(&path).filter(|_| self.failure.is_none());
        let Some(parts) = parts else { return param };
        let (shape, device, id) = (param.lazy_shape(), param.lazy_device(), param.id);
        let dtype = self.dtype.of(&path);
        let read = match (dtype, shape.as_slice()) {
            (MatrixDtype::Quantized(format), &[rows, columns]) if self.matrices.contains(&path) => {
                match self.read_quantized(format, &parts, [rows, columns], &device) {
                    Ok(Ok(weight)) => {
                        self.quantized.insert(path, vec![weight]);
                        return param;
                    }
                    Ok(Err(floats)) => upload::<B, Float>(floats, &device).map_err(WeightsError::from),
                    Err(failure) => Err(failure),
                }
            }
            // What an adapter changes is no longer as it is stored.
            (MatrixDtype::Stored, &[_, columns])
                if self.matrices.contains(&path) && !parts.iter().any(|part| part.updated) =>
            {
                match self.common_half(&parts, &device) {
                    Some(FloatDType::F16) => self.read_as(&parts, shape.as_slice(), f16::ZERO, &device),
                    Some(_) => self.read_as(&parts, shape.as_slice(), bf16::ZERO, &device),
                    None => match self.read_stored(&parts, columns, &device) {
                        Ok(Some(weights)) => {
                            self.quantized.insert(path, weights);
                            return param;
                        }
                        Ok(None) => self.read(dtype, &parts, shape.as_slice(), &device),
                        Err(failure) => Err(failure),
                    },
                }
            }
            (_, shape) => self.read(dtype, &parts, shape, &device),
        };
        match read {
            Ok(values) => param.transform_for_load(values.reshape(shape), id),
            Err(failure) => {
                self.failure = Some(failure);
                param
            }
        }
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(segment(name, container));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// A parameter's part as it is saved, f32: read from the device when it is written, so that the
/// host holds one at a time.
struct SavedTensor<'a, B: Backend> {
    tensor: HubTensor,
    /// On the hub.
    shape: Vec<usize>,
    /// Of the whole parameter.
    own: &'a [usize],
    value: &'a Tensor<B, 1>,
}

impl<B: Backend> View for SavedTensor<'_, B> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let row = self.own[1..].iter().product::<usize>();
        let rows = self.tensor.rows.clone().unwrap_or(0..self.own[0]);
        let mut bytes = vec![0; self.data_len()];
        let offset = self.tensor.offset;
        if let Some(stacked) = self.tensor.stacked {
            // Of one matrix, or vector.
            let matrix_rows = rows.len() / stacked.max(1);
            f32_chunks(self.value, rows.start * row..rows.end * row, |begin, chunk| {
                for (at, value) in (begin..).zip(chunk.chunks_exact(4)) {
                    let (matrix, own, column) = (at / row / matrix_rows, at / row % matrix_rows, at % row);
                    let own = self.tensor.interleaved.map_or(own, |rows| interleaved_row(own, rows));
                    let to = match self.tensor.transposed {
                        true => (matrix * row + column) * matrix_rows + own,
                        false => (matrix * matrix_rows + own) * row + column,
                    };
                    bytes[4 * to..][..4].copy_from_slice(value);
                }
            });
            return Cow::Owned(bytes);
        }
        let transposed = self.tensor.transposed.then(|| [self.shape[1], self.shape[0]]);
        f32_chunks(self.value, rows.start * row..rows.end * row, |begin, chunk| match transposed {
            None if offset != 0.0 => {
                let value = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let out = bytes[4 * begin..][..chunk.len()].chunks_exact_mut(4);
                out.zip(chunk.chunks_exact(4))
                    .for_each(|(out, stored)| out.copy_from_slice(&(value(stored) - offset).to_le_bytes()));
            }
            None => bytes[4 * begin..][..chunk.len()].copy_from_slice(chunk),
            Some([rows, columns]) => {
                for (at, value) in (begin..).zip(chunk.chunks_exact(4)) {
                    bytes[4 * (at % columns * rows + at / columns)..][..4].copy_from_slice(value);
                }
            }
        });
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        4 * self.shape.iter().product::<usize>()
    }
}

/// Values that are read from a device at a time.
const CHUNK: usize = 1 << 18;

/// Reads a range of a tensor as f32 in chunks and hands each chunk's little-endian bytes to `take`,
/// with the offset of its first value in the range, so that the host holds no second copy of a
/// large tensor.
pub fn f32_chunks<B: Backend>(values: &Tensor<B, 1>, range: Range<usize>, mut take: impl FnMut(usize, &[u8])) {
    for begin in range.clone().step_by(CHUNK) {
        let chunk = values.clone().narrow(0, begin, CHUNK.min(range.end - begin)).cast(DType::F32);
        take(begin - range.start, &chunk.into_data().bytes);
    }
}

/// The shape of a stored tensor that holds a parameter of `shape`, or some of its rows.
pub(crate) fn stored_shape(tensor: &HubTensor, shape: &[usize]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(rows) = &tensor.rows {
        shape[0] = rows.len();
    }
    if tensor.transposed {
        shape.reverse();
    }
    if let Some(stacked) = tensor.stacked {
        let rows = if tensor.transposed { shape.len() - 1 } else { 0 };
        shape[rows] /= stacked.max(1);
        shape.insert(0, stacked);
    }
    shape
}
