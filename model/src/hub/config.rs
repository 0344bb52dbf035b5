//! Reads and writes `config.json`, by model family.

use fireclay_kernels::{ActivationKind, NormKind};
use serde_json::{Map, Value, json};

use super::family::{FAMILIES, Family};
use super::fields::{Fields, activation_name, write_scaling};
use super::quantization::Quantization;
use super::{classifier, descendants, experts, modernbert};
use crate::config::{AttentionDirection, ConfigError, NormPlacement, Positions, TransformerConfig};

/// The key of `config.json` for settings that the hub's format lacks.
const OWN: &str = "fireclay";

/// The `config.json` of a model of `family`.
pub(crate) fn write(family: Family, config: &TransformerConfig) -> Map<String, Value> {
    let c = config;
    let shared = json!({
        "architectures": [family.architecture()],
        "model_type": family.model_type(),
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "initializer_range": c.init_deviation,
        "tie_word_embeddings": c.tied_embeddings,
    });
    let own = match family {
        Family::Gpt2 => json!({
            "n_positions": c.context_length, "n_embd": c.d_model, "n_layer": c.n_layers, "n_head": c.n_heads,
            "n_inner": c.d_ff, "activation_function": activation_name(c.activation),
            "layer_norm_epsilon": c.norm_epsilon,
            "resid_pdrop": c.dropout, "embd_pdrop": c.dropout, "attn_pdrop": c.dropout,
        }),
        Family::Bert => json!({
            "max_position_embeddings": c.context_length, "hidden_size": c.d_model,
            "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads, "intermediate_size": c.d_ff,
            "hidden_act": activation_name(c.activation), "layer_norm_eps": c.norm_epsilon,
            "type_vocab_size": c.token_types,
            "hidden_dropout_prob": c.dropout, "attention_probs_dropout_prob": c.dropout,
        }),
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => {
            let mut own = json!({
                "max_position_embeddings": c.context_length, "hidden_size": c.d_model,
                "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads,
                "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim, "intermediate_size": c.d_ff,
                "hidden_act": activation_name(c.activation), "rms_norm_eps": c.norm_epsilon,
                "attention_dropout": c.dropout,
            });
            own["max_position_embeddings"] = json!(c.longest_context());
            if let Positions::Rotary { base, scaling } = &c.positions {
                own["rope_theta"] = json!(base);
                own["rope_scaling"] = write_scaling(scaling, c.context_length);
            }
            match family {
                Family::Llama => {
                    own["attention_bias"] = json!(c.qkv_bias);
                    own["mlp_bias"] = json!(c.feed_forward_bias);
                }
                Family::Mistral if c.layer_windows.is_empty() => own["sliding_window"] = json!(c.sliding_window),
                _ => {
                    let windows: Vec<Option<usize>> = c.layers().map(|layer| layer.window).collect();
                    let window = windows.iter().copied().flatten().max();
                    let kind = |window: &Option<usize>| match window {
                        Some(_) => "sliding_attention",
                        None => "full_attention",
                    };
                    own["sliding_window"] = json!(window);
                    if family != Family::Mistral {
                        own["use_sliding_window"] = json!(window.is_some());
                        own["max_window_layers"] = json!(0);
                    }
                    own["layer_types"] = json!(windows.iter().map(kind).collect::<Vec<_>>());
                    if family == Family::Qwen3 {
                        own["attention_bias"] = json!(c.qkv_bias);
                    }
                }
            }
            own
        }
        Family::Fireclay => json!({}),
        Family::ModernBert => modernbert::write(c),
        _ if family.has_experts() => experts::write(family, c),
        _ => descendants::write(family, c),
    };
    let mut written = Map::new();
    for part in [shared, own] {
        if let Value::Object(part) = part {
            written.extend(part);
        }
    }
    let extra = match family {
        Family::Fireclay => serde_json::to_value(config).unwrap_or_default(),
        _ => json!({
            "dropout": c.dropout, "residual_scaling": c.residual_scaling, "intents": c.intents, "tags": c.tags,
        }),
    };
    written.insert(OWN.into(), extra);
    written.extend(classifier::write(family, c));
    written
}

