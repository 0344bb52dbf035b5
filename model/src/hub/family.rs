//! Model families, by the hub's names.

/// A family of models as the hub names it, `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `gpt2`.
    Gpt2,
    /// `llama`, 1 to 3.
    Llama,
    /// `mistral`.
    Mistral,
    /// `qwen2`.
    Qwen2,
    /// `qwen3`.
    Qwen3,
    /// `gemma2`.
    Gemma2,
    /// `gemma3_text`.
    Gemma3,
    /// `olmo2`.
    Olmo2,
    /// `olmo3`.
    Olmo3,
    /// `smollm3`.
    SmolLm3,
    /// `phi3`, also Phi-4-mini.
    Phi3,
    /// `granite`.
    Granite,
    /// `bert`.
    Bert,
    /// `modernbert`.
    ModernBert,
    /// Any other config, written under this project's own names.
    Fireclay,
}

pub(super) const FAMILIES: [(Family, &str, &str); 15] = [
    (Family::Gpt2, "gpt2", "GPT2LMHeadModel"),
    (Family::Llama, "llama", "LlamaForCausalLM"),
    (Family::Mistral, "mistral", "MistralForCausalLM"),
    (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
    (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
    (Family::Gemma2, "gemma2", "Gemma2ForCausalLM"),
    (Family::Gemma3, "gemma3_text", "Gemma3ForCausalLM"),
    (Family::Olmo2, "olmo2", "Olmo2ForCausalLM"),
    (Family::Olmo3, "olmo3", "Olmo3ForCausalLM"),
    (Family::SmolLm3, "smollm3", "SmolLM3ForCausalLM"),
    (Family::Phi3, "phi3", "Phi3ForCausalLM"),
    (Family::Granite, "granite", "GraniteForCausalLM"),
    (Family::Bert, "bert", "BertModel"),
    (Family::ModernBert, "modernbert", "ModernBertModel"),
    (Family::Fireclay, "fireclay", "Transformer"),
];

impl Family {
    /// Its `model_type` on the hub.
    pub fn model_type(self) -> &'static str {
        FAMILIES.iter().find(|(family, ..)| *family == self).map_or("fireclay", |(_, name, _)| name)
    }

    /// Whether it is Llama or a descendant, with the same names of tensors but for a few.
    pub(super) fn is_llama(self) -> bool {
        !matches!(self, Self::Gpt2 | Self::Bert | Self::ModernBert | Self::Fireclay)
    }

    /// Its class in `transformers`.
    pub(super) fn architecture(self) -> &'static str {
        FAMILIES.iter().find(|(family, ..)| *family == self).map_or("", |(.., name)| name)
    }
}
