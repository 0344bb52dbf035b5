"""Tensors shared with PyTorch on a GPU: `FIRECLAY_TEST_BACKEND=cuda python -m pytest python/tests/test_cuda.py -s`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import fireclay
import numpy as np
import pytest
from conftest import BACKEND

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(BACKEND != "cuda", reason="for CUDA")

ROUNDS = 1000
# Cycles that a reader takes: longer than all that is computed meanwhile.
READING = 80_000_000


def test_pytorch_reads_in_place(model: fireclay.Model) -> None:
    logits = model.logits([1, 2, 3])
    first, second = torch.from_dlpack(logits), torch.from_dlpack(logits)
    assert first.is_cuda and first.data_ptr() == second.data_ptr()
    assert np.array_equal(first.cpu().numpy(), logits.numpy())
    for name, tensor in model.parameters().items():
        view = torch.from_dlpack(tensor)
        assert view.data_ptr() == torch.from_dlpack(model.parameters()[name]).data_ptr()
        assert tuple(view.shape) == tensor.shape
        break
    ids = torch.tensor([[1, 2, 3]], device="cuda")
    assert torch.equal(torch.from_dlpack(model.logits(ids)), first)


def test_readers_are_waited_for_and_wait(stories: Path) -> None:
    """A consumer reads late, on its own stream, after the tensor is dropped: its memory must not be reused before."""
    generator = np.random.default_rng(0)
    with fireclay.load(stories, backend=BACKEND) as model:
        rows = [generator.integers(0, model.config["vocab_size"], (16, 64)) for _ in range(8)]
        wanted = [torch.from_numpy(np.array(model.logits(row).numpy())).cuda() for row in rows]
        assert not torch.equal(wanted[0], wanted[1])
        streams = [torch.cuda.Stream() for _ in range(3)]
        wrong = 0
        reused = 0
        for round_ in range(ROUNDS):
            at = round_ % len(rows)
            stream = streams[round_ % len(streams)]
            logits = model.logits(rows[at])
            with torch.cuda.stream(stream):
                view = torch.from_dlpack(logits)
                torch.cuda._sleep(READING)
                copy = view.clone()
            address = view.data_ptr()
            del logits, view
            # Tensors of the same size and with other values would overwrite the memory.
            poison = [model.logits(rows[(at + other) % len(rows)]) for other in range(1, 4)]
            addresses = {torch.from_dlpack(tensor).data_ptr() for tensor in poison}
            reused += address in addresses
            del poison
            stream.synchronize()
            wrong += not torch.equal(copy, wanted[at])
        print(f"\n{wrong} wrong of {ROUNDS} rounds; in {reused} the next tensors had that memory while it was read")
        assert wrong == 0 and reused == 0
        # After the consumer has finished, the memory must be reused: otherwise the loop above proves nothing.
        again = 0
        for _ in range(20):
            logits = model.logits(rows[0])
            view = torch.from_dlpack(logits)
            address = view.data_ptr()
            del logits, view
            gc.collect()
            torch.cuda.synchronize()
            poison = [model.logits(rows[1]) for _ in range(8)]
            again += address in {torch.from_dlpack(tensor).data_ptr() for tensor in poison}
        print(f"{again} of 20 had the memory of a tensor whose reader was through")
        assert again > 0
