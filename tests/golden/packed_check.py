#!/usr/bin/env python3
"""Compares the dequantized GPTQ and AWQ matrices of `packed/golden.safetensors` with those of auto-gptq and autoawq.

    pip install torch transformers safetensors numpy
    pip download --no-deps auto-gptq autoawq       # unpack both into FOLDER
    python3 tests/golden/packed_check.py FOLDER

Neither package installs with current versions of PyTorch, so their modules are loaded alone.
auto-gptq reads checkpoints of version 1 only, whose stored zero points are one less: those of
version 2 are lowered by one first.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

PACKED = Path(__file__).resolve().parent / "packed"


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def found(folder: Path, name: str):
    return module(next(folder.rglob(name)))


def main() -> None:
    folder = Path(sys.argv[1])
    linear = found(folder, "qlinear_cuda.py").QuantLinear
    unpacking = found(folder, "packing_utils.py")
    golden = safe_open(PACKED / "golden.safetensors", "pt")
    for name in ["gptq_2", "gptq_3", "gptq_4", "gptq_4_act_order", "gptq_8", "awq"]:
        config = json.loads((PACKED / name / "config.json").read_text())["quantization_config"]
        bits, size = config["bits"], config["group_size"]
        stored = safe_open(PACKED / name / "model.safetensors", "pt")
        part = {
            key: stored.get_tensor(f"model.layers.0.mlp.down_proj.{key}") for key in ["qweight", "qzeros", "scales"]
        }
        if name == "awq":
            weight = unpacking.dequantize_gemm(part["qweight"], part["qzeros"], part["scales"], bits, size)
        else:
            if config["checkpoint_format"] == "gptq_v2":
                ones = sum(1 << at for at in range(0, 32, bits))
                part["qzeros"] = (part["qzeros"].long() - ones).to(torch.int32)
            inputs = part["qweight"].shape[0] * 32 // bits
            layer = linear(bits, size, inputs, part["qweight"].shape[1], False)
            part["g_idx"] = stored.get_tensor("model.layers.0.mlp.down_proj.g_idx")
            for key, value in part.items():
                layer.register_buffer(key, value)
            weight = layer(torch.eye(inputs, dtype=torch.float16))
        equal = torch.equal(weight.T[::3], golden.get_tensor(f"{name}.down_proj"))
        print(f"{name}: {'equal' if equal else 'DIFFERENT'}")
        if not equal:
            sys.exit(1)


if __name__ == "__main__":
    main()