/// Reads a `config.json`.
///
/// # Errors
/// Names the field that is missing, of a wrong type, or not supported.
pub(crate) fn read(config: &Value) -> Result<(Family, TransformerConfig), ConfigError> {
    let fields = Fields(config);
    let model_type = fields.text("model_type")?;
    // Mistral with a window in some layers.
    let known = if model_type == "ministral" { "mistral" } else { model_type };
    let family = FAMILIES.iter().find(|(_, name, _)| *name == known).map(|(family, ..)| *family);
    let family = family.ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().map(|(_, name, _)| *name).collect();
        ConfigError(format!("model_type is '{model_type}'; known are {}", known.join(", ")))
    })?;
    if family != Family::Fireclay {
        let pruned = fields.get("pruned_heads").filter(|heads| heads.as_object().is_none_or(|heads| !heads.is_empty()));
        if let Some(heads) = pruned {
            return Err(ConfigError(format!("config.json: pruned_heads is {heads}, and is not supported")));
        }
        // Of others, matrices are stored with their rows as columns, or under no names of linear
        // layers.
        if Quantization::read(config)?.is_some() && !family.is_llama() {
            return Err(ConfigError(format!(
                "config.json: quantization_config is not supported in models of {model_type}"
            )));
        }
        fields.refuse(&[("is_encoder_decoder", json!(false)), ("use_mrope", json!(false))])?;
    }
    let mut read = match family {
        Family::Fireclay => serde_json::from_value(config.get(OWN).cloned().unwrap_or_default())
            .map_err(|error| ConfigError(format!("config.json: {error}")))?,
        Family::Gpt2 => {
            fields.refuse(&[
                ("scale_attn_by_inverse_layer_idx", json!(false)),
                ("scale_attn_weights", json!(true)),
                ("add_cross_attention", json!(false)),
            ])?;
            let d_model = fields.size_by(["n_embd", "hidden_size"])?;
            let positions = fields.size_or("n_positions", fields.size_or("max_position_embeddings", 1024)?)?;
            let layers = fields.size_by(["n_layer", "num_hidden_layers"])?;
            let heads = fields.size_by(["n_head", "num_attention_heads"])?;
            let base = TransformerConfig::gpt2(fields.size("vocab_size")?, positions, d_model, layers, heads);
            TransformerConfig {
                d_ff: fields.size_or("n_inner", 4 * d_model)?,
                activation: fields.activation("activation_function", ActivationKind::GeluTanh)?,
                norm_epsilon: fields.number_or("layer_norm_epsilon", 1e-5)?,
                tied_embeddings: fields.flag_or("tie_word_embeddings", true)?,
                dropout: fields.number_or("resid_pdrop", 0.1)?,
                ..base
            }
        }
        Family::Bert => {
            fields.refuse(&[
                ("position_embedding_type", json!("absolute")),
                ("is_decoder", json!(false)),
                ("add_cross_attention", json!(false)),
            ])?;
            let base = TransformerConfig::bert(
                fields.size("vocab_size")?,
                fields.size("max_position_embeddings")?,
                fields.size("hidden_size")?,
                fields.size("num_hidden_layers")?,
                fields.size("num_attention_heads")?,
            );
            TransformerConfig {
                d_ff: fields.size("intermediate_size")?,
                token_types: fields.size_or("type_vocab_size", 2)?,
                activation: fields.activation("hidden_act", ActivationKind::GeluErf)?,
                norm_epsilon: fields.number_or("layer_norm_eps", 1e-12)?,
                dropout: fields.number_or("hidden_dropout_prob", 0.1)?,
                ..base
            }
        }
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => read_llama(&fields, family)?,
        Family::ModernBert => modernbert::read(&fields)?,
        _ if family.has_experts() => experts::read(&fields, family)?,
        _ => descendants::read(&fields, family)?,
    };
    read.init_deviation = fields.number_or("initializer_range", 0.02)?;
    if let (Some(own), true) = (config.get(OWN), family != Family::Fireclay) {
        let own = Fields(own);
        read.dropout = own.number_or("dropout", read.dropout)?;
        read.residual_scaling = own.flag_or("residual_scaling", read.residual_scaling)?;
        read.intents = own.size_or("intents", 0)?;
        read.tags = own.size_or("tags", 0)?;
    }
    if family != Family::Fireclay {
        read.classifier = classifier::read(&fields, family, &read)?;
    }
    read.validate()?;
    Ok((family, read))
}

