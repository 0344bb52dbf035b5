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
    /// `bert`.
    Bert,
    /// Any other config, written under this project's own names.
    Fireclay,
}

pub(super) const FAMILIES: [(Family, &str, &str); 7] = [
    (Family::Gpt2, "gpt2", "GPT2LMHeadModel"),
    (Family::Llama, "llama", "LlamaForCausalLM"),
    (Family::Mistral, "mistral", "MistralForCausalLM"),
    (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
    (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
    (Family::Bert, "bert", "BertModel"),
    (Family::Fireclay, "fireclay", "Transformer"),
];

impl Family {
    /// Its `model_type` on the hub.
    pub fn model_type(self) -> &'static str {
        FAMILIES.iter().find(|(family, ..)| *family == self).map_or("fireclay", |(_, name, _)| name)
    }

    /// Its class in `transformers`.
    pub(super) fn architecture(self) -> &'static str {
        FAMILIES.iter().find(|(family, ..)| *family == self).map_or("", |(.., name)| name)
    }
}
