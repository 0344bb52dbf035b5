#!/usr/bin/env python3
"""Writes the golden GGUF files in `gguf/` next to this script.

    pip install gguf torch transformers safetensors sentencepiece protobuf numpy
    python3 tests/golden/gguf_files.py            # or: gguf_files.py [--families] [OUTPUT_FOLDER]

Needs no network: models have random weights, tokenizers are trained on the text below.

    blocks.safetensors     for each type NAME.blocks, its bytes, and NAME.values, what
                           gguf.quants.dequantize makes of them
    written.safetensors    weights, for each type that is written NAME.blocks, what
                           gguf.quants.quantize makes of them, and for those that it cannot make
                           NAME.error, the root mean square error of llama.cpp's quantizer (with
                           GGML_BASE naming its libggml-base.so, which npm's node-llama-cpp ships;
                           otherwise they are kept)
    <model>.gguf           tiny models, their metadata under the names that llama.cpp's convert_hf_to_gguf.py gives them
    families.safetensors   the same for the models of `families()`, which --families makes alone
    models.safetensors     for each model NAME.tokens and NAME.logits: transformers on the weights as the file has them
    vocab-<name>.gguf      vocabularies without a model
    tokenizers.json        strings, and for each vocabulary the ids that the tokenizer it came from gives them
"""

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import tokenizers
import torch
from gguf import GGMLQuantizationType as T
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, GraniteConfig,
    GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaTokenizer, MistralConfig, MistralForCausalLM, Olmo2Config,
    Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedTokenizerFast, Qwen2Config,
    Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM,
)

FOLDERS = [Path(argument) for argument in sys.argv[1:] if argument != "--families"]
OUT = (FOLDERS[0] if FOLDERS else Path(__file__).resolve().parent) / "gguf"
VOCAB, CONTEXT = 61, 64
SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5)

# ---------------------------------------------------------------- blocks

BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Where the f16 of a block are: random bytes there would be infinite now and then.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def blocks():
    rng = np.random.default_rng(7)
    tensors = {}
    for name in BLOCKS:
        size = gguf.GGML_QUANT_SIZES[T[name]][1]
        raw = rng.integers(0, 256, (3, size), dtype=np.uint8)
        for at in HALVES[name]:
            raw[:, at:at + 2] = rng.normal(0, 0.1, (3, 1)).astype(np.float16).view(np.uint8)
            # One that is subnormal.
            raw[2, at:at + 2] = np.array([3e-6], dtype=np.float16).view(np.uint8)
        tensors[f"{name}.blocks"] = raw
        tensors[f"{name}.values"] = gguf.quants.dequantize(raw, T[name]).astype(np.float32)
    save_file(tensors, OUT / "blocks.safetensors")


def written():
    """Weights as a model has them, with outliers, a block of zeros, one of equal weights and one of positive ones."""
    rng = np.random.default_rng(11)
    weights = rng.normal(0, 0.04, (16, 256)).astype(np.float32)
    weights[3] *= rng.choice([1, 8], 256, p=[0.97, 0.03]).astype(np.float32)
    weights[5], weights[6], weights[7] = 0, -0.02, np.abs(weights[7])
    weights[8, ::2] = 0
    tensors = {"weights": weights}
    for name in ["Q8_0", "Q4_0", "Q5_0"]:
        tensors[f"{name}.blocks"] = gguf.quants.quantize(weights, T[name])
    library, path = os.environ.get("GGML_BASE"), OUT / "written.safetensors"
    for name in ["Q4_K", "Q6_K"]:
        if library is None:
            tensors[f"{name}.error"] = load_file(path)[f"{name}.error"]
            continue
        quantize = ctypes.CDLL(library).ggml_quantize_chunk
        quantize.restype = ctypes.c_size_t
        raw = np.zeros((16, gguf.GGML_QUANT_SIZES[T[name]][1]), dtype=np.uint8)
        quantize(ctypes.c_int(T[name]), weights.ctypes.data_as(ctypes.c_void_p), raw.ctypes.data_as(ctypes.c_void_p),
                 ctypes.c_int64(0), ctypes.c_int64(16), ctypes.c_int64(256), None)
        off = gguf.quants.dequantize(raw, T[name]) - weights
        tensors[f"{name}.error"] = np.sqrt(np.mean(off.astype(np.float64) ** 2, axis=1)).astype(np.float32)
    save_file(tensors, path)


