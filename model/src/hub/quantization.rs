//! `quantization_config` in `config.json`: how the matrices are quantized.
//!
//! A key that changes weights is used, or refused by name if its value is not supported. An unknown
//! key is refused too. Activations are not quantized, whatever the config says: products use the
//! weights as stored.

use serde_json::Value;

use crate::config::ConfigError;

/// How the matrices of a checkpoint are quantized.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Quantization {
    /// bitsandbytes, 4 bits: NF4 or FP4, per matrix.
    Bnb4,
    /// bitsandbytes, 8 bits.
    Bnb8,
    /// GPTQ.
    Gptq {
        bits: usize,
        /// Inputs per group; None for all inputs.
        group: Option<usize>,
        /// How much lower zeros are stored.
        zero_offset: u8,
    },
    /// AWQ in 4 bits.
    Awq { group: Option<usize> },
    /// E4M3 with `weight_scale_inv`.
    Fp8 {
        /// Rows and columns per scale; None for all.
        block: Option<[usize; 2]>,
    },
    /// E4M3 with `weight_scale` per row.
    FbgemmFp8,
    /// compressed-tensors, unpacked floats and bytes.
    Scaled { is_float: bool, block: Option<[usize; 2]>, group: Option<usize> },
    /// compressed-tensors, integers packed in words.
    Packed { bits: usize, group: Option<usize>, has_zeros: bool },
    /// MXFP4 in `*_blocks` and `*_scales`.
    Mxfp4,
}

const METHODS: &str = "bitsandbytes, gptq, awq, fp8, fbgemm_fp8, compressed-tensors and mxfp4";

/// Keys of GPTQ and AWQ that do not change weights.
const OF_GROUPS: &[&str] = &[
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "desc_act",
    "disable_exllama",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_fuse",
    "mse",
    "offload_to_disk",
    "pad_token_id",
    "quantizer",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
];

/// A config object, and the keys used so far.
struct Keys<'a> {
    of: &'a Value,
    path: &'static str,
    known: Vec<&'static str>,
}

impl<'a> Keys<'a> {
    fn new(of: &'a Value, path: &'static str) -> Self {
        Self { of, path, known: Vec::new() }
    }

    fn get(&mut self, name: &'static str) -> &'a Value {
        self.known.push(name);
        &self.of[name]
    }

    fn wrong<T>(&self, name: &str, wanted: &str) -> Result<T, ConfigError> {
        let value = &self.of[name];
        Err(ConfigError(format!("config.json: {}.{name} is {value}, and only {wanted} is supported", self.path)))
    }

    fn size(&mut self, name: &'static str) -> Result<usize, ConfigError> {
        match self.get(name).as_u64().filter(|size| (1..=1 << 24).contains(size)) {
            Some(size) => Ok(size as usize),
            None => self.wrong(name, "a size"),
        }
    }

    /// A number of columns; None for -1 or a missing key.
    fn group(&mut self, name: &'static str) -> Result<Option<usize>, ConfigError> {
        match self.get(name) {
            Value::Null => Ok(None),
            value if value.as_i64() == Some(-1) => Ok(None),
            _ => self.size(name).map(Some),
        }
    }

    fn block(&mut self, name: &'static str) -> Result<Option<[usize; 2]>, ConfigError> {
        let sizes = match self.get(name) {
            Value::Null => return Ok(None),
            sizes => sizes.as_array().map_or(&[][..], Vec::as_slice),
        };
        match sizes.iter().map(|size| size.as_u64().filter(|size| (1..=1 << 24).contains(size))).collect::<Vec<_>>()[..]
        {
            [Some(rows), Some(columns)] => Ok(Some([rows as usize, columns as usize])),
            _ => self.wrong(name, "a list of two sizes"),
        }
    }

    /// Refuses a key with any other value.
    fn only(&mut self, name: &'static str, values: &[Value]) -> Result<(), ConfigError> {
        let value = self.get(name);
        if value.is_null() || values.contains(value) {
            return Ok(());
        }
        let shown: Vec<String> = values.iter().map(Value::to_string).collect();
        self.wrong(name, &shown.join(" or "))
    }

    /// Refuses a key with a non-empty value.
    fn nothing(&mut self, name: &'static str) -> Result<(), ConfigError> {
        let value = self.get(name);
        let says_nothing = value.as_object().is_some_and(|map| map.is_empty())
            || value.as_array().is_some_and(|list| list.is_empty())
            || value.is_null()
            || *value == false;
        if says_nothing { Ok(()) } else { self.wrong(name, "nothing") }
    }

    /// Refuses unused keys, except harmless ones.
    fn end(self, harmless: &[&str]) -> Result<(), ConfigError> {
        let keys = self.of.as_object().into_iter().flatten();
        let unknown = keys.filter(|(name, value)| {
            !value.is_null() && !self.known.contains(&&name[..]) && !harmless.contains(&&name[..])
        });
        match unknown.map(|(name, _)| name).next() {
            None => Ok(()),
            Some(name) => Err(ConfigError(format!(
                "config.json: {}.{name} is {}, of which nothing is known",
                self.path, self.of[name]
            ))),
        }
    }
}

impl Quantization {
    /// Reads `quantization_config`. None if the matrices are floats.
    ///
    /// # Errors
    /// Names the method, key or value that is not supported.
    pub(crate) fn read(config: &Value) -> Result<Option<Self>, ConfigError> {
        let Some(own) = config.get("quantization_config").filter(|own| !own.is_null()) else { return Ok(None) };
        let mut keys = Keys::new(own, "quantization_config");
        keys.get("modules_to_not_convert");
        let method = keys.get("quant_method").as_str().unwrap_or_default();
        let read = match method {
            "bitsandbytes" => Self::bitsandbytes(keys),
            "gptq" => Self::gptq(keys),
            "awq" => Self::awq(keys),
            "fp8" => Self::fp8(keys),
            "fbgemm_fp8" => keys.end(&["activation_scale_ub"]).map(|()| Self::FbgemmFp8),
            "compressed-tensors" => Self::compressed(keys),
            "mxfp4" => keys.end(&["dequantize"]).map(|()| Self::Mxfp4),
            other => Err(ConfigError(format!(
                "config.json: quantization_config: quantization method '{other}' is not supported; supported are \
                 {METHODS}"
            ))),
        };
        read.map(Some)
    }

