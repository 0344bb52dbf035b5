//! Known keys of `config.json`: those that are used, and those that do not change the model.

use serde_json::Value;

use super::family::Family;

/// Keys of every family: used elsewhere, or without effect on inference.
const SHARED: &[&str] = &[
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "fireclay",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "pruned_heads",
    "quantization_config",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tie_word_embeddings",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
    "vocab_size",
];

const GPT2: &[&str] = &[
    "activation_function",
    "add_cross_attention",
    "attn_pdrop",
    "embd_pdrop",
    "hidden_size",
    "layer_norm_epsilon",
    "max_position_embeddings",
    "n_ctx",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "n_positions",
    "num_attention_heads",
    "num_hidden_layers",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
];

const BERT: &[&str] = &[
    "add_cross_attention",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "directionality",
    "hidden_act",
    "hidden_dropout_prob",
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "position_embedding_type",
    "type_vocab_size",
];

const MODERNBERT: &[&str] = &[
    "attention_bias",
    "attention_dropout",
    "classifier_activation",
    "classifier_bias",
    "classifier_dropout",
    "classifier_pooling",
    "cls_token_id",
    "decoder_bias",
    "deterministic_flash_attn",
    "embedding_dropout",
    "global_attn_every_n_layers",
    "global_rope_theta",
    "hidden_activation",
    "hidden_size",
    "initializer_cutoff_factor",
    "intermediate_size",
    "layer_norm_eps",
    "layer_types",
    "local_attention",
    "local_rope_theta",
    "max_position_embeddings",
    "mlp_bias",
    "mlp_dropout",
    "norm_bias",
    "norm_eps",
    "num_attention_heads",
    "num_hidden_layers",
    "position_embedding_type",
    "reference_compile",
    "repad_logits_with_grad",
    "rope_parameters",
    "sparse_pred_ignore_index",
    "sparse_prediction",
];

/// Keys of Llama and its descendants. A family ignores keys of features that it lacks, as in
/// transformers.
const LLAMA: &[&str] = &[
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "pretraining_tp",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_mrope",
    "use_sliding_window",
];

/// Keys that descendants of Llama add.
fn own_keys(family: Family) -> &'static [&'static str] {
    match family {
        Family::Gemma2 => &[
            "attn_logit_softcapping",
            "cache_implementation",
            "final_logit_softcapping",
            "hidden_activation",
            "query_pre_attn_scalar",
            "use_bidirectional_attention",
        ],
        Family::Gemma3 => &[
            "attn_logit_softcapping",
            "cache_implementation",
            "final_logit_softcapping",
            "hidden_activation",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window_pattern",
            "use_bidirectional_attention",
        ],
        Family::Mixtral => &[
            "num_experts_per_tok",
            "num_local_experts",
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
        ],
        Family::Qwen3Moe => &[
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "output_router_logits",
            "router_aux_loss_coef",
        ],
        Family::Olmoe => &[
            "clip_qkv",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "output_router_logits",
            "router_aux_loss_coef",
        ],
        Family::GptOss => &[
            "experts_per_token",
            "initial_context_length",
            "num_experts_per_tok",
            "num_local_experts",
            "output_router_logits",
            "router_aux_loss_coef",
            "swiglu_alpha",
            "swiglu_limit",
        ],
        Family::SmolLm3 => &["no_rope_layer_interval", "no_rope_layers"],
        Family::Phi3 => &["embd_pdrop", "resid_pdrop"],
        Family::Granite => &["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"],
        _ => &[],
    }
}

/// Keys of `rope_scaling` and `rope_parameters`.
const ROTARY: &[&str] = &[
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "full_attention",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "sliding_attention",
    "truncate",
    "type",
];

/// The unknown keys of a `config.json`, those of rotary scaling as `rope_scaling.KEY`. Keys that
/// begin with an underscore belong to tools.
pub(crate) fn unknown(family: Family, config: &Value) -> Vec<String> {
    let own = match family {
        Family::Gpt2 => GPT2,
        Family::Bert => BERT,
        Family::ModernBert => MODERNBERT,
        Family::Fireclay => return Vec::new(),
        _ => LLAMA,
    };
    let keys = config.as_object().into_iter().flat_map(|fields| fields.keys());
    let known = |key: &&String| {
        key.starts_with('_') || [SHARED, own, own_keys(family)].iter().any(|keys| keys.contains(&key.as_str()))
    };
    let outer = keys.filter(|key| !known(key)).cloned();
    let rotary = ["rope_scaling", "rope_parameters"].into_iter().flat_map(|name| {
        let kinds = ["full_attention", "sliding_attention"].map(|kind| (format!("{name}.{kind}"), &config[name][kind]));
        std::iter::once((name.to_string(), &config[name])).chain(kinds).flat_map(|(name, parameters)| {
            let keys = parameters.as_object().into_iter().flat_map(|fields| fields.keys());
            keys.filter(|key| !ROTARY.contains(&key.as_str())).map(move |key| format!("{name}.{key}"))
        })
    });
    outer.chain(rotary).collect()
}
