#!/usr/bin/env python3
"""Writes the golden quantized checkpoints in `packed/` next to this script.

    pip install torch transformers safetensors numpy bitsandbytes compressed-tensors
    python3 tests/golden/packed.py            # or: packed.py OUTPUT_FOLDER

Needs no network: each model is a Llama of one layer with random weights, quantized in one way.

    <name>/config.json, model.safetensors    a checkpoint as the method's own package lays it out
    golden.safetensors                       tokens, and for each name
        <name>.logits                        transformers, in float64, on the dequantized weights,
                                             of GPTQ and AWQ before they are rounded to f16
        <name>.down_proj                     every third row of the dequantized matrix of
                                             model.layers.0.mlp.down_proj, in the dtype that the
                                             package computes it in

bitsandbytes and compressed-tensors quantize and dequantize here; that transformers computes the
same of their folders is asserted (but for zero points of compressed-tensors, which transformers
5.24 does not load). FP8 is dequantized by transformers' own class, MXFP4 by its function. GPTQ and
AWQ are packed and dequantized by the formulas that gptqmodel (`dequantize_weight` of its linear
layers, and the conversion of version 1) and autoawq (`dequantize_gemm`) publish, written anew in
numpy, since these packages do not install with current versions of PyTorch; `packed_check.py`
compares the results with theirs.
"""

import json
import shutil
import sys
from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT = (Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent) / "packed"
VOCAB = 61
GOLDEN = {}


def model(width=96, **more):
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=width, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5,
                         tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
                         **more)
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.1 if p.dim() == 1 else 0.12)
            p.copy_(p.half().float())
    return made.eval()


