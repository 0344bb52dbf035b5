#!/usr/bin/env python3
"""Writes configs.json: spellings of config.json, and the loss that transformers has for each.

    pip install torch transformers numpy
    python3 tests/golden/configs.py         # or: configs.py OUTPUT_FILE

A case is a raw `config.json`. Weights are no file: element `i` of the tensor that is number `k` by name is
`0.2 * sin(0.7391 * i + k)`, one more for the scale of a norm, in float32. The loss is the mean cross entropy of
`tokens` against the token behind each, by eager attention in float32 on the CPU.

Where Fireclay is to refuse a setting, `refused` names it, and there is no loss.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "configs.json"
VOCAB, LAYERS = 64, 3
TOKENS = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(24)]

LLAMA = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
)
GPT2 = dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=LAYERS, n_head=4)
LINEAR = dict(rope_type="linear", factor=4.0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0)
SLIDING, FULL = "sliding_attention", "full_attention"


def cases():
    """Family, what is added to its base, and the key that is to be refused, if one is."""
    yield "llama", {}, None
    # Where the base of rotary positions stands, and how they are scaled.
    yield "llama", {"rope_theta": 500.0}, None
    yield "llama", {"rope_theta": 500.0, "rope_scaling": None}, None
    yield "llama", {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}, None
    yield "llama", {"rope_theta": 500.0, "rope_scaling": LINEAR}, None
    yield "llama", {"rope_theta": 500.0, "rope_parameters": LINEAR}, None
    yield "llama", {"rope_parameters": LINEAR | {"rope_theta": 300.0}}, None
    yield "llama", {"rope_theta": 500.0, "rope_parameters": LINEAR | {"rope_theta": 300.0}}, None
    yield "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_scaling": LINEAR}, None
    yield "llama", {"rope_parameters": LINEAR}, None
    original = {"original_max_position_embeddings": 16}
    for scaling in [LLAMA3, YARN]:
        yield "llama", {"rope_theta": 100.0, "rope_scaling": scaling | original}, None
        yield "llama", {"rope_theta": 100.0, "rope_scaling": scaling} | original, None
        yield "llama", {"rope_theta": 100.0, "rope_parameters": scaling} | original, None
        yield "llama", {"rope_theta": 100.0, "rope_scaling": scaling}, None
    yield "llama", {"rope_theta": 100.0, "rope_scaling": YARN | original | {"truncate": True}}, None
    yield "llama", {"rope_theta": 100.0, "rope_scaling": YARN | original | {"truncate": False}}, "truncate"
    mscale = {"mscale": 0.7, "mscale_all_dim": 0.5}
    yield "llama", {"rope_theta": 100.0, "rope_scaling": YARN | original | mscale}, "mscale"
    yield "llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"
    yield "llama", {"head_dim": 6}, None
    yield "llama", {"sliding_window": 4}, None
    yield "llama", {"attention_bias": True, "mlp_bias": True}, None
    # What is not there, or null; `...` takes a key out.
    yield "llama", {"num_key_value_heads": ...}, None
    yield "llama", {"num_key_value_heads": None}, None
    yield "llama", {"max_position_embeddings": ..., "rms_norm_eps": ..., "tie_word_embeddings": ...}, None
    yield "llama", {"tie_word_embeddings": True}, None
    for activation in ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "swish"]:
        yield "llama", {"hidden_act": activation}, None
    yield "mistral", {"num_attention_heads": 8, "num_key_value_heads": ..., "max_position_embeddings": ...}, None
    yield "mistral", {"attention_bias": True}, None
    yield "qwen2", {"attention_bias": True}, None
    yield "qwen2", {"tie_word_embeddings": True, "max_position_embeddings": ...}, None
    yield "qwen3", {"attention_bias": True, "head_dim": 8}, None
    yield "qwen3", {"head_dim": 8, "tie_word_embeddings": True}, None
    # Windows.
    yield "mistral", {}, None
    yield "mistral", {"sliding_window": None}, None
    yield "mistral", {"sliding_window": 4}, None
    # transformers takes these for Ministral, which is Mistral with a window in some layers.
    for types in [[SLIDING] * 3, [FULL] * 3, [FULL, SLIDING, FULL]]:
        yield "mistral", {"head_dim": 8, "sliding_window": 4, "layer_types": types}, None
    for family in ["qwen2", "qwen3"]:
        yield family, {}, None
        yield family, {"sliding_window": 4}, None
        yield family, {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 0}, None
        for layers in [0, 1, 2, 3, 28]:
            yield family, {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": layers}, None
        yield family, {"sliding_window": 4, "use_sliding_window": True}, None
        yield family, {"use_sliding_window": True, "max_window_layers": 0}, None
        for types in [[SLIDING] * 3, [FULL] * 3, [FULL, SLIDING, FULL], [SLIDING, FULL, SLIDING]]:
            yield family, {"sliding_window": 4, "use_sliding_window": True, "layer_types": types}, None
    # GPT-2's own.
    yield "gpt2", {}, None
    yield "gpt2", {"n_inner": 40}, None
    yield "gpt2", {"n_inner": None, "n_positions": ...}, None
    other = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": 64}
    yield "gpt2", {"n_embd": ..., "n_layer": ..., "n_head": ..., "n_positions": ...} | other, None
    yield "gpt2", {"tie_word_embeddings": False}, None
    yield "gpt2", {"activation_function": "relu"}, None
    yield "gpt2", {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True}, None
    yield "gpt2", {"reorder_and_upcast_attn": True}, None
    yield "gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"
    yield "gpt2", {"scale_attn_weights": False}, "scale_attn_weights"


def weights(model):
    """The state of a model by the formula."""
    state = {}
    names = sorted(name for name, _ in model.named_parameters())
    for k, name in enumerate(names):
        shape = model.get_parameter(name).shape
        i = numpy.arange(numpy.prod(shape), dtype=numpy.float64)
        values = 0.2 * numpy.sin(0.7391 * i + k)
        if name.endswith("weight") and ("norm" in name or "ln_" in name):
            values += 1
        state[name] = torch.tensor(values.astype(numpy.float32)).reshape(shape)
    model.load_state_dict(state, strict=False)
    return {name: list(tensor.shape) for name, tensor in state.items()}


def main():
    tokens = torch.tensor([TOKENS])
    tensors, found = {}, []
    for family, more, refused in cases():
        config = (GPT2 if family == "gpt2" else LLAMA) | {"model_type": family} | more
        config = {key: value for key, value in config.items() if value is not ...}
        case = {"config": config}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), attn_implementation="eager", dtype=torch.float32
            ).eval()
        case["tensors"] = weights(model)
        if refused:
            case["refused"] = refused
        else:
            with torch.no_grad():
                case["loss"] = model(tokens, labels=tokens).loss.item()
        shapes = case.pop("tensors")
        key = json.dumps(shapes, sort_keys=True)
        case["shapes"] = tensors.setdefault(key, len(tensors))
        found.append(case)
        print(family, more, case.get("loss", f"refused: {refused}"))
    golden = {"tokens": TOKENS, "shapes": [json.loads(key) for key in tensors], "cases": found}
    lines = ",\n  ".join(json.dumps(case) for case in golden.pop("cases"))
    shapes = ",\n  ".join(json.dumps(shapes) for shapes in golden.pop("shapes"))
    OUT.write_text(f'{{"tokens": {json.dumps(TOKENS)},\n "shapes": [\n  {shapes}],\n "cases": [\n  {lines}]}}\n')


main()
