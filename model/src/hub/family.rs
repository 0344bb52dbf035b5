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
    /// `mixtral`.
    Mixtral,
    /// `qwen2`.
    Qwen2,
    /// `qwen3`.
    Qwen3,
    /// `qwen3_moe`.
    Qwen3Moe,
    /// `gemma2`.
    Gemma2,
    /// `gemma3_text`.
    Gemma3,
    /// `olmo2`.
    Olmo2,
    /// `olmo3`.
    Olmo3,
    /// `olmoe`.
    Olmoe,
    /// `gpt_oss`.
    GptOss,
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

pub(super) const FAMILIES: [(Family, &str, &str); 19] = [
    (Family::Gpt2, "gpt2", "GPT2LMHeadModel"),
    (Family::Llama, "llama", "LlamaForCausalLM"),
    (Family::Mistral, "mistral", "MistralForCausalLM"),
    (Family::Mixtral, "mixtral", "MixtralForCausalLM"),
    (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
    (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
    (Family::Qwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"),
    (Family::Gemma2, "gemma2", "Gemma2ForCausalLM"),
    (Family::Gemma3, "gemma3_text", "Gemma3ForCausalLM"),
    (Family::Olmo2, "olmo2", "Olmo2ForCausalLM"),
    (Family::Olmo3, "olmo3", "Olmo3ForCausalLM"),
    (Family::Olmoe, "olmoe", "OlmoeForCausalLM"),
    (Family::GptOss, "gpt_oss", "GptOssForCausalLM"),
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

    /// Whether its models are mixtures of experts.
    pub(super) fn has_experts(self) -> bool {
        matches!(self, Self::Mixtral | Self::Qwen3Moe | Self::Olmoe | Self::GptOss)
    }

    /// Its class in `transformers`.
    pub(super) fn architecture(self) -> &'static str {
        FAMILIES.iter().find(|(family, ..)| *family == self).map_or("", |(.., name)| name)
    }
}
