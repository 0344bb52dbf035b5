//! Settings that would change nothing: they are refused by name, since whoever sets one expects an
//! effect.

use super::schedule::ScheduleKind;
use super::schema::Recipe;
use super::task::TaskName::{Chat, Classify, IntentSlot, Language, Masked, Preference};
use super::tuning::AdapterKind;
use crate::failure::Failure;

impl Recipe {
    /// Refuses the first of some keys, `(section, key)`, that has no effect on this recipe.
    pub(super) fn check_effects<'a>(&self, keys: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<(), Failure> {
        for (section, key) in keys {
            if let Some(needed) = self.needed_for(section, key) {
                return Err(Failure::usage(format!("{section}.{key} has no effect: it needs {needed}")));
            }
        }
        Ok(())
    }

    /// What a key would need to have an effect, if the recipe lacks that.
    fn needed_for(&self, section: &str, key: &str) -> Option<&'static str> {
        let training = &self.training;
        let (has, needed) = match (section, key) {
            ("lora", _) if training.adapter == AdapterKind::None => (false, "training.adapter=lora"),
            ("lora", key) => (
                self.init_adapter.is_none() || ["lora_dropout", "base"].contains(&key),
                "a new adapter, and this run continues one, which has its own settings",
            ),
            ("preference", _) => (self.task == Preference, "preference pairs (task preference)"),
            ("data", "packing" | "chat_template") => {
                (matches!(self.task, Chat | Preference), "conversations (task chat or preference)")
            }
            ("data", "tokenizer") if self.task == Classify => {
                (self.init.is_none(), "a new model: a pretrained one (--init) has its own tokenizer")
            }
            ("data", "tokenizer") => (
                matches!(self.task, Language | Masked | IntentSlot),
                "text or utterances: conversations are tokenized by the tokenizer of the model",
            ),
            ("data", "bpe_size") => (self.data.tokenizer == "bpe", "data.tokenizer=bpe"),
            ("data", "documents_apart") => (self.task == Language, "text (task language)"),
            ("data", "field") => {
                (matches!(self.task, Language | Masked | Classify), "text (task language, masked or classify)")
            }
            ("data", "label_field") | ("model", "classifier") if self.task != Classify => {
                (false, "labelled examples (task classify)")
            }
            ("data", "corpora" | "holdout_by" | "resize_embedding") => {
                (matches!(self.task, Language | Masked), "text (task language or masked)")
            }
            ("model", "choice_bias") if self.init.is_none() => {
                (false, "an update by the experts' loads, which training does not have")
            }
            ("training", "balance_loss" | "router_z_loss") => (
                self.init.is_some() || self.has_experts(),
                "a mixture of experts (model.experts and model.experts_per_token)",
            ),
            ("data", "pieces") if self.task == Classify => (
                self.init.is_none() && self.data.tokenizer == "pieces",
                "a tokenizer that is trained (a new model, and data.tokenizer=pieces)",
            ),
            ("training", "valid_tokens" | "final_valid_tokens") => {
                (self.task != Classify, "another task: classify validates on all held-out examples")
            }
            ("training", "masked") => (self.task == Masked, "hidden tokens (task masked)"),
            ("training", "sample_tokens" | "sample_prompt") => (self.task == Language, "text (task language)"),
            ("data", "word_types") => {
                (self.task == IntentSlot && self.init.is_none(), "utterances (task intent-slot) and a new model")
            }
            ("data", "pieces" | "joint_decoding")
            | ("training", "intent_weight" | "split_words" | "swap_values" | "hide_values" | "hide_words") => {
                (self.task == IntentSlot, "utterances (task intent-slot)")
            }
            ("training", "splice_values") => (
                self.task == IntentSlot && training.swap_values > 0.0,
                "utterances (task intent-slot) and training.swap_values above 0",
            ),
            ("training", "decay_steps") => (training.schedule == ScheduleKind::Wsd, "training.schedule=wsd"),
            ("training", "min_learning_rate") => {
                (training.schedule != ScheduleKind::Constant, "a schedule that decays, and not constant")
            }
            ("model", key) if key != "dropout" => {
                (self.init.is_none(), "a new model: the shape of a pretrained one (--init) is its own")
            }
            _ => return None,
        };
        (!has).then_some(needed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_without_effect_are_refused_by_name() {
        let refused = |recipe: &str, settings: &[(&str, &str)]| {
            let recipe = Recipe::shipped(recipe).expect("a good recipe");
            recipe.with_all(settings.iter().copied()).expect_err("no effect").to_string()
        };
        for (recipe, settings, wanted) in [
            ("chat-full", &[("rank", "8")][..], "lora.rank has no effect: it needs training.adapter=lora"),
            ("chat-lora", &[("adapter", "none"), ("base", "nf4")], "lora.base"),
            ("stories", &[("packing", "false")], "data.packing has no effect: it needs conversations"),
            ("llama-15m", &[("chat_template", "x.jinja")], "data.chat_template"),
            ("chat-lora", &[("tokenizer", "char")], "data.tokenizer"),
            ("chat-lora", &[("sample_tokens", "8")], "training.sample_tokens"),
            ("chat-lora", &[("beta", "0.2")], "preference.beta has no effect: it needs preference pairs"),
            (
                "stories",
                &[("balance_loss", "0.1")],
                "training.balance_loss has no effect: it needs a mixture of experts",
            ),
            ("stories", &[("intent_weight", "0.5")], "training.intent_weight"),
            ("stories", &[("bpe_size", "300")], "data.bpe_size has no effect: it needs data.tokenizer=bpe"),
            ("stories", &[("decay_steps", "3")], "training.decay_steps"),
            ("stories", &[("schedule", "constant"), ("min_learning_rate", "0")], "training.min_learning_rate"),
            ("home", &[("field", "story")], "data.field"),
            ("stories", &[("training.masked", "0.2")], "training.masked has no effect: it needs hidden tokens"),
            ("masked", &[("documents_apart", "true")], "data.documents_apart"),
            ("chat-full", &[("init", "model"), ("d_model", "8")], "model.d_model"),
            ("masked", &[("label_field", "stars")], "data.label_field has no effect: it needs labelled examples"),
            ("masked", &[("classifier", "{ pooling = 'mean' }")], "model.classifier"),
            ("classify", &[("init", "model"), ("classifier", "{ pooling = 'mean' }")], "model.classifier"),
            ("classify", &[("init", "model"), ("tokenizer", "pieces")], "data.tokenizer"),
            ("classify", &[("tokenizer", "t.json"), ("pieces", "300")], "data.pieces"),
            ("classify-tune", &[("holdout_by", "document")], "data.holdout_by"),
            ("classify", &[("sample_tokens", "8")], "training.sample_tokens"),
            ("classify", &[("intent_weight", "0.5")], "training.intent_weight"),
            ("classify", &[("valid_tokens", "100")], "training.valid_tokens has no effect: it needs another task"),
            (
                "stories",
                &[("experts", "4"), ("experts_per_token", "2"), ("choice_bias", "true")],
                "model.choice_bias has no effect",
            ),
            ("stories", &[("word_types", "true")], "data.word_types has no effect: it needs utterances"),
            ("intent-slot", &[("init", "model"), ("word_types", "true")], "a new model"),
            ("intent-slot", &[("swap_values", "0"), ("splice_values", "0.5")], "training.swap_values above 0"),
            ("stories", &[("joint_decoding", "true")], "data.joint_decoding has no effect: it needs utterances"),
        ] {
            let message = refused(recipe, settings);
            assert!(message.contains(wanted), "{settings:?}: {message}");
        }
        let text = "name = 'x'\ntask = 'chat'\n[lora]\nrank = 4";
        let message = Recipe::parse(text, "r.toml").expect_err("no effect").to_string();
        assert!(message.contains("r.toml: lora.rank has no effect"), "{message}");
        let text = text.replace("[lora]", "[training]\nadapter = 'lora'\n[lora]");
        Recipe::parse(&text, "r.toml").expect("an adapter has a rank");
    }

    #[test]
    fn settings_with_an_effect_are_taken() {
        for (recipe, settings) in [
            ("chat-full", &[("adapter", "lora"), ("rank", "8"), ("packing", "false")][..]),
            ("stories", &[("tokenizer", "bpe"), ("bpe_size", "300"), ("sample_tokens", "0")]),
            ("stories", &[("schedule", "wsd"), ("decay_steps", "3"), ("min_learning_rate", "0")]),
            ("home", &[("intent_weight", "0.5"), ("pieces", "300"), ("tokenizer", "pieces")]),
            ("masked", &[("training.masked", "0.2"), ("field", "story"), ("tokenizer", "char")]),
            ("dpo", &[("beta", "0.2"), ("loss", "ipo"), ("rank", "4"), ("packing", "false")]),
            ("chat-full", &[("init", "model"), ("dropout", "0.1")]),
            ("classify", &[("field", "a"), ("label_field", "b"), ("pieces", "90"), ("classifier", "{ bias = true }")]),
            ("classify-tune", &[("init", "model"), ("label_smoothing", "0.1"), ("holdout", "0.2")]),
        ] {
            let recipe = Recipe::shipped(recipe).expect("a good recipe");
            recipe.with_all(settings.iter().copied()).expect("effects");
        }
    }
}