    fn bitsandbytes(mut keys: Keys<'_>) -> Result<Self, ConfigError> {
        let four = [keys.get("load_in_4bit"), keys.get("_load_in_4bit")].into_iter().any(|flag| *flag == true);
        let eight = [keys.get("load_in_8bit"), keys.get("_load_in_8bit")].into_iter().any(|flag| *flag == true);
        keys.only("bnb_4bit_quant_type", &["nf4".into(), "fp4".into()])?;
        keys.only("llm_int8_has_fp16_weight", &[false.into()])?;
        if four == eight {
            return keys.wrong("load_in_4bit", "true without load_in_8bit, or the other way round,");
        }
        keys.end(&[
            "bnb_4bit_compute_dtype",
            "bnb_4bit_quant_storage",
            "bnb_4bit_use_double_quant",
            "llm_int8_enable_fp32_cpu_offload",
            "llm_int8_skip_modules",
            "llm_int8_threshold",
        ])?;
        Ok(if four { Self::Bnb4 } else { Self::Bnb8 })
    }

    fn gptq(mut keys: Keys<'_>) -> Result<Self, ConfigError> {
        let (bits, group) = (keys.size("bits")?, keys.group("group_size")?);
        if !matches!(bits, 2 | 3 | 4 | 8) {
            return keys.wrong("bits", "2, 3, 4 or 8");
        }
        for name in ["checkpoint_format", "format"] {
            keys.only(name, &["gptq".into(), "gptq_v2".into()])?;
        }
        keys.only("pack_dtype", &["int32".into()])?;
        for name in ["dynamic", "is_marlin_format", "adapter", "rotation"] {
            keys.nothing(name)?;
        }
        let format = keys.of.get("checkpoint_format").filter(|format| !format.is_null()).unwrap_or(&keys.of["format"]);
        let zero_offset = u8::from(*format != "gptq_v2");
        keys.end(OF_GROUPS)?;
        Ok(Self::Gptq { bits, group, zero_offset })
    }

    fn awq(mut keys: Keys<'_>) -> Result<Self, ConfigError> {
        for name in ["bits", "w_bit"] {
            keys.only(name, &[4.into()])?;
        }
        for name in ["version", "format", "checkpoint_format"] {
            keys.only(name, &["gemm".into(), "GEMM".into()])?;
        }
        keys.only("pack_dtype", &["int32".into()])?;
        keys.only("zero_point", &[true.into(), false.into()])?;
        for name in ["dynamic", "adapter", "rotation"] {
            keys.nothing(name)?;
        }
        let group = match keys.group("group_size")? {
            None => keys.group("q_group_size")?,
            group => group,
        };
        keys.get("q_group_size");
        keys.end(OF_GROUPS)?;
        Ok(Self::Awq { group })
    }

    fn fp8(mut keys: Keys<'_>) -> Result<Self, ConfigError> {
        keys.only("fmt", &["e4m3".into(), "float8_e4m3fn".into()])?;
        keys.only("scale_fmt", &["float".into()])?;
        keys.only("expert_dtype", &["fp8".into()])?;
        let block = keys.block("weight_block_size")?;
        keys.end(&["activation_scheme", "dequantize", "ignored_layers", "modules_to_convert"])?;
        Ok(Self::Fp8 { block })
    }

