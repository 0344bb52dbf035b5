"""Tensors are exported without a copy, and arrays of token ids are accepted."""

from __future__ import annotations

import gc
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fireclay
import numpy as np
import numpy.typing as npt
import pytest
from conftest import BACKEND

Array = npt.NDArray[Any]
on_cpu = pytest.mark.skipif(BACKEND != "cpu", reason="NumPy reads the host's memory alone")


def safetensors(path: Path) -> dict[str, Array]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    dtypes = {"F32": np.float32, "I32": np.int32, "I64": np.int64}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            values = np.frombuffer(data[8 + length + begin : 8 + length + end], dtypes[entry["dtype"]])
            tensors[name] = values.reshape(entry["shape"])
    return tensors


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(golden: Callable[[str], Path], family: str) -> None:
    folder = golden(family)
    wanted = safetensors(folder / "golden.safetensors")
    with fireclay.load(folder, backend=BACKEND) as model:
        logits = model.logits(wanted["tokens"])
        assert logits.dtype == "float32"
        assert np.abs(logits.numpy() - wanted["logits"]).max() < 1e-4
        for row, expected in zip(wanted["tokens"].tolist(), wanted["logits"], strict=True):
            assert np.abs(np.asarray(model.logits(row))[0] - expected).max() < 1e-4


def test_ids_come_in_as_lists_and_as_arrays(model: fireclay.Model) -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 8]]
    wanted = model.hidden_states(rows).numpy()
    assert wanted.shape == (2, 4, model.config["d_model"])
    for dtype in (np.int64, np.int32, np.uint16, np.uint8):
        array = np.array(rows, dtype)
        array.flags.writeable = False
        assert (model.hidden_states(array).numpy() == wanted).all()
    strided = np.array(rows, np.int64).T.copy().T
    assert strided.strides[0] == 8 and (model.hidden_states(strided).numpy() == wanted).all()
    assert (model.hidden_states(np.array(rows)[::-1]).numpy() == wanted[::-1]).all()


def test_ids_that_the_model_does_not_know_are_refused(model: fireclay.Model) -> None:
    known, context = model.config["vocab_size"], model.config["context_length"]
    for ids, match in [
        ([known], f"token {known} "),
        ([-1], "token -1 "),
        ([], "0 tokens"),
        ([1] * (context + 1), f"{context + 1} tokens"),
        ([[1, 2], [3]], "one length"),
        (np.array([1.5]), "integers"),
        (np.zeros((1, 1, 1), np.int64), "dimensions"),
        ("text", "token ids"),
    ]:
        with pytest.raises((fireclay.UsageError, BufferError), match=match):
            model.logits(ids)  # type: ignore[arg-type]


@on_cpu
def test_numpy_reads_in_place(model: fireclay.Model) -> None:
    logits = model.logits([1, 2, 3])
    first, second = np.from_dlpack(logits), np.from_dlpack(logits)
    assert first.__array_interface__["data"][0] == second.__array_interface__["data"][0]
    assert not first.flags.writeable
    kept = first.copy()
    del logits, second
    gc.collect()
    # The next result must use other memory.
    for _ in range(50):
        model.logits([3, 2, 1])
    assert (first == kept).all()


@on_cpu
def test_parameters_are_views(model: fireclay.Model, stories: Path) -> None:
    parameters = model.parameters()
    again = model.parameters()
    assert "embedding" in parameters and any(name.startswith("blocks.1.") for name in parameters)
    for name, tensor in parameters.items():
        view, other = tensor.numpy(), again[name].numpy()
        assert view.shape == tensor.shape
        assert view.__array_interface__["data"][0] == other.__array_interface__["data"][0]
    saved = safetensors(stories / "model.safetensors")
    table = next(values for name, values in saved.items() if name.endswith(("wte.weight", "embed_tokens.weight")))
    assert (parameters["embedding"].numpy() == table).all()


@on_cpu
def test_pytorch_reads_in_place(model: fireclay.Model) -> None:
    torch = pytest.importorskip("torch")
    logits = model.logits([1, 2, 3])
    view = torch.from_dlpack(logits)
    assert view.data_ptr() == np.from_dlpack(logits).__array_interface__["data"][0]
    assert torch.equal(view, torch.tensor(logits.tolist()))
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(torch.from_dlpack(model.logits(ids)), view)


@on_cpu
def test_what_dlpack_cannot_do_is_refused(model: fireclay.Model) -> None:
    logits = model.logits([1, 2, 3])
    assert logits.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError):
        logits.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError):
        logits.__dlpack__(stream=5)
    # A capsule that no consumer takes must free its memory.
    for version in (None, (1, 0)):
        assert "dltensor" in repr(logits.__dlpack__(max_version=version))


def test_attention_is_a_distribution_over_what_came_before(model: fireclay.Model) -> None:
    layers = model.attention([[1, 2, 3, 4, 5]])
    assert len(layers) == model.config["n_layers"]
    for layer in layers:
        weights = layer.numpy()
        assert weights.shape == (1, model.config["n_heads"], 5, 5)
        assert np.allclose(weights.sum(-1), 1.0, atol=1e-5)
        assert (np.triu(weights[0, 0], 1) == 0).all()
