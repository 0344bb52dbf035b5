//! Fill-in-the-middle prompts for requests with a suffix (Bavarian et al., 2022).

use fireclay_datasets::Tokenizer;

use super::error::ApiError;
use super::tokens::Spelling;
use crate::server::served::ServedGenerator;

/// The tokens before prefix, suffix and middle, as model families name them.
const MARKS: [[&str; 3]; 4] = [
    // Qwen, later Granite models.
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    // StarCoder, Gemma, Granite.
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    // DeepSeek.
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
];

/// The marks of a tokenizer, if it has them.
pub(super) fn marks(tokenizer: &Tokenizer) -> Option<[u32; 3]> {
    let ids = |names: &[&str; 3]| {
        let [prefix, suffix, middle] = names.map(|name| tokenizer.token_id(name));
        Some([prefix?, suffix?, middle?])
    };
    MARKS.iter().find_map(ids)
}

/// The tokens of a prompt and of the text after the gap.
pub(super) fn tokens(
    served: &ServedGenerator,
    spelling: Spelling,
    prompt: &str,
    suffix: &str,
) -> Result<Vec<u32>, ApiError> {
    let Some([before, behind, middle]) = marks(&served.tokenizer) else {
        let message = "suffix is for fill-in-the-middle models, but this model's tokenizer has no tokens for it";
        return Err(ApiError::param("suffix", message));
    };
    let (spelling, begins) = spelling.of_part();
    let mut tokens: Vec<u32> = served.begins.filter(|_| begins).into_iter().collect();
    tokens.push(before);
    tokens.extend(spelling.tokens(served, "prompt", prompt)?);
    tokens.push(behind);
    tokens.extend(spelling.tokens(served, "suffix", suffix)?);
    tokens.push(middle);
    Ok(tokens)
}
