#!/usr/bin/env python3
"""Writes GGUF files of Qwen3-0.6B's shape with random weights, for measurements.

    pip install gguf numpy
    python3 benches/gguf_files.py OUTPUT_FOLDER [q8_0 q4_0 q4_k_m f16 bf16]

A file has a tokenizer of single bytes and tokens that no text has. Blocks of q4_k_m are of any
bits, with Q6_K where llama.cpp's files of that name have it: the table, and the values and second
feed-forward matrices of half of the layers.
"""

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

LAYERS, D, D_FF, HEADS, KV_HEADS, HEAD, VOCABULARY = 28, 1024, 3072, 16, 8, 128, 151_936
KINDS = {"q8_0": T.Q8_0, "q4_0": T.Q4_0, "q4_k_m": T.Q4_K, "f16": T.F16, "bf16": T.BF16}
# Where a block of these has f16, and what stands there.
SCALES = {T.Q4_K: ([0, 2], [3e-4, 2e-3]), T.Q6_K: ([208], [3e-5])}


def tensor(rng, kind, rows, columns):
    if kind in SCALES:
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
        for at, scale in zip(*SCALES[kind]):
            blocks[:, :, at:at + 2] = np.array([scale], np.float16).view(np.uint8)
        return blocks.reshape(rows, -1)
    values = rng.standard_normal((rows, columns), dtype=np.float32) * 0.02
    return gguf.quants.quantize(values, kind)


def more_bits(layer):
    """The layers of which llama.cpp's Q4_K_M stores two matrices in Q6_K."""
    eighth = LAYERS // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def write(path, name):
    kind, rng = KINDS[name], np.random.default_rng(1)
    large = T.Q6_K if name == "q4_k_m" else kind
    out = gguf.GGUFWriter(str(path), "qwen3")
    out.add_name("random weights")
    out.add_context_length(4096)
    out.add_embedding_length(D)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(D_FF)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_key_length(HEAD)
    out.add_value_length(HEAD)
    out.add_rope_freq_base(1e6)
    out.add_layer_norm_rms_eps(1e-6)
    # GPT-2's letters for bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + at) for at in range(len(others))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(letters + ["\u0100\u0100"] + [f"<unused {at}>" for at in range(VOCABULARY - 257)])
    out.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    # Of two zeros, which no text has: a list of none is refused.
    out.add_token_merges(["\u0100 \u0100"])
    out.add_add_bos_token(False)

    def add(name, kind, rows, columns):
        out.add_tensor(f"{name}.weight", tensor(rng, kind, rows, columns), raw_dtype=kind)

    def norm(name, size):
        out.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    add("token_embd", large, VOCABULARY, D)
    norm("output_norm", D)
    for layer in range(LAYERS):
        at, upper = f"blk.{layer}", large if more_bits(layer) else kind
        norm(f"{at}.attn_norm", D)
        norm(f"{at}.attn_q_norm", HEAD)
        norm(f"{at}.attn_k_norm", HEAD)
        add(f"{at}.attn_q", kind, HEADS * HEAD, D)
        add(f"{at}.attn_k", kind, KV_HEADS * HEAD, D)
        add(f"{at}.attn_v", upper, KV_HEADS * HEAD, D)
        add(f"{at}.attn_output", kind, D, HEADS * HEAD)
        norm(f"{at}.ffn_norm", D)
        add(f"{at}.ffn_gate", kind, D_FF, D)
        add(f"{at}.ffn_up", kind, D_FF, D)
        add(f"{at}.ffn_down", upper, D, D_FF)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


folder = Path(sys.argv[1])
for name in sys.argv[2:] or KINDS:
    write(folder / f"qwen3-0.6b-{name}.gguf", name)