    fn compressed(mut keys: Keys<'_>) -> Result<Self, ConfigError> {
        let formats = ["float-quantized", "int-quantized", "naive-quantized", "pack-quantized"];
        keys.only("quantization_status", &["compressed".into()])?;
        if !keys.get("sparsity_config").get("format").is_some_and(|format| *format == "dense") {
            keys.nothing("sparsity_config")?;
        }
        keys.nothing("transform_config")?;
        keys.only("format", &formats.map(Value::from))?;
        let (format, groups) = (keys.get("format"), keys.get("config_groups"));
        let mut read: Option<Self> = None;
        for scheme in groups.as_object().into_iter().flatten().map(|(_, scheme)| scheme) {
            let mut scheme = Keys::new(scheme, "quantization_config.config_groups");
            scheme.only("format", &formats.map(Value::from))?;
            let own = scheme.get("format");
            let packed = *if own.is_null() { format } else { own } == "pack-quantized";
            let weights = scheme.get("weights");
            scheme.end(&["targets", "input_activations", "output_activations"])?;
            let group = Self::scheme(Keys::new(weights, "quantization_config.config_groups.weights"), packed)?;
            if read.as_ref().is_some_and(|known| *known != group) {
                return keys.wrong("config_groups", "one scheme of weights");
            }
            read = Some(group);
        }
        let Some(read) = read else { return keys.wrong("config_groups", "one scheme of weights") };
        keys.end(&["global_compression_ratio", "ignore", "kv_cache_scheme", "version"])?;
        Ok(read)
    }

    /// The weight scheme of a compressed-tensors group.
    fn scheme(mut keys: Keys<'_>, packed: bool) -> Result<Self, ConfigError> {
        let bits = keys.size("num_bits")?;
        keys.only("type", &["int".into(), "float".into()])?;
        keys.only("dynamic", &[false.into()])?;
        keys.only("strategy", &["tensor", "channel", "group", "block"].map(Value::from))?;
        let is_float = *keys.get("type") == "float";
        let symmetric = *keys.get("symmetric") != false;
        let (group, mut block) = (keys.group("group_size")?, keys.block("block_structure")?);
        let strategy = keys.get("strategy").as_str().unwrap_or("tensor");
        if (strategy == "group") != group.is_some() || (strategy == "block") != block.is_some() {
            return keys.wrong("strategy", "one that goes with group_size and block_structure");
        }
        if strategy == "tensor" {
            block = None;
        }
        let fits = if packed { !is_float && (2..=8).contains(&bits) } else { bits == 8 };
        if !fits || (packed && strategy == "block") {
            return keys.wrong("num_bits", if packed { "integers of 2 to 8 bits" } else { "8 bits" });
        }
        if !packed && !symmetric {
            return keys.wrong("symmetric", "true");
        }
        keys.end(&["actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"])?;
        Ok(match packed {
            true => Self::Packed { bits, group, has_zeros: !symmetric },
            false => Self::Scaled { is_float, block, group },
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(own: Value) -> Result<Option<Quantization>, String> {
        Quantization::read(&json!({ "quantization_config": own })).map_err(|error| error.to_string())
    }

    #[test]
    fn methods_are_told_by_their_keys() {
        let gptq = json!({ "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": false });
        assert_eq!(read(gptq.clone()), Ok(Some(Quantization::Gptq { bits: 4, group: Some(128), zero_offset: 1 })));
        let mut second = gptq.clone();
        second["checkpoint_format"] = json!("gptq_v2");
        second["group_size"] = json!(-1);
        assert_eq!(read(second), Ok(Some(Quantization::Gptq { bits: 4, group: None, zero_offset: 0 })));
        let fp8 = json!({
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64], "activation_scheme": "dynamic",
        });
        assert_eq!(read(fp8), Ok(Some(Quantization::Fp8 { block: Some([128, 64]) })));
        assert_eq!(Quantization::read(&json!({})).ok(), Some(None));
        assert_eq!(read(Value::Null), Ok(None));
    }

    #[test]
    fn what_is_not_read_is_refused_by_name() {
        let refusal = |own: Value| read(own).expect_err("not read");
        let with = |key: &str, value: Value| {
            let mut own = json!({ "quant_method": "gptq", "bits": 4, "group_size": 128 });
            own[key] = value;
            refusal(own)
        };
        for (key, value) in [
            ("bits", json!(5)),
            ("group_size", json!("many")),
            ("checkpoint_format", json!("marlin")),
            ("pack_dtype", json!("int16")),
            ("dynamic", json!({ "-:x": {} })),
            ("is_marlin_format", json!(true)),
            ("colour", json!("red")),
        ] {
            let message = with(key, value.clone());
            assert!(message.contains(&format!("quantization_config.{key} is {value}")), "{message}");
        }
        let message = refusal(json!({ "quant_method": "hqq" }));
        assert!(message.contains("'hqq'") && message.contains("gptq, awq"), "{message}");
        let message =
            refusal(json!({ "quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "q4" }));
        assert!(message.contains("bnb_4bit_quant_type"), "{message}");
        let message = refusal(json!({ "quant_method": "awq", "bits": 4, "version": "gemv" }));
        assert!(message.contains("version is \"gemv\""), "{message}");
        let message = refusal(json!({ "quant_method": "fp8", "fmt": "e5m2" }));
        assert!(message.contains("fmt"), "{message}");
        let group = |weights: Value| {
            refusal(json!({ "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } } }))
        };
        let message = group(json!({ "num_bits": 9, "type": "int", "strategy": "channel" }));
        assert!(message.contains("num_bits is 9"), "{message}");
        let message = group(json!({ "num_bits": 4, "type": "int", "strategy": "tensor_group" }));
        assert!(message.contains("strategy"), "{message}");
    }
}