def write(name, method, pack, width=96, keep=torch.float16, check=False):
    """`pack(key, weight)` gives the tensors of a linear layer, by what follows its name, the
    dequantized weight, and that before it is rounded, where it is."""
    made = model(width)
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors, dequantized, used = {}, {}, {}
    for key, value in made.state_dict().items():
        if key.endswith("_proj.weight"):
            base = key.removesuffix(".weight")
            parts, own, *exact = pack(base, value.clone())
            tensors |= {f"{base}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            dequantized[key] = own
            used[key] = (exact or [own])[0].float()
        else:
            tensors[key] = value.to(keep)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(made.config.to_json_string())
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float16", "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    made.load_state_dict(used, strict=False)
    torch.manual_seed(3)
    tokens = torch.randint(0, VOCAB, (1, 12))
    with torch.no_grad():
        logits = made.double()(input_ids=tokens, use_cache=False).logits.float()
    if check:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
        # bitsandbytes multiplies on the CPU in bf16.
        loaded = loaded.dequantize().float() if method["quant_method"] == "bitsandbytes" else loaded
        with torch.no_grad():
            off = (loaded(input_ids=tokens, use_cache=False).logits - logits).abs().max()
        print(f"{name}: transformers is off by {off:.1e}")
        assert off < 1e-3, (name, off)
    GOLDEN["tokens"] = tokens.int()
    GOLDEN[f"{name}.logits"] = logits
    GOLDEN[f"{name}.down_proj"] = dequantized["model.layers.0.mlp.down_proj.weight"][::3]


# ---------------------------------------------------------------- bitsandbytes

def bnb4(kind, nested):
    def pack(base, weight):
        packed, state = bnb.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        parts = {"weight": packed}
        parts |= {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        # Blocks run on from row to row; the package's kernel for the CPU takes each for a row's
        # own, so it gets them as rows.
        shape, state.shape = state.shape, torch.Size([weight.numel() // 64, 64])
        return parts, bnb.dequantize_4bit(packed, state).reshape(shape)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True,
              "_load_in_8bit": False, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested,
              "bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage": "uint8",
              "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
              "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0}
    return config, pack


def bnb8(base, weight):
    packed, largest, _ = bnb.int8_vectorwise_quant(weight.half())
    return {"weight": packed, "SCB": largest.float(), "weight_format": torch.tensor(0, dtype=torch.uint8)}, \
        bnb.int8_vectorwise_dequant(packed, largest.float())


# ---------------------------------------------------------------- GPTQ and AWQ

def words(codes, bits):
    """Codes along the last axis as one stream of bits, lowest first, in int32 words."""
    bit = (codes[..., None].astype(np.uint32) >> np.arange(bits, dtype=np.uint32)) & 1
    stream = bit.reshape(*codes.shape[:-1], -1, 32)
    return (stream.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def rounded(weight, groups, bits, symmetric):
    """Codes [out, in], scales and zeros [groups, out], by each group's least and most."""
    count, most = groups.max() + 1, 2 ** bits - 1
    scales = np.zeros((count, weight.shape[0]), dtype=np.float16)
    zeros = np.zeros((count, weight.shape[0]), dtype=np.int64)
    codes = np.zeros(weight.shape, dtype=np.int64)
    for group in range(count):
        own = weight[:, groups == group]
        low, high = np.minimum(own.min(1), 0), np.maximum(own.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[group] = ((high - low) / most).astype(np.float16)
        zeros[group] = 2 ** (bits - 1) if symmetric else np.clip(
            np.round(-low / scales[group].astype(np.float32)), 1, most)
        codes[:, groups == group] = np.clip(
            np.round(own / scales[group].astype(np.float32)[:, None]) + zeros[group][:, None], 0, most)
    return codes, scales, zeros


def gptq(bits, size, symmetric=True, act_order=False, version=1):
    def pack(base, weight):
        weight = weight.numpy()
        inputs = weight.shape[1]
        groups = np.arange(inputs) // (inputs if size == -1 else size)
        if act_order:
            groups = np.random.default_rng(inputs).permutation(groups)
        codes, scales, zeros = rounded(weight, groups, bits, symmetric)
        parts = {"qweight": torch.from_numpy(words(codes, bits).T.copy()), "scales": torch.from_numpy(scales),
                 "qzeros": torch.from_numpy(words(zeros - (version == 1), bits)),
                 "g_idx": torch.from_numpy(groups.astype(np.int32))}
        # scales[g_idx] * (weight - zeros[g_idx]), in f16.
        own = scales[groups] * (codes.T - zeros[groups]).astype(np.float16)
        exact = scales[groups].astype(np.float32) * (codes.T - zeros[groups]).astype(np.float32)
        return parts, torch.from_numpy(own.T.copy()), torch.from_numpy(exact.T.copy())
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": symmetric,
              "true_sequential": True, "damp_percent": 0.01, "lm_head": False, "pack_dtype": "int32",
              "meta": {"quantizer": ["x"]},
              "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    return config, pack


def awq(base, weight):
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    weight = weight.numpy()
    groups = np.arange(weight.shape[1]) // 32
    codes, scales, zeros = rounded(weight, groups, 4, False)

    def packed(rows):  # [.., out]
        eights = rows.reshape(*rows.shape[:-1], -1, 8)[..., order]
        return torch.from_numpy(words(eights.reshape(rows.shape), 4))
    # (iweight - izeros) * scales, in f16.
    own = (codes.T - zeros[groups]).astype(np.float16) * scales[groups]
    exact = (codes.T - zeros[groups]).astype(np.float32) * scales[groups].astype(np.float32)
    return {"qweight": packed(codes.T), "qzeros": packed(zeros), "scales": torch.from_numpy(scales)}, \
        torch.from_numpy(own.T.copy()), torch.from_numpy(exact.T.copy())


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
       "modules_to_not_convert": None}


# ---------------------------------------------------------------- FP8

def to_fp8(weight, scale):
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_block(base, weight):
    rows, columns = weight.shape
    scales = torch.zeros((rows + 127) // 128, (columns + 127) // 128)
    wide = torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[at].abs().max() / 448
            wide[at] = scales[i, j]
    packed = to_fp8(weight, wide)
    # Blocks that are cut off are none to transformers' class: padded, as DeepSeek's own program does.
    padded = torch.zeros(128 * scales.shape[0], 128 * scales.shape[1])
    padded[:rows, :columns] = packed.float()
    own = Fp8Dequantize(None)._dequantize_one(padded.to(torch.float8_e4m3fn), scales, torch.float32)[:rows, :columns]
    return {"weight": packed, "weight_scale_inv": scales}, own.clone()


def fp8_tensor(base, weight):
    scale = weight.abs().max() / 448
    packed = to_fp8(weight, scale)
    own = Fp8Dequantize(None)._dequantize_one(packed, scale.reshape(1, 1), torch.float32)
    return {"weight": packed, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.02)}, own


def fbgemm(base, weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    packed = to_fp8(weight, scale)
    return {"weight": packed, "weight_scale": scale, "input_scale_ub": torch.tensor([1200.0])}, packed.float() * scale


# ---------------------------------------------------------------- compressed-tensors

def compressed(form, **args):
    weights = QuantizationArgs(**args)
    has_zeros = not weights.symmetric

    def pack(base, weight):
        size = weights.group_size or weight.shape[1]
        groups = weight.reshape(weight.shape[0], -1, size)
        low, high = groups.amin(2), groups.amax(2)
        if weights.type == "float":
            scale, zero = groups.abs().amax(2) / 448, None
        elif has_zeros:
            scale = ((high - low) / (2 ** weights.num_bits - 1)).bfloat16().float()
            zero = (-(2 ** (weights.num_bits - 1)) - low / scale).round().clamp(
                -2 ** (weights.num_bits - 1), 2 ** (weights.num_bits - 1) - 1)
            zero = zero.to(torch.int8)
        else:
            scale, zero = (groups.abs().amax(2) / (2 ** (weights.num_bits - 1))).bfloat16().float(), None
        codes = quantize(x=weight, scale=scale, zero_point=zero, args=weights, dtype=weights.pytorch_dtype())
        parts = {"weight_scale": scale.bfloat16() if weights.type == "int" else scale}
        if form == "pack-quantized":
            parts |= {"weight_packed": pack_to_int32(codes, weights.num_bits),
                      "weight_shape": torch.tensor(weight.shape)}
            if has_zeros:
                parts["weight_zero_point"] = pack_to_int32(zero, weights.num_bits, packed_dim=0)
                zero = unpack_from_int32(parts["weight_zero_point"], weights.num_bits, zero.shape, packed_dim=0)
            codes = unpack_from_int32(parts["weight_packed"], weights.num_bits, codes.shape)
        else:
            parts["weight"] = codes
        return parts, dequantize(x_q=codes, scale=scale, zero_point=zero, args=weights)
    activations = None if form == "pack-quantized" else {
        "num_bits": 8, "type": args["type"], "dynamic": True, "strategy": "token"}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
              "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": 1.5,
              "config_groups": {"group_0": {
                  "targets": ["Linear"], "input_activations": activations, "output_activations": None,
                  "weights": {"dynamic": False, "observer": "minmax", "actorder": None} | args}}}
    return config, pack


# ---------------------------------------------------------------- MXFP4

def mxfp4():
    """A stack of matrices without a model: `x` [2, 6, 64]."""
    rng = np.random.default_rng(4)
    blocks = torch.from_numpy(rng.integers(0, 256, (2, 6, 2, 16), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(118, 131, (2, 6, 2), dtype=np.uint8))
    own = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    folder = OUT / "mxfp4"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"x_blocks": blocks, "x_scales": scales}, folder / "model.safetensors")
    config = json.loads(model().config.to_json_string())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}) + "\n")
    # [experts, in, out], as gpt-oss multiplies.
    GOLDEN["mxfp4.x"] = own.transpose(1, 2).contiguous()


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    for name, kind, nested in [("nf4", "nf4", False), ("nf4_nested", "nf4", True), ("fp4", "fp4", False)]:
        config, pack = bnb4(kind, nested)
        # Rows that end within a block: bitsandbytes' own layer cannot multiply them on the CPU.
        straddles = kind == "fp4"
        write(name, config, pack, width=96 if straddles else 128, check=not straddles)
    config, _ = bnb4("nf4", False)
    write("bnb_int8",
          config | {"load_in_4bit": False, "load_in_8bit": True, "_load_in_4bit": False, "_load_in_8bit": True},
          bnb8)
    write("gptq_4", *gptq(4, 32))
    write("gptq_4_act_order", *gptq(4, 32, symmetric=False, act_order=True))
    write("gptq_8", *gptq(8, -1, version=2))
    write("gptq_3", *gptq(3, 32, symmetric=False))
    write("gptq_2", *gptq(2, 32, symmetric=False, version=2))
    write("awq", AWQ, awq)
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    write("fp8_block", fp8 | {"weight_block_size": [128, 128]}, fp8_block, width=160)
    write("fp8_tensor", fp8 | {"activation_scheme": "static", "weight_block_size": None}, fp8_tensor)
    write("fbgemm_fp8", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fbgemm)
    write("float_quantized",
          *compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True))
    write("int_quantized", *compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True))
    write("packed_4",
          *compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
          check=True)
    write("packed_4_zeros",
          *compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False))
    mxfp4()
    save_file({name: value.contiguous().clone() for name, value in GOLDEN.items()}, OUT / "golden.safetensors")
    for path in sorted(OUT.rglob("*")):
        print(f"{path.stat().st_size:>8} {path.relative_to(OUT)}")
