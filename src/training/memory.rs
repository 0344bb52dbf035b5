//! How much memory a run needs, estimated before its first step.

use std::sync::{Mutex, PoisonError};

use burn::backend::Autodiff;
use fireclay_kernels::Backend;
use fireclay_kernels::notices::{Level, notice};
use fireclay_model::{LayerConfig, Transformer, trained_parameters};

use crate::failure::Failure;
use crate::recipe::schema::Recipe;
use crate::recipe::tuning::{AdapterKind, BaseKind};

/// What helps the run of this process, should the device run out of memory.
static ADVICE: Mutex<Option<String>> = Mutex::new(None);

/// One line for a failure of the device, if it ran out of memory: which settings help, and by how
/// much.
pub fn out_of_memory(reason: &str) -> Option<String> {
    let reason = reason.to_lowercase();
    let is_it = ["out of memory", "out_of_memory", "outofmemory", "buffertoobig", "can't allocate"];
    if !is_it.iter().any(|words| reason.contains(words)) {
        return None;
    }
    let advice = ADVICE.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Some(advice.map_or("the device is out of memory".into(), |advice| format!("the device is out of memory: {advice}")))
}

/// Bytes of f32 logits that a loss computes at a time, at most, with their gradients.
const LOGITS: f64 = 2.0 * 256e6;

/// Bytes that a training step needs, by what for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MemoryEstimate {
    /// Parameters, copies of them, and quantized weights.
    weights: f64,
    /// Gradients and the optimizer's state of what is trained, and what of a reference model is not
    /// shared.
    trained: f64,
    /// What the backward pass needs of the forward pass.
    activations: f64,
    /// Logits of a chunk.
    logits: f64,
    /// What other settings would save.
    savings: Vec<(String, f64)>,
}

impl MemoryEstimate {
    /// For training `model` as `recipe` says, on one of `ranks` devices.
    pub(crate) fn of<B: Backend>(
        model: &Transformer<Autodiff<B>>,
        recipe: &Recipe,
        has_reference: bool,
        ranks: usize,
    ) -> Self {
        let (config, training) = (model.config(), &recipe.training);
        let of_blocks = model.clone().matrix_bytes(|path| path.starts_with("blocks.") && !path.contains(".adapter."));
        let weights = model.clone().matrix_bytes(|_| true) as f64;
        let trained: usize =
            trained_parameters(model).iter().map(|(_, _, shape, _)| shape.iter().product::<usize>()).sum();
        // A gradient and two moments of f32, and the reference's own value once the model's has
        // changed.
        let each = if has_reference && training.adapter == AdapterKind::None { 16.0 } else { 12.0 };
        let trained = trained as f64 * each;

        let bytes = burn::tensor::DType::from(model.activations()).size() as f64;
        let adapted = training.adapter == AdapterKind::Lora;
        let (d_model, qkv) = (config.d_model as f64, config.qkv_width() as f64);
        let heads = (config.n_heads * config.head_dim) as f64;
        // The residual stream and its norm, twice; packed heads, also before their norms; attention's
        // output; the feed-forward layer before and after its activation, in one operation unless
        // adapters run apart from their weights.
        let placed = if config.qk_norm { 2.0 } else { 1.0 };
        let apart = adapted && (recipe.lora.lora_dropout > 0.0 || recipe.lora.dora);
        let of_layer = |layer: &LayerConfig| {
            let gate = if layer.activation.gated { 2.0 } else { 1.0 };
            let dense = |d_ff: usize, apart: bool| (gate + if apart { 2.0 } else { 1.0 }) * d_ff as f64;
            match layer.experts {
                None => dense(layer.d_ff, apart),
                // What the activations of a token's experts get, besides the input of all.
                Some(own) => {
                    let of_experts = own.experts_per_token as f64 * gate * layer.d_ff as f64;
                    d_model + of_experts + dense(own.shared_d_ff, apart)
                }
            }
        };
        let feed_forward = config.layers().map(|layer| of_layer(&layer)).sum::<f64>() / config.n_layers as f64;
        let block = bytes * (4.0 * d_model + placed * qkv + heads + feed_forward);
        let layers = config.n_layers as f64;
        let rows = training.batch_size.div_ceil(ranks.max(1)) as f64;
        let tokens = rows * training.seq_length as f64;
        let stored = |every: usize| match every {
            0 => layers * block,
            every => (layers / every as f64).ceil() * bytes * d_model + every as f64 * block,
        };
        let activations = tokens * stored(training.checkpoint_activations);
        let logits = (tokens * config.vocab_size as f64 * 8.0).min(LOGITS);

        let mut savings = Vec::new();
        if training.checkpoint_activations != 1 && config.n_layers > 1 {
            savings.push(("checkpoint_activations=1".to_string(), activations - tokens * stored(1)));
        }
        if rows > 1.0 {
            let (half, parts) = (training.batch_size.div_ceil(2), 2 * training.accumulation);
            savings.push((format!("batch_size={half} and accumulation={parts}"), activations / 2.0));
        }
        if training.seq_length > 1 {
            savings.push((format!("seq_length={}", training.seq_length.div_ceil(2)), activations / 2.0));
        }
        if !adapted && recipe.task.takes_adapter() {
            savings.push(("adapter=lora".into(), trained * 0.95));
        } else if adapted && matches!(recipe.lora.base, BaseKind::Auto | BaseKind::Float) {
            // 4 bits and a scale of 32 bits per 64.
            let of_nf4 = of_blocks as f64 / bytes * 4.5 / 8.0;
            savings.push(("base=nf4".into(), of_blocks as f64 - of_nf4));
        }
        savings.retain(|(_, bytes)| *bytes > 0.0);
        savings.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        Self { weights, trained, activations, logits, savings }
    }