# ---------------------------------------------------------------- models

def interleave(weight, heads):
    """Rows of each head's halves in turn, as `llama` files have queries and keys."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)


# The names in which architectures differ from `llama`.
OWN_NAMES = {
    "gemma": {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
              "post_feedforward_layernorm": "post_ffw_norm"},
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
# Whose rotary positions turn neighbours.
INTERLEAVED = ["llama", "granite", "smollm3"]


def llama_names(name, arch="llama"):
    """The GGUF name of a tensor of Llama or a descendant."""
    outer = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight",
             "model.norm.weight": "output_norm.weight"}
    inner = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    inner |= OWN_NAMES.get("gemma" if arch.startswith("gemma") else arch, {})
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{inner[part]}.{kind}"


def gpt2_names(name):
    outer = {"transformer.wte.weight": "token_embd.weight", "transformer.wpe.weight": "position_embd.weight",
             "transformer.ln_f.weight": "output_norm.weight", "transformer.ln_f.bias": "output_norm.bias",
             "lm_head.weight": "output.weight"}
    inner = {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
             "ln_1": "attn_norm", "ln_2": "ffn_norm"}
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{inner[part]}.{kind}"


def draw(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            norm = p.dim() == 1 and name.endswith("weight")
            p.normal_(1.0 if norm else 0.0, 0.1 if norm else 0.12)
    return model.eval()


def write(name, arch, model, golden, types=lambda name: T.F16, prepare=lambda writer: None, extra=()):
    """Writes a model, and what transformers computes of its weights as the file has them."""
    config = model.config
    path = OUT / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_vocab_size(config.vocab_size)
        if arch not in ["llama", "qwen2"]:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    prepare(writer)
    for key, values in extra:
        writer.add_tensor(key, values)
    kept = {}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = value.float().numpy()
        own = gpt2_names(key) if arch == "gpt2" else llama_names(key, arch)
        # Norms of Gemma with the one that they add.
        if arch.startswith("gemma") and "norm" in own:
            values = values + 1
        # Conv1D stores [in, out].
        turned = arch == "gpt2" and ".h." in key and values.ndim == 2
        stored = values.T.copy() if turned else values
        heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", 0)}
        part = own.split(".")[-2]
        if arch in INTERLEAVED and part in heads:
            stored = interleave(stored, heads[part])
        kind = T.F32 if values.ndim == 1 or "position" in own else types(own)
        raw = gguf.quants.quantize(np.ascontiguousarray(stored), kind)
        writer.add_tensor(own, raw, raw_dtype=kind)
        # What the file has, in the order of the model.
        if kind != T.F32:
            read = gguf.quants.dequantize(raw, kind)
            if arch in INTERLEAVED and part in heads:
                n = heads[part]
                read = read.reshape(n, read.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(read.shape)
            kept[key] = torch.from_numpy((read.T if turned else read).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(kept, strict=False)
    if config.tie_word_embeddings:
        model.tie_weights()
    torch.manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (1, 12))
    with torch.no_grad():
        logits = model.double()(input_ids=tokens, use_cache=False).logits
    golden[f"{name}.tokens"] = tokens.numpy().astype(np.int32)
    golden[f"{name}.logits"] = logits.numpy().astype(np.float32)


MIXED = {"token_embd": T.Q8_0, "output": T.Q8_0, "attn_q": T.Q4_0, "attn_k": T.Q4_1, "attn_v": T.Q5_0,
         "attn_output": T.Q5_1, "ffn_gate": T.Q4_0, "ffn_up": T.BF16, "ffn_down": T.Q8_0}


def all_models(tokenizer):
    golden = {}
    rope = dict(rope_type="default", rope_theta=10000.0)
    plain = dict(vocab_size=VOCAB, tie_word_embeddings=False, **SHAPE)
    llama = draw(LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **plain)), 1)
    write("llama", "llama", llama, golden)
    llama = draw(LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **plain)), 6)
    write("llama_mixed", "llama", llama, golden, types=lambda name: MIXED[name.split(".")[-2]])
    # Frequencies as Llama 3.1 has them, in a tensor of factors.
    scaled = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=32)
    llama = draw(LlamaForCausalLM(LlamaConfig(rope_parameters=scaled, **(plain | dict(tie_word_embeddings=True)))), 2)
    bare = LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **plain))
    factors = (bare.model.rotary_emb.inv_freq / llama.model.rotary_emb.inv_freq).float().numpy()
    assert factors.max() > 1.5, factors
    write("llama3", "llama", llama, golden, extra=[("rope_freqs.weight", factors)])
    mistral = MistralForCausalLM(MistralConfig(rope_parameters=rope, sliding_window=5, **plain))
    write("mistral", "llama", draw(mistral, 3), golden, prepare=lambda writer: writer.add_sliding_window(5))
    vocabulary = dict(vocab_size=len(tokenizer), tie_word_embeddings=True)
    qwen2 = Qwen2ForCausalLM(Qwen2Config(rope_parameters=rope | dict(rope_theta=1e6), **(plain | vocabulary)))
    write("qwen2", "qwen2", draw(qwen2, 4), golden,
          prepare=lambda writer: bpe_keys(writer, tokenizer, "qwen2", QWEN_CONTROL))
    qwen3 = Qwen3ForCausalLM(Qwen3Config(rope_parameters=rope, head_dim=12, **plain))
    write("qwen3", "qwen3", draw(qwen3, 5), golden)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4))
    write("gpt2", "gpt2", draw(gpt2, 6), golden)
    save_file(golden, OUT / "models.safetensors")


def families():
    """Small models of more families, and families.safetensors."""
    golden = {}
    base = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=3,
                num_key_value_heads=1, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, pad_token_id=None,
                attn_implementation="eager")

    def gemma2_keys(writer):
        writer.add_sliding_window(5)
        writer.add_attn_logit_softcapping(1.5)
        writer.add_final_logit_softcapping(2.5)

    def gemma3_keys(writer):
        writer.add_sliding_window(5)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    def olmo3_keys(writer):
        writer.add_sliding_window(5)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    def phi3_keys(writer):
        writer.add_sliding_window(7)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_attn_factors(1.3)

    def granite_keys(writer):
        writer.add_attention_scale(0.4)
        writer.add_embedding_scale(3.0)
        writer.add_residual_scale(0.5)
        writer.add_logit_scale(2.0)

    default = lambda theta: {"rope_type": "default", "rope_theta": theta}
    gemma2 = Gemma2Config(**base, head_dim=6, query_pre_attn_scalar=6, sliding_window=5, attn_logit_softcapping=1.5,
                          final_logit_softcapping=2.5, rope_parameters=default(1e4))
    write("gemma2", "gemma2", draw(Gemma2ForCausalLM(gemma2), 21), golden, prepare=gemma2_keys)
    linear = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
              "sliding_attention": default(1e4)}
    gemma3 = Gemma3TextConfig(**(base | dict(num_hidden_layers=7)), head_dim=6, query_pre_attn_scalar=6,
                              sliding_window=5, rope_parameters=linear)
    write("gemma3", "gemma3", draw(Gemma3ForCausalLM(gemma3), 22), golden, prepare=gemma3_keys)
    plain = base | dict(tie_word_embeddings=False)
    olmo2 = Olmo2Config(**plain, rope_parameters=default(5e5))
    write("olmo2", "olmo2", draw(Olmo2ForCausalLM(olmo2), 23), golden)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e5}
    olmo3 = Olmo3Config(**plain, sliding_window=5,
                        rope_parameters={"full_attention": yarn, "sliding_attention": default(5e5)})
    write("olmo3", "olmo2", draw(Olmo3ForCausalLM(olmo3), 24), golden, prepare=olmo3_keys)
    short, long = [1.0, 1.2, 1.5], [2.0, 3.0, 9.0]
    longrope = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": 1.3,
                "original_max_position_embeddings": 32, "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    phi3 = Phi3Config(**plain, sliding_window=7, original_max_position_embeddings=32, rope_parameters=longrope)
    factors = [("rope_factors_long.weight", np.array(long, np.float32)),
               ("rope_factors_short.weight", np.array(short, np.float32))]
    write("phi3", "phi3", draw(Phi3ForCausalLM(phi3), 25), golden, prepare=phi3_keys, extra=factors)
    granite = GraniteConfig(**plain, attention_multiplier=0.4, embedding_multiplier=3.0, residual_multiplier=0.5,
                            logits_scaling=2.0, mlp_bias=True, attention_bias=True, rope_parameters=default(1e4))
    write("granite", "granite", draw(GraniteForCausalLM(granite), 26), golden, prepare=granite_keys)
    smollm3 = SmolLM3Config(**base, rope_parameters=default(2e6))
    write("smollm3", "smollm3", draw(SmolLM3ForCausalLM(smollm3), 27), golden)
    save_file(golden, OUT / "families.safetensors")


# ---------------------------------------------------------------- vocabularies

TEXT = """The potter's wheel turned 12 times, and then 345 more: it wasn't clay, it's fire! We'll see; they're here.
Fireclay bricks (SiO2, Al2O3) keep 1,580 degrees. def kiln(x): return x + 1  # heat
    indented    text\twith tabs, "quotes" and 'quotes'; CamelCaseWords and ALLCAPS, snake_case_words.
