//! Adapters on a model that is trained, and their files.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::Range;
use std::path::Path;

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use safetensors::tensor::{Dtype, TensorView};

use fireclay_kernels::{Backend, RandomKey};

use super::config::{LoraConfig, Targets, ends_in};
use super::files::{CONFIG, LoraFiles, ModuleUpdate, PREFIX, WEIGHTS};
use crate::error::WeightsError;
use crate::hub::{Family, HubTensor};
use crate::linear::{Adapter, Linear, Magnitude};
use crate::matrix::Matrix;
use crate::parameters::{named_parameters, parameter_shapes, path_of, segment};
use crate::synced::write_synced;
use crate::transformer::Transformer;

/// A module's part of an adapter on a parameter that holds several modules, such as queries, keys
/// and values.
struct Block {
    module: String,
    /// Rows of the parameter.
    rows: Range<usize>,
    /// Of `a`, and columns of `b`.
    ranks: Range<usize>,
    scale: f64,
}

/// The blocks of the adapter on the parameter at `path`, of `rows` rows.
fn blocks(
    family: Family,
    model: &crate::config::TransformerConfig,
    config: &LoraConfig,
    path: &str,
    rows: usize,
) -> Result<Vec<Block>, String> {
    let mut blocks: Vec<Block> = Vec::new();
    for HubTensor { name, rows: own, .. } in family.tensors(model, &[path.to_string()])? {
        let Some(module) = name.strip_suffix(".weight") else { continue };
        if !config.is_on(module)? {
            continue;
        }
        let rank = config.rank_of(module)?;
        let first = blocks.last().map_or(0, |block| block.ranks.end);
        let scale = config.scale_of(module, rank)?;
        blocks.push(Block { module: module.into(), rows: own.unwrap_or(0..rows), ranks: first..first + rank, scale });
    }
    Ok(blocks)
}