    /// All of it.
    pub(crate) fn total(&self) -> f64 {
        self.weights + self.trained + self.activations + self.logits
    }

    /// Refuses a step that would take more than `limit` bytes.
    ///
    /// # Errors
    /// If it would, with the settings that help.
    pub(crate) fn refuse_above(&self, limit: Option<u64>) -> Result<(), Failure> {
        match limit {
            Some(limit) if self.total() > limit as f64 => {
                let (limit, needs, advice) = (size(limit as f64), self.describe(), self.advice());
                Err(Failure::new(format!("training.memory_limit is {limit}, and a step needs {needs}: {advice}")))
            }
            _ => Ok(()),
        }
    }

    /// In words.
    pub(crate) fn describe(&self) -> String {
        let Self { weights, trained, activations, logits, .. } = self;
        format!(
            "about {} of memory: weights {}, gradients and optimizer {}, activations {}, logits {}",
            size(self.total()),
            size(*weights),
            size(*trained),
            size(*activations),
            size(*logits)
        )
    }

    /// Which setting helps, and by how much, the most first.
    pub(crate) fn advice(&self) -> String {
        let each: Vec<String> = self
            .savings
            .iter()
            .take(3)
            .map(|(setting, bytes)| format!("{setting} saves about {}", size(*bytes)))
            .collect();
        match each.is_empty() {
            true => "take a smaller model".into(),
            false => format!("--set {}", each.join("; --set ")),
        }
    }

    /// Says what a run needs, and warns if that is more than the device has. Should the device run
    /// out of memory, the program says then which settings help.
    pub(crate) fn announce(&self, available: Option<u64>) {
        let has = available.map_or_else(String::new, |bytes| format!("; the device has {}", size(bytes as f64)));
        notice(Level::Info, &format!("{}{has}", self.describe()));
        if available.is_some_and(|available| self.total() > available as f64) {
            notice(Level::Warning, &format!("this may not fit into memory: {}", self.advice()));
        }
        *ADVICE.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.advice());
    }
}