fn read_llama(fields: &Fields<'_>, family: Family) -> Result<TransformerConfig, ConfigError> {
    let (d_model, n_heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    // The defaults of transformers.
    let (context, kv_heads, head_dim) = match family {
        Family::Mistral => (4096 * 32, 8, None),
        Family::Qwen2 => (32_768, 32, None),
        Family::Qwen3 => (32_768, 32, Some(128)),
        _ => (2048, n_heads, None),
    };
    let context_length = fields.size_or("max_position_embeddings", context)?;
    // Null means the number of query heads.
    let kv_heads = if fields.0.get("num_key_value_heads").is_some() { n_heads } else { kv_heads };
    let n_layers = fields.size("num_hidden_layers")?;
    let llama = TransformerConfig::llama(fields.size("vocab_size")?, context_length, d_model, n_layers, n_heads);
    let (sliding_window, layer_windows) = fields.windows(family, n_layers)?;
    // The other families have none, whatever the file says.
    let attention_bias = matches!(family, Family::Llama | Family::Qwen3) && fields.flag_or("attention_bias", false)?;
    let head_dim = fields.size_or("head_dim", head_dim.unwrap_or(d_model / n_heads.max(1)))?;
    let (positions, context_length) = fields.rotary(context_length, head_dim)?;
    Ok(TransformerConfig {
        context_length,
        n_kv_heads: fields.size_or("num_key_value_heads", kv_heads)?,
        head_dim,
        d_ff: fields.size("intermediate_size")?,
        activation: fields.activation("hidden_act", ActivationKind::Silu)?,
        norm_epsilon: fields.number_or("rms_norm_eps", 1e-6)?,
        positions,
        tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
        dropout: fields.number_or("attention_dropout", 0.0)?,
        sliding_window,
        layer_windows,
        qkv_bias: family == Family::Qwen2 || attention_bias,
        output_bias: family != Family::Qwen2 && attention_bias,
        feed_forward_bias: family == Family::Llama && fields.flag_or("mlp_bias", false)?,
        qk_norm: family == Family::Qwen3,
        norm: NormKind::RmsNorm,
        norm_placement: NormPlacement::Pre,
        attention: AttentionDirection::Causal,
        ..llama
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classifier_config::{ClassifierConfig, ClassifierPooling};
    use crate::rotary::RotaryScaling;

    #[test]
    fn every_family_survives_its_own_config_json() {
        // More than ten: their numbers are not in the order of text.
        let labels = || (0..12).map(|at| format!("label {}", 12 - at)).collect::<Vec<_>>();
        let llama = TransformerConfig::llama(61, 32, 24, 2, 4).with_n_kv_heads(2);
        let yarn = RotaryScaling::Yarn {
            factor: 4.0,
            attention_factor: None,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context_length: 16,
            truncate: false,
        };
        let longrope = RotaryScaling::LongRope {
            short_factors: vec![1.0, 1.5, 2.0],
            long_factors: vec![2.0, 3.0, 4.0],
            longest: 128,
            magnitude: 1.25,
        };
        let cases = [
            (llama.clone().with_positions(Positions::Rotary { base: 1e4, scaling: longrope }), Family::Llama),
            (TransformerConfig::gpt2(61, 32, 24, 2, 3).with_dropout(0.1), Family::Gpt2),
            (
                llama.clone().with_dropout(0.2).with_positions(Positions::Rotary { base: 5e5, scaling: yarn.clone() }),
                Family::Llama,
            ),
            (TransformerConfig::mistral(61, 32, 24, 2, 4, 5), Family::Mistral),
            (TransformerConfig::qwen2(61, 32, 24, 2, 4), Family::Qwen2),
            (TransformerConfig::qwen3(61, 32, 24, 2, 4, 8), Family::Qwen3),
            (
                TransformerConfig::mistral(61, 32, 24, 2, 4, 5)
                    .with_sliding_window(None)
                    .with_layer_windows(vec![5, 0]),
                Family::Mistral,
            ),
            (TransformerConfig::mixtral(61, 32, 24, 2, 4).with_sliding_window(Some(5)), Family::Mixtral),
            (llama.clone().with_experts(8).with_experts_per_token(2).with_d_ff(20), Family::Mixtral),
            (
                TransformerConfig::qwen3_moe(61, 32, 24, 4, 4, 8)
                    .with_dense_layers(vec![0, 3])
                    .with_dense_d_ff(Some(40))
                    .with_router_normalized(false),
                Family::Qwen3Moe,
            ),
            (TransformerConfig::olmoe(61, 32, 24, 2, 4).with_qkv_clip(Some(8.0)), Family::Olmoe),
            (TransformerConfig::gpt_oss(61, 32, 24, 3, 4, 5).with_n_kv_heads(2), Family::GptOss),
            (
                TransformerConfig::gpt_oss(61, 32, 24, 2, 4, 5)
                    .with_positions(Positions::Rotary { base: 15e4, scaling: yarn.clone() })
                    .with_layer_windows(vec![0, 7])
                    .with_expert_limit(Some(3.5)),
                Family::GptOss,
            ),
            (TransformerConfig::mixtral(61, 32, 24, 2, 4).with_shared_d_ff(8), Family::Fireclay),
            (TransformerConfig::gpt2(61, 32, 24, 2, 3).with_experts(4).with_experts_per_token(1), Family::Fireclay),
            (TransformerConfig::gemma2(61, 32, 24, 3, 4, 5), Family::Gemma2),
            (
                TransformerConfig::gemma2(61, 32, 24, 3, 4, 5)
                    .with_attention_scale(Some(168f64.powf(-0.5)))
                    .with_attention_softcap(None)
                    .with_logit_softcap(None),
                Family::Gemma2,
            ),
            (TransformerConfig::gemma3(61, 32, 24, 7, 4, 5).with_n_kv_heads(1), Family::Gemma3),
            (
                TransformerConfig::gemma3(61, 32, 24, 2, 4, 5)
                    .with_positions(Positions::Rotary { base: 1e5, scaling: RotaryScaling::Linear { factor: 8.0 } }),
                Family::Gemma3,
            ),
            (TransformerConfig::olmo2(61, 32, 24, 2, 4), Family::Olmo2),
            (
                TransformerConfig::olmo2(61, 32, 24, 4, 4)
                    .with_layer_windows(vec![5, 5, 5, 0])
                    .with_positions(Positions::Rotary { base: 5e5, scaling: yarn.clone() })
                    .with_window_positions(Some(Positions::Rotary { base: 5e5, scaling: RotaryScaling::None })),
                Family::Olmo3,
            ),
            (TransformerConfig::smollm3(61, 32, 24, 5, 4).with_n_kv_heads(2), Family::SmolLm3),
            (
                TransformerConfig::smollm3(61, 32, 24, 3, 4)
                    .with_layers_without_positions(vec![0, 1])
                    .with_layer_windows(vec![5, 0, 0]),
                Family::SmolLm3,
            ),
            (
                llama.clone().with_rotary_dim(Some(4)).with_sliding_window(Some(7)).with_positions(Positions::Rotary {
                    base: 1e4,
                    scaling: RotaryScaling::LongRope {
                        short_factors: vec![1.0, 1.5],
                        long_factors: vec![2.0, 3.0],
                        longest: 128,
                        magnitude: 1.25,
                    },
                }),
                Family::Phi3,
            ),
            (
                llama
                    .clone()
                    .with_attention_scale(Some(0.015_625))
                    .with_embedding_multiplier(12.0)
                    .with_residual_multiplier(0.22)
                    .with_logit_divisor(8.0),
                Family::Granite,
            ),
            (TransformerConfig::bert(61, 32, 24, 2, 3), Family::Bert),
            (TransformerConfig::modernbert(61, 32, 24, 4, 3, 8), Family::ModernBert),
            (TransformerConfig::bert(61, 32, 24, 2, 3).with_dropout(0.2).with_labels(labels()), Family::Bert),
            (
                TransformerConfig::modernbert(61, 32, 24, 4, 3, 8).with_classifier(Some(ClassifierConfig {
                    labels: labels(),
                    pooling: ClassifierPooling::Mean,
                    activation: Some(ActivationKind::Silu),
                    bias: true,
                    dropout: 0.3,
                    ..ClassifierConfig::default()
                })),
                Family::ModernBert,
            ),
            // transformers has no such head.
            (
                TransformerConfig::bert(61, 32, 24, 2, 3)
                    .with_classifier(Some(ClassifierConfig { labels: labels(), ..ClassifierConfig::default() })),
                Family::Fireclay,
            ),
            (llama.with_norm(NormKind::LayerNorm), Family::Fireclay),
        ];
        for (config, family) in cases {
            assert_eq!(Family::of(&config), family);
            assert_eq!(read(&Value::Object(family.write(&config))), Ok((family, config)));
        }
    }

    #[test]
    fn unknown_models_are_refused_by_name() {
        let message = read(&json!({ "model_type": "mamba" })).expect_err("unknown").to_string();
        assert!(message.contains("mamba") && message.contains("llama"), "{message}");
        let with = |more: Value| {
            let mut config = Value::Object(Family::Qwen2.write(&TransformerConfig::qwen2(61, 32, 24, 2, 4)));
            more.as_object().expect("fields").iter().for_each(|(key, value)| config[key] = value.clone());
            read(&config)
        };
        let mixed = json!(["full_attention", "sliding_attention"]);
        let window = |size: usize| json!({ "use_sliding_window": true, "sliding_window": size, "layer_types": mixed });
        assert_eq!(with(window(4)).expect("a window").1.layer_windows, [0, 4]);
        let message = with(window(0)).expect_err("no window of no keys").to_string();
        assert!(message.contains("sliding_window is 0"), "{message}");
        with(json!({ "partial_rotary_factor": 1 })).expect("all of each head");
        let message = with(json!({ "partial_rotary_factor": 0.5 })).map(|_| ());
        let rope = json!({ "rope_scaling": { "rope_type": "default", "partial_rotary_factor": 0.5 } });
        for refused in [message, with(rope).map(|_| ())] {
            let message = refused.expect_err("half of each head").to_string();
            assert!(message.contains("partial_rotary_factor is 0.5"), "{message}");
        }
        // Of each new family, what it does not compute.
        let changed = |config: &TransformerConfig, more: Value| {
            let mut config = Value::Object(Family::of(config).write(config));
            more.as_object().expect("fields").iter().for_each(|(key, value)| config[key] = value.clone());
            read(&config).map(|_| ()).map_err(|error| error.to_string())
        };
        let llama = || TransformerConfig::llama(61, 32, 24, 2, 4);
        let phi3 = llama().with_rotary_dim(Some(4));
        let granite = llama().with_residual_multiplier(0.5);
        let [gemma2, gemma3] = [TransformerConfig::gemma2, TransformerConfig::gemma3].map(|of| of(61, 32, 24, 3, 4, 5));
        let modernbert = TransformerConfig::modernbert(61, 32, 24, 4, 3, 8);
        let classifier = modernbert.clone().with_labels(vec!["a".into(), "b".into()]);
        let smollm3 = TransformerConfig::smollm3(61, 32, 24, 5, 4);
        let half = json!({ "full_attention": { "partial_rotary_factor": 0.5 } });
        for (config, more, named) in [
            (&gemma2, json!({ "use_bidirectional_attention": true }), "use_bidirectional_attention is true"),
            (
                &gemma2,
                json!({ "layer_types": ["full_attention", "chunked_attention", "full_attention"] }),
                "chunked_attention",
            ),
            (&gemma2, json!({ "sliding_window": 0 }), "sliding_window is 0"),
            (&gemma3, json!({ "attn_logit_softcapping": 50.0 }), "attn_logit_softcapping is 50"),
            (&gemma3, json!({ "rope_parameters": half }), "partial_rotary_factor is 0.5"),
            (&granite, json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor is 0.5"),
            (&granite, json!({ "logits_scaling": 0 }), "logit_divisor (0)"),
            (&phi3, json!({ "rope_scaling": { "type": "yarn", "factor": 2.0 } }), "longrope only"),
            (&phi3, json!({ "partial_rotary_factor": 1.5 }), "partial_rotary_factor is 1.5"),
            (&phi3, json!({ "resid_pdrop": 0.1 }), "resid_pdrop is 0.1"),
            (&smollm3, json!({ "no_rope_layers": [1, 2, 1, 1, 1] }), "no_rope_layers"),
            (&modernbert, json!({ "mlp_dropout": 0.1 }), "mlp_dropout is 0.1"),
            (&classifier, json!({ "classifier_pooling": "last" }), "classifier_pooling is \"last\""),
            (&classifier, json!({ "classifier_activation": "tanh" }), "classifier_activation 'tanh'"),
            (&classifier, json!({ "id2label": { "0": "a", "2": "b" } }), "id2label"),
            (&classifier, json!({ "id2label": { "0": "a", "1": "a" } }), "label 'a' twice"),
            (&modernbert, json!({ "position_embedding_type": "relative" }), "position_embedding_type"),
        ] {
            let message = changed(config, more).expect_err(named);
            assert!(message.contains(named), "{message}");
        }
        let message = read(&json!({ "model_type": "gpt2", "n_embd": "x" })).expect_err("wrong type").to_string();
        assert!(message.contains("n_embd"), "{message}");
    }
}
