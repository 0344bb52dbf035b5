#!/usr/bin/env python3
"""Writes configs.json: spellings of config.json, and the loss that transformers has for each.

    pip install torch transformers numpy
    python3 tests/golden/configs.py         # or: configs.py OUTPUT_FILE

A case is a raw `config.json`. Weights are no file: element `i` of the tensor that is number `k` by name is
`0.2 * sin(0.7391 * i + k)`, one more for the scale of a norm, in float32. The loss is the mean cross entropy of
`tokens` against the token behind each, by eager attention in float32 on the CPU; `greedy` are the tokens that follow
the first eight of `tokens`. An encoder has `states` instead: the sum of its last hidden states, each times
`sin(0.1 * i)` of its place.

Where Fireclay is to refuse a setting, `refused` names it, and there is no loss.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "configs.json"
VOCAB, LAYERS = 64, 3
TOKENS = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(24)]

LLAMA = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
)
BERT = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    max_position_embeddings=64, hidden_dropout_prob=0.1,
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
    yield "llama", {"rope_theta": 100.0, "rope_scaling": YARN | original | {"truncate": False}}, None
    fast = {"beta_fast": 4.0, "beta_slow": 0.5}
    yield "llama", {"rope_theta": 100.0, "rope_scaling": YARN | original | fast}, None
    yield "llama", {"rope_theta": 100.0, "rope_scaling": YARN | original | fast | {"truncate": False}}, None
    yield "llama", {"rope_theta": 100.0, "rope_scaling": YARN | original | {"attention_factor": 1.3}}, None
    for mscale in [{"mscale": 0.7, "mscale_all_dim": 0.5}, {"mscale": 0.7}, {"mscale_all_dim": 0.5}]:
        yield "llama", {"rope_theta": 100.0, "rope_scaling": YARN | original | mscale}, None
    # Within the context it scales nothing.
    yield "llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, None
    yield "llama", {"rope_scaling": {"type": "dynamic", "factor": 8.0}, "max_position_embeddings": 24}, None
    # Up to the original context.
    long = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    original = {"original_max_position_embeddings": 32}
    yield "llama", {"rope_scaling": long | original | {"factor": 4.0}}, None
    yield "llama", {"rope_scaling": long} | original, None
    yield "llama", {"rope_parameters": long | original | {"attention_factor": 1.3, "rope_theta": 500.0}}, None
    yield "llama", {"rope_scaling": long | {"short_factor": [1.0]}} | original, "short_factor"
    original = {"original_max_position_embeddings": 16}
    yield "llama", {"partial_rotary_factor": 1.0}, None
    yield "llama", {"pruned_heads": {"0": [1]}}, "pruned_heads"
    for family in ["qwen2", "qwen3", "mistral"]:
        yield family, {"rope_theta": 500.0, "rope_scaling": LINEAR}, None
        yield family, {"rope_theta": 100.0, "rope_scaling": YARN | original}, None
        yield family, {"rope_theta": 100.0, "rope_parameters": LLAMA3 | original}, None
        yield family, {"hidden_act": "gelu", "rms_norm_eps": 1e-3}, None
    yield "llama", {"head_dim": 6}, None
    yield "llama", {"sliding_window": 4}, None
    yield "llama", {"attention_bias": True, "mlp_bias": True}, None
    # What is not there, or null; `...` takes a key out.
    yield "llama", {"num_key_value_heads": ...}, None
    yield "llama", {"num_key_value_heads": None}, None
    yield "llama", {"max_position_embeddings": ..., "rms_norm_eps": ..., "tie_word_embeddings": ...}, None
    yield "llama", {"tie_word_embeddings": True}, None
    activations = ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "swish", "relu2", "quick_gelu", "gelu_fast"]
    for activation in activations + ["gelu_python", "gelu_accurate", "gelu_python_tanh"]:
        yield "llama", {"hidden_act": activation}, None
        yield "gpt2", {"activation_function": activation}, None
    for activation in ["mish", "gelu_10", "laplace", "tanh"]:
        yield "llama", {"hidden_act": activation}, "hidden_act"
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
    yield "gpt2", {"layer_norm_epsilon": 1e-3}, None
    yield "gpt2", {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True}, None
    yield "gpt2", {"reorder_and_upcast_attn": True}, None
    yield "gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"
    yield "gpt2", {"scale_attn_weights": False}, "scale_attn_weights"
    # Encoders.
    yield "bert", {}, None
    yield "bert", {"type_vocab_size": ..., "layer_norm_eps": 1e-3}, None
    for activation in ["gelu_new", "relu", "silu", "gelu_fast"]:
        yield "bert", {"hidden_act": activation}, None
    yield "bert", {"position_embedding_type": "absolute", "pooler_type": "first_token_transform"}, None
    yield "bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"
    yield "bert", {"is_decoder": True}, "is_decoder"


def weights(model):
    """The state of a model by the formula."""
    state = {}
    names = sorted(name for name, _ in model.named_parameters())
    for k, name in enumerate(names):
        shape = model.get_parameter(name).shape
        i = numpy.arange(numpy.prod(shape), dtype=numpy.float64)
        values = 0.2 * numpy.sin(0.7391 * i + k)
        if name.endswith("weight") and any(norm in name for norm in ["norm", "ln_", "LayerNorm"]):
            values += 1
        state[name] = torch.tensor(values.astype(numpy.float32)).reshape(shape)
    model.load_state_dict(state, strict=False)
    return {name: list(tensor.shape) for name, tensor in state.items()}


def main():
    tokens = torch.tensor([TOKENS])
    tensors, found = {}, []
    for family, more, refused in cases():
        config = {"gpt2": GPT2, "bert": BERT}.get(family, LLAMA) | {"model_type": family} | more
        kind = AutoModel if family == "bert" else AutoModelForCausalLM
        config = {key: value for key, value in config.items() if value is not ...}
        case = {"config": config}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            # What is refused may be so there, too: the weights are as without it.
            without = "rope_scaling" if refused == "short_factor" else refused
            built = {key: value for key, value in config.items() if key != without}
            (Path(folder) / "config.json").write_text(json.dumps(built))
            loaded = AutoConfig.from_pretrained(folder)
            more = {"add_pooling_layer": False} if family == "bert" else {}
            model = kind.from_config(loaded, attn_implementation="eager", dtype=torch.float32, **more).eval()
        case["tensors"] = weights(model)
        if refused:
            case["refused"] = refused
        elif family == "bert":
            with torch.no_grad():
                states = model(tokens).last_hidden_state.flatten().double()
            case["states"] = (states * torch.sin(0.1 * torch.arange(len(states)).double())).sum().item()
        else:
            with torch.no_grad():
                case["loss"] = model(tokens, labels=tokens).loss.item()
                read = tokens[:, :8]
                for _ in range(min(16, loaded.max_position_embeddings - 8)):
                    read = torch.cat([read, model(read, use_cache=False).logits[:, -1:].argmax(-1)], 1)
                case["greedy"] = read[0, 8:].tolist()
        shapes = case.pop("tensors")
        key = json.dumps(shapes, sort_keys=True)
        case["shapes"] = tensors.setdefault(key, len(tensors))
        found.append(case)
        print(config, case.get("loss", case.get("states", f"refused: {refused}")))
    golden = {"tokens": TOKENS, "shapes": [json.loads(key) for key in tensors], "cases": found}
    lines = ",\n  ".join(json.dumps(case) for case in golden.pop("cases"))
    shapes = ",\n  ".join(json.dumps(shapes) for shapes in golden.pop("shapes"))
    OUT.write_text(f'{{"tokens": {json.dumps(TOKENS)},\n "shapes": [\n  {shapes}],\n "cases": [\n  {lines}]}}\n')


main()