Émile's café in Zürich, naïve façade. Привет, мир! 你好，世界。こんにちは 세계 🔥🧱 ½ ² ³
""" * 8

SAMPLES = [
    "Hello, world!", "", " ", "  two  spaces ", "It's we'll THEY'RE I'M", "1234567890 12 3,141.59", "a\n\nb\r\n\tc \n",
    "Émile's café, naïve façade", "E\u0301mile decomposed cafe\u0301", "Привет, мир!", "你好，世界。こんにちは 세계",
    "🔥🧱 fire", "def kiln(x):\n    return x + 1  # heat\n", "CamelCaseWords ALLCAPS snake_case x86_64", "½ ² ③ ٣",
    "\u00a0nbsp\u2003em", "<|im_start|>user\nclay<|im_end|>", "<s>a</s> b", "a_b-c/d\\e", "…—“quoted”",
    "path/to/file.txt\n/", "the kiln's\n \n  wheel", "\n", "trailing space ", "ꙮ rare \U0001F9D1\u200D\U0001F680",
]

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


O200K = "|".join([r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?",
                  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?",
                  r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
# Letters of alphabets that have capitals, one by one.
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    "\u2126\u2128\u212a-\u212d"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
IDEOGRAPHS = "[一-龥ࠀ-一가-퟿]+"
MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

# As the tokenizer.json of these models have it: cut, normalized, merges ignored for whole words, text begun with.
KINDS = {
    "gpt-2": dict(cut=[byte_level(True)], control=["<|endoftext|>"]),
    "llama-bpe": dict(cut=[split(f"{CONTRACTIONS}|{WORDS % '{1,3}'}"), byte_level(False)], whole=True,
                      control=["<|begin_of_text|>", "<|eot_id|>"], bos="<|begin_of_text|>"),
    "qwen2": dict(cut=[split(f"{CONTRACTIONS}|{WORDS % ''}"), byte_level(False)], normalizer=normalizers.NFC(),
                  control=QWEN_CONTROL),
    "smollm": dict(cut=[pre_tokenizers.Digits(individual_digits=True), byte_level(True)], control=QWEN_CONTROL),
    "tekken": dict(cut=[split(TEKKEN), byte_level(False)], whole=True, control=["<s>", "</s>"], bos="<s>"),
    "deepseek-coder": dict(cut=[split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"),
                                split("[一-龥ࠀ-一가-퟿]+"), pre_tokenizers.Digits(individual_digits=True),
                                byte_level(False)],
                           control=["<s>", "</s>"], bos="<s>", says_bos=True),
    # What llama.cpp takes where a file names no pattern.
    "default": dict(cut=[split(r"[\p{P}\$\+<=>\^~\|]+"), split(GPT2), split(r"\p{N}+"), split("[0-9][0-9][0-9]"),
                         byte_level(False)],
                    control=["<|endoftext|>"]),
    "falcon": dict(cut=[pre_tokenizers.Punctuation("contiguous"), byte_level(True),
                        pre_tokenizers.Digits(individual_digits=False), split("[0-9][0-9][0-9]")],
                   control=["<|endoftext|>"]),
    "gpt-4o": dict(cut=[split(O200K), byte_level(False)], control=["<|endoftext|>"]),
    "deepseek-llm": dict(cut=[split(r"[\r\n]"), split(rf"\s?[{CASED}]+"),
                              split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"), split(r"\s+$"),
                              split(IDEOGRAPHS), pre_tokenizers.Digits(individual_digits=False), byte_level(False)],
                         control=["<s>", "</s>"], bos="<s>", says_bos=True),
    "deepseek-v3": dict(cut=[split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"),
                             split(MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                                   r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
                             byte_level(False)], control=["<s>", "</s>"], bos="<s>", says_bos=True),
}


def trained(kind):
    kind = KINDS[kind]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=kind.get("whole", False)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(kind["cut"])
    tokenizer.decoder = decoders.ByteLevel()
    if "normalizer" in kind:
        tokenizer.normalizer = kind["normalizer"]
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens(kind["control"])
    if "bos" in kind:
        bos = kind["bos"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def bpe_keys(writer, tokenizer, pre, control):
    """The keys of a byte-level BPE tokenizer."""
    inner = tokenizer.backend_tokenizer
    state = json.loads(inner.to_str())
    vocabulary = inner.get_vocab(with_added_tokens=True)
    tokens = [name for name, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    added = {token["content"]: token["special"] for token in state["added_tokens"]}
    kinds = [(gguf.TokenType.CONTROL if added[name] else gguf.TokenType.USER_DEFINED) if name in added
             else gguf.TokenType.NORMAL for name in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(vocabulary[control[0]])
    writer.add_eos_token_id(vocabulary[control[-1]])
    if KINDS[pre].get("says_bos"):
        writer.add_add_bos_token(True)
    if control == QWEN_CONTROL:
        writer.add_chat_template(TEMPLATE)
        writer.add_add_bos_token(False)


def sentencepiece_tokenizer(writer):
    """A vocabulary of SentencePiece, with scores and byte tokens, and the tokenizer of transformers for it."""
    with tempfile.TemporaryDirectory() as folder:
        text, prefix = Path(folder) / "text", Path(folder) / "tokenizer"
        text.write_text(TEXT)
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(prefix), vocab_size=520, model_type="bpe", byte_fallback=True,
            character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
            split_digits=True, allow_whitespace_only_pieces=True, user_defined_symbols=["<tool>"], minloglevel=2)
        model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
        size = model.vocab_size()
        kinds = []
        for at in range(size):
            kinds.append(gguf.TokenType.UNKNOWN if model.is_unknown(at)
                         else gguf.TokenType.CONTROL if model.is_control(at)
                         else gguf.TokenType.BYTE if model.is_byte(at)
                         else gguf.TokenType.UNUSED if model.is_unused(at)
                         else gguf.TokenType.USER_DEFINED if model.id_to_piece(at) == "<tool>"
                         else gguf.TokenType.NORMAL)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([model.id_to_piece(at) for at in range(size)])
        writer.add_token_scores([model.get_score(at) for at in range(size)])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(False)
        tokenizer = LlamaTokenizer.from_pretrained(folder, add_bos_token=True)
        # As the tokenizer.json of Llama 2 has it; transformers' own class leaves a first space as it is.
        inner = tokenizer.backend_tokenizer
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.pre_tokenizer = None
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
        for text in SAMPLES:
            plain, own = model.encode(text, add_bos=True), tokenizer(text)["input_ids"]
            assert plain == own or "<s>" in text, (text, plain, own)
        return tokenizer


def vocabularies():
    golden = {"samples": SAMPLES, "vocabularies": {}}

    def written(name, keys):
        writer = gguf.GGUFWriter(OUT / f"vocab-{name}.gguf", "llama")
        result = keys(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return result

    for name in KINDS:
        tokenizer = trained(name)
        written(name, lambda writer: bpe_keys(writer, tokenizer, name, KINDS[name]["control"]))
        golden["vocabularies"][name] = [tokenizer(text)["input_ids"] for text in SAMPLES]
    tokenizer = written("sentencepiece", sentencepiece_tokenizer)
    golden["vocabularies"]["sentencepiece"] = [tokenizer(text)["input_ids"] for text in SAMPLES]
    (OUT / "tokenizers.json").write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")
    return trained("qwen2")


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    if "--families" not in sys.argv:
        blocks()
        written()
        all_models(vocabularies())
    families()
    for path in sorted(OUT.iterdir()):
        print(f"{path.stat().st_size:>8} {path.name}")