/// A failure of a step that took `peak` bytes, if that is more than `limit`.
pub(crate) fn above_limit(peak: Option<u64>, limit: Option<u64>, step: u64) -> Result<(), Failure> {
    let Some((peak, limit)) = peak.zip(limit).filter(|(peak, limit)| peak > limit) else { return Ok(()) };
    let (peak, limit) = (size(peak as f64), size(limit as f64));
    let advice = ADVICE.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default();
    Err(Failure::new(format!(
        "step {} took {peak} of memory, above training.memory_limit of {limit}: {advice}",
        step + 1
    )))
}

fn size(bytes: f64) -> String {
    match bytes {
        bytes if bytes >= 1e9 => format!("{:.1} GB", bytes / 1e9),
        bytes => format!("{:.0} MB", bytes / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::NdArray;
    use fireclay_model::{Family, LoraConfig, TransformerConfig};

    use super::*;

    fn estimate(settings: &[(&str, &str)], lora: bool) -> MemoryEstimate {
        let recipe = Recipe::shipped(if lora { "chat-lora" } else { "chat-full" }).expect("a good recipe");
        let recipe = recipe.with_all(settings.iter().copied()).expect("known settings");
        let model = TransformerConfig::llama(100, 64, 128, 4, 4).init::<Autodiff<NdArray>>(1, &Default::default());
        let model = model.expect("a config that holds together");
        let model = match lora {
            true => model.with_lora(Family::Llama, &LoraConfig::default(), None, 1).expect("an adapter"),
            false => model,
        };
        MemoryEstimate::of(&model, &recipe, false, 1)
    }

    fn plain_advice_is_told() {
        estimate(&[("batch_size", "4")], true).announce(None);
        let told = out_of_memory("DriverError(CUDA_ERROR_OUT_OF_MEMORY)").expect("that is it");
        assert!(told.starts_with("the device is out of memory: --set ") && told.contains("saves about"), "{told}");
    }

    #[test]
    fn what_helps_saves_what_is_said() {
        let shape = [("batch_size", "4"), ("seq_length", "64")];
        for lora in [true, false] {
            let plain = estimate(&shape, lora);
            let saved = |setting: &str| {
                let found = plain.savings.iter().find(|(name, _)| name == setting);
                found.unwrap_or_else(|| panic!("{setting} in {:?}", plain.savings)).1
            };
            let close = |a: f64, b: f64| (a - b).abs() < 1e-6 * a.max(b);
            let checkpointed = estimate(&[&shape[..], &[("checkpoint_activations", "1")]].concat(), lora);
            assert!(close(plain.activations - checkpointed.activations, saved("checkpoint_activations=1")));
            let halved = estimate(&[("batch_size", "2"), ("accumulation", "2"), ("seq_length", "64")], lora);
            assert!(close(plain.activations - halved.activations, saved("batch_size=2 and accumulation=2")));
            assert!(plain.advice().contains("saves about") && plain.describe().contains("activations"));
            assert!(plain.total() > plain.activations + plain.weights);
        }
        assert_eq!(out_of_memory("the file is missing"), None);
        plain_advice_is_told();
        // An adapter has few gradients and moments.
        let (lora, full) = (estimate(&shape, true), estimate(&shape, false));
        assert!(lora.trained < full.trained / 2.0 && lora.savings.iter().any(|(name, _)| name == "base=nf4"));
        let refused = |limit| full.refuse_above(limit).map_err(|failure| failure.to_string());
        assert_eq!([refused(None), refused(Some(full.total() as u64 + 1))], [Ok(()), Ok(())]);
        let told = refused(Some(full.total() as u64 - 1)).expect_err("a byte is missing");
        assert!(told.starts_with("training.memory_limit is ") && told.contains(&full.advice()), "{told}");
        assert_eq!(above_limit(Some(5), Some(5), 0).map_err(|failure| failure.to_string()), Ok(()));
        let told = above_limit(Some(25_100_000_000), Some(24_000_000_000), 2).expect_err("it took more").to_string();
        assert!(told.starts_with("step 3 took 25.1 GB of memory, above training.memory_limit of 24.0 GB: "), "{told}");
        assert_eq!(size(2.34e9), "2.3 GB");
        assert_eq!(size(234e6), "234 MB");
    }
}