impl<B: Backend> Transformer<B> {
    /// With a fresh adapter on each module that `config` names, or the one in `files`; only these
    /// are trained then, and the modules to save. `family` names the modules.
    ///
    /// As PEFT begins: `a` is uniform within `1 / sqrt(d_input)`, drawn from `seed`, and `b` is
    /// zero.
    ///
    /// # Errors
    /// If no module is named, a name is of none, or what is named cannot be trained apart from the rest.
    pub fn with_lora(
        mut self,
        family: Family,
        config: &LoraConfig,
        files: Option<&LoraFiles>,
        seed: u64,
    ) -> Result<Self, String> {
        let own = self.config().clone();
        self.refuse_experts(family, config)?;
        let (key, mut drawn, mut used) = (RandomKey::new(seed).fold(0x6c6f_7261), 0, Vec::new());
        for (path, linear) in self.linears_mut() {
            let [d_output, d_input] = linear.base.dims()[..] else { continue };
            let blocks = blocks(family, &own, config, &path, d_output)?;
            let Some(rank) = blocks.last().map(|block| block.ranks.end) else { continue };
            let device = linear.base.device();
            let scale = blocks[0].scale;
            let (mut a, mut b) = (vec![0.0; rank * d_input], vec![0.0; d_output * rank]);
            let mut mask = vec![0.0; d_output * rank];
            let (mut magnitudes, mut adapted) = (vec![0.0; d_output], vec![0.0; d_output]);
            for Block { module, rows, ranks, scale: own_scale } in &blocks {
                used.push(module.clone());
                let bound = 1.0 / (d_input as f64).sqrt();
                for rank in ranks.clone() {
                    let key = key.fold(drawn);
                    drawn += 1;
                    for (column, a) in a[rank * d_input..][..d_input].iter_mut().enumerate() {
                        *a = ((2.0 * key.uniform(column as u32, 0) - 1.0) * bound) as f32;
                    }
                }
                for row in rows.clone() {
                    mask[row * rank..][ranks.clone()].fill(1.0);
                }
                adapted[rows.clone()].fill(1.0);
                let Some(files) = files else { continue };
                let update = files.update(&format!("{module}.weight"));
                let Some(ModuleUpdate::LowRank { a: stored_a, b: stored_b, magnitude, .. }) = update else {
                    return Err(format!("the adapter has no matrices for {module}"));
                };
                if let Some(magnitude) = magnitude {
                    if magnitude.len() != rows.len() {
                        let (own, wanted) = (magnitude.len(), rows.len());
                        return Err(format!(
                            "the adapter's magnitude for {module} has {own} elements instead of {wanted}"
                        ));
                    }
                    magnitudes[rows.clone()].copy_from_slice(magnitude);
                }
                if (stored_a.shape, stored_b.shape) != ([ranks.len(), d_input], [rows.len(), ranks.len()]) {
                    return Err(format!(
                        "the adapter's matrices for {module} are {:?} and {:?}",
                        stored_a.shape, stored_b.shape
                    ));
                }
                a[ranks.start * d_input..ranks.end * d_input].copy_from_slice(&stored_a.values);
                // One scale for all blocks: others are in the values.
                let factor = (own_scale / scale) as f32;
                for (row, values) in rows.clone().zip(stored_b.values.chunks_exact(ranks.len())) {
                    let out = &mut b[row * rank..][ranks.clone()];
                    out.iter_mut().zip(values).for_each(|(out, value)| *out = factor * value);
                }
            }
            let matrix =
                |values: Vec<f32>, shape: [usize; 2]| Tensor::from_data(TensorData::new(values, shape), &device);
            let parameter = |values, shape| Param::from_tensor(matrix(values, shape)).into();
            let whole = mask.iter().all(|on| *on == 1.0);
            let magnitude = config.dora.then(|| {
                let vector = |values: Vec<f32>| Tensor::<B, 1>::from_data(TensorData::new(values, [d_output]), &device);
                let base_squares = row_squares(&linear.base);
                let all = adapted.iter().all(|on| *on == 1.0);
                let rows = vector(adapted);
                let lengths = base_squares.clone().sqrt();
                let lengths = match files {
                    Some(_) => lengths.clone() * (-rows.clone() + 1.0) + vector(magnitudes),
                    None => lengths,
                };
                Magnitude { parameter: Param::from_tensor(lengths), base_squares, rows: (!all).then_some(rows) }
            });
            linear.adapter = Some(Adapter {
                blocks: (!whole).then(|| matrix(mask, [d_output, rank])),
                dropout_probability: config.dropout,
                magnitude,
                ..Adapter::new(parameter(a, [rank, d_input]), parameter(b, [d_output, rank]), scale)
            });
        }
        if used.is_empty() {
            return Err("the adapter is on no module of the model: see its targets".into());
        }
        if let Targets::Names(names) = &config.targets
            && let Some(unknown) = names.iter().find(|name| !used.iter().any(|module| ends_in(module, name)))
        {
            return Err(format!("the adapter's target {unknown} is no module of the model that takes an adapter"));
        }
        if let Some(unknown) =
            files.and_then(|files| files.modules().find(|module| !used.iter().any(|used| used == module)))
        {
            return Err(format!("the adapter is on {unknown}, which the model cannot train"));
        }
        let saved = self.saved_parameters(family, config)?;
        if let Some(files) = files {
            let all = files.saved_modules();
            // One parameter is both, and is saved under the name of one.
            let tied = |name: &str| self.config().tied_embeddings && Some(name) == family.head_name();
            let other = all.weights().find(|name| !saved.iter().any(|(own, _)| own == name) && !tied(name));
            if let Some(name) = other {
                let module = name.strip_suffix(".weight").unwrap_or(name);
                let module = module.rsplit('.').next().unwrap_or(module);
                return Err(format!(
                    "the adapter saves {name} whole, which its modules_to_save do not name: add {module} to them in \
                     adapter_config.json to train it, or begin from the merged model"
                ));
            }
            self = self.with_saved(files, &saved)?;
        }
        for (path, matrix) in self.matrices_mut() {
            let Some((name, _)) = saved.iter().find(|(_, saved)| *saved == path) else { continue };
            if matrix.is_quantized() {
                return Err(format!("{name} is quantized, and cannot be trained whole"));
            }
            matrix.make_f32();
        }
        let saved: Vec<String> = saved.into_iter().map(|(_, path)| path).collect();
        Ok(self.with_trained(|path| path.contains(".adapter.") || saved.iter().any(|saved| saved == path)))
    }

    /// Refuses targets that are experts.
    fn refuse_experts(&self, family: Family, config: &LoraConfig) -> Result<(), String> {
        if matches!(config.targets, Targets::AllLinear) {
            return Ok(());
        }
        let paths = parameter_shapes(self).into_iter().map(|(path, _)| path);
        let stacked: Vec<String> =
            paths.filter(|path| path.contains(".experts.") && !path.contains(".shared.")).collect();
        for HubTensor { name, .. } in family.tensors(self.config(), &stacked)? {
            let module = name.strip_suffix(".weight").unwrap_or(&name);
            if config.is_on(module)? {
                return Err(format!(
                    "the adapter's target {module} is part of a mixture of experts, which takes no adapter: name \
                     projections of attention, or take all linear layers, without experts"
                ));
            }
        }
        Ok(())
    }

