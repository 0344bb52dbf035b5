#!/usr/bin/env python3
"""Writes adapters/: what PEFT computes with adapters on the models in this folder.

    pip install torch transformers peft
    python3 tests/golden/adapters.py

Each case has a folder with adapter_config.json and adapter_model.safetensors as save_pretrained
writes them, and golden.safetensors: `ids` [2, 12], `logits` [2, 12, vocabulary] of the model with
the adapter, `loss` [1], the mean cross entropy of each next token, and
`gradient.<name in the adapter's file>`.
"""
import pathlib
import shutil

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "adapters"
shutil.rmtree(OUT, ignore_errors=True)

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": ("llama", dict(r=4, lora_alpha=8, target_modules=LINEAR)),
    "qwen2_rslora": (
        "qwen2",
        dict(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"]),
    ),
    "qwen3_patterns": (
        "qwen3",
        dict(
            r=4,
            lora_alpha=8,
            target_modules=r".*\.(q|k|o|up)_proj",
            rank_pattern={r"layers\.1\.self_attn\.q_proj": 2},
            alpha_pattern={"k_proj": 3},
        ),
    ),
    "gpt2_saved": (
        "gpt2",
        dict(
            r=3,
            lora_alpha=6,
            target_modules=["c_attn", "mlp.c_proj"],
            fan_in_fan_out=True,
            modules_to_save=["ln_f"],
        ),
    ),
    "llama_dora": (
        "llama",
        dict(r=4, lora_alpha=8, use_dora=True, target_modules=["q_proj", "gate_proj", "down_proj"]),
    ),
    "llama_tokens": (
        "llama",
        dict(r=2, lora_alpha=4, target_modules=["v_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    ),
}

for name, (base, options) in CASES.items():
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_pretrained(HERE / base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in key:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "lora_B" in key else 0.1))
            elif parameter.requires_grad:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    ids = torch.randint(0, model.config.vocab_size, (2, 12))
    logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    folder = OUT / name
    model.peft_config["default"].base_model_name_or_path = f"../../{base}"
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    golden = {"ids": ids.int(), "logits": logits.detach().contiguous(), "loss": loss.detach()[None]}
    saved = load_file(folder / "adapter_model.safetensors")
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            short = key.replace(".default", "").replace(".modules_to_save", "")
            short = short.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
            assert short in saved, short
            golden[f"gradient.{short}"] = parameter.grad.contiguous()
    save_file(golden, folder / "golden.safetensors")