    /// With the modules that an adapter saves whole, `(name, path)` each.
    fn with_saved(self, files: &LoraFiles, saved: &[(String, String)]) -> Result<Self, String> {
        struct Setter<'a> {
            values: HashMap<&'a str, (&'a [usize], &'a [f32])>,
            path: Vec<String>,
            wrong: Option<String>,
        }
        impl<B: Backend> ModuleMapper<B> for Setter<'_> {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
                let path = path_of(&self.path);
                let Some((shape, values)) = self.values.get(path.as_str()) else { return param };
                let own = param.lazy_shape().to_vec();
                if own != *shape {
                    self.wrong = Some(format!("the adapter has {path} of shape {shape:?}, and the model of {own:?}"));
                    return param;
                }
                let (device, id) = (param.lazy_device(), param.id);
                let values = Tensor::from_data(TensorData::new(values.to_vec(), own), &device);
                Param::initialized(id, values)
            }
            fn enter_module(&mut self, name: &str, container: &str) {
                self.path.push(segment(name, container));
            }
            fn exit_module(&mut self, _name: &str, _container: &str) {
                self.path.pop();
            }
        }
        let mut values = HashMap::new();
        for (name, path) in saved {
            match files.update(name) {
                Some(ModuleUpdate::Replaced { shape, values: own }) => {
                    values.insert(path.as_str(), (&shape[..], &own[..]))
                }
                _ => return Err(format!("the adapter does not have {name}, which is to be saved with it")),
            };
        }
        let mut setter = Setter { values, path: Vec::new(), wrong: None };
        let model = self.map(&mut setter);
        setter.wrong.map_or(Ok(model), Err)
    }

    /// The parameters that hold the modules to save, each with its name on the hub.
    fn saved_parameters(&self, family: Family, config: &LoraConfig) -> Result<Vec<(String, String)>, String> {
        let mut saved = Vec::new();
        let paths: Vec<String> = parameter_shapes(self)
            .into_iter()
            .map(|(path, _)| path)
            .filter(|path| !path.contains(".adapter."))
            .collect();
        let is = |weight: Option<&'static str>, name: &str| {
            weight.and_then(|weight| weight.strip_suffix(".weight")).is_some_and(|module| ends_in(module, name))
        };
        let saves_table = config.modules_to_save.iter().any(|name| is(family.embedding_name(), name));
        for name in &config.modules_to_save {
            // One parameter is both.
            if self.config().tied_embeddings && saves_table && is(family.head_name(), name) {
                continue;
            }
            let before = saved.len();
            for tensor in family.tensors(self.config(), &paths)? {
                let module = tensor.name.rsplit_once('.').map_or("", |(module, _)| module);
                if !ends_in(module, name) {
                    continue;
                }
                if tensor.offset != 0.0 {
                    return Err(format!(
                        "{} is stored less one: it cannot be trained whole with an adapter",
                        tensor.name
                    ));
                }
                if tensor.path.contains(".experts.") {
                    return Err(format!(
                        "{} is of a mixture of experts: it cannot be trained whole with an adapter",
                        tensor.name
                    ));
                }
                if tensor.rows.is_some() || tensor.transposed || tensor.stacked.is_some() {
                    return Err(format!(
                        "{} is a part of {}: it cannot be trained whole with an adapter",
                        tensor.name, tensor.path
                    ));
                }
                saved.push((tensor.name, tensor.path));
            }
            if saved.len() == before {
                return Err(format!("the model has no module {name} to save"));
            }
        }
        Ok(saved)
    }
}

/// The squared length of each row of a weight, f32.
fn row_squares<B: Backend>(matrix: &Matrix<B>) -> Tensor<B, 1> {
    let weight = matrix.weight().into_float(FloatDType::F32).detach().set_require_grad(false).cast(DType::F32);
    weight.powi_scalar(2).sum_dim(1).squeeze_dim::<1>(1)
}

impl<B: Backend> Transformer<Autodiff<B>> {
    /// Zeroes the gradients of adapters outside the modules that they are on.
    pub fn mask_adapter_gradients(&self, gradients: &mut <Autodiff<B> as AutodiffBackend>::Gradients) {
        fn mask<B: Backend, const D: usize>(
            parameter: &Param<Tensor<Autodiff<B>, D>>,
            mask: &Tensor<Autodiff<B>, D>,
            gradients: &mut <Autodiff<B> as AutodiffBackend>::Gradients,
        ) {
            let value = parameter.val();
            if let Some(gradient) = value.grad_remove(gradients) {
                value.grad_replace(gradients, gradient * mask.clone().inner());
            }
        }
        let linears = self.blocks.iter().flat_map(|block| block.linears());
        for adapter in linears.filter_map(|(_, linear)| linear.adapter.as_ref()) {
            if let Some(blocks) = &adapter.blocks {
                mask(&adapter.b.parameter, blocks, gradients);
            }
            if let Some(Magnitude { parameter, rows: Some(rows), .. }) = &adapter.magnitude {
                mask(parameter, rows, gradients);
            }
        }
    }
}

impl LoraFiles {
    /// The modules with two matrices.
    fn modules(&self) -> impl Iterator<Item = &str> {
        self.weights()
            .filter(|name| matches!(self.update(name), Some(ModuleUpdate::LowRank { .. })))
            .filter_map(|name| name.strip_suffix(".weight"))
    }
}

/// Writes the adapter on a model, as PEFT does.
pub struct AdapterSaver<'a> {
    /// Names the modules.
    pub family: Family,
    /// What the adapter is.
    pub config: &'a LoraConfig,
}

impl AdapterSaver<'_> {
    /// Writes `adapter_config.json` and `adapter_model.safetensors` into `folder`, which must
    /// exist.
    ///
    /// # Errors
    /// If the file system refuses, or the model has no adapter.
    pub fn save<B: Backend>(&self, model: &Transformer<B>, folder: &Path) -> Result<(), WeightsError> {
        let wrong = |reason: String| WeightsError::Weights { path: folder.join(WEIGHTS), reason };
        let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
        for (layer, block) in model.blocks.iter().enumerate() {
            for (path, linear) in block.linears() {
                let Linear { base, adapter: Some(adapter) } = linear else { continue };
                let path = format!("blocks.{layer}.{path}");
                let [d_output, d_input] = base.dims()[..] else { continue };
                let values = |matrix: Tensor<B, 2>| -> Vec<f32> { matrix.into_data().iter::<f32>().collect() };
                let (a, b) = (values(adapter.a.val()), values(adapter.b.val()));
                let magnitude = adapter
                    .magnitude
                    .as_ref()
                    .map(|magnitude| magnitude.parameter.val().into_data().iter::<f32>().collect::<Vec<f32>>());
                let rank = a.len() / d_input;
                let blocks = blocks(self.family, model.config(), self.config, &path, d_output).map_err(wrong)?;
                for Block { module, rows, ranks, scale } in blocks {
                    let factor = (adapter.scale / scale) as f32;
                    let own_a = a[ranks.start * d_input..ranks.end * d_input].to_vec();
                    let own_b = rows.clone().flat_map(|row| b[row * rank..][ranks.clone()].iter().map(|b| b * factor));
                    let name = |kind: &str| format!("{PREFIX}{module}.{kind}.weight");
                    if let Some(magnitude) = &magnitude {
                        let own = magnitude[rows.clone()].to_vec();
                        tensors.insert(format!("{PREFIX}{module}.lora_magnitude_vector"), (vec![rows.len()], own));
                    }
                    tensors.insert(name("lora_B"), (vec![rows.len(), ranks.len()], own_b.collect()));
                    tensors.insert(name("lora_A"), (vec![ranks.len(), d_input], own_a));
                }
            }
        }
        if tensors.is_empty() {
            return Err(wrong("the model has no adapter".into()));
        }
        let mut config = self.config.clone();
        let saved: HashMap<String, String> = model
            .saved_parameters(self.family, self.config)
            .map_err(wrong)?
            .into_iter()
            .map(|(name, path)| (path, name))
            .collect();
        for (path, _, shape, value) in named_parameters(model) {
            if let Some(name) = saved.get(&path) {
                // For PEFT these are two modules.
                if let (true, "embedding", Some(head)) =
                    (model.config().tied_embeddings, path.as_str(), self.family.head_name())
                {
                    let values = value.clone().into_data().iter::<f32>().collect();
                    tensors.insert(format!("{PREFIX}{head}"), (shape.clone(), values));
                    config.modules_to_save.extend(
                        head.strip_suffix(".weight")
                            .filter(|head| !config.modules_to_save.iter().any(|name| name == head))
                            .map(str::to_string),
                    );
                }
                tensors.insert(format!("{PREFIX}{name}"), (shape, value.into_data().iter::<f32>().collect()));
            }
        }
        let json = serde_json::to_string_pretty(&config.to_json(self.family == Family::Gpt2)).unwrap_or_default();
        write_synced(&folder.join(CONFIG), |path| fs::write(path, json))?;
        let bytes: BTreeMap<String, (Vec<usize>, Vec<u8>)> = (tensors.into_iter())
            .map(|(name, (shape, values))| {
                (name, (shape, values.iter().flat_map(|value| value.to_le_bytes()).collect()))
            })
            .collect();
        let views = bytes.iter().map(|(name, (shape, bytes))| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(|error| wrong(error.to_string()))?;
            Ok((name.as_str(), view))
        });
        let views = views.collect::<Result<Vec<_>, WeightsError>>()?;
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        write_synced(&folder.join(WEIGHTS), |path| {
            safetensors::serialize_to_file(views, Some(metadata), path)
                .map_err(|error| std::io::Error::other(error.to_string()))
        })
    }
}
