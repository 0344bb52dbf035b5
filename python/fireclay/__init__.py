"""Fireclay: train and run transformers, on CUDA or the CPU.

>>> import fireclay
>>> model = fireclay.load("runs/stories", backend="cpu")  # doctest: +SKIP
>>> model.generate("Once", max_tokens=20)  # doctest: +SKIP

Calls release the GIL while they compute, and Ctrl-C interrupts them. Errors are
:class:`fireclay.Error`. Nothing is printed: notices go to the logger ``fireclay``.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from . import _cuda, _native
from ._errors import DeviceError, Error, UsageError
from ._native import Generated, Model, Prediction, Profile, Span, Step, Stream, Tensor, Tokenizer
from ._progress import with_bar

__version__: str = _native.__version__
__all__ = [
    "Backend",
    "Device",
    "DeviceError",
    "Error",
    "Generated",
    "Model",
    "Prediction",
    "Profile",
    "Run",
    "Span",
    "Step",
    "Stream",
    "Tensor",
    "Tokenizer",
    "Trainer",
    "UsageError",
    "devices",
    "load",
    "profile",
    "train",
]

# Stops all work while its threads can still take the GIL.
atexit.register(_native._end)

Path_ = str | os.PathLike[str]
BackendName = Literal["cpu", "cuda", "vulkan", "wgpu"]
Precision = Literal["f32", "tf32", "bf16", "f16", "int8"]
Event = dict[str, Any]
"""An event of a run, in the format of ``metrics.jsonl``: ``event`` is ``train``, ``valid``,
``sample``, ``confusions`` or ``warning``."""


def load(
    model: Path_,
    *,
    backend: BackendName | None = None,
    precision: Precision = "f32",
    cache_dtype: Literal["auto", "int8"] = "auto",
) -> Model:
    """Load a model: a folder in the layout of the hub, a ``.gguf`` file, or ``OWNER/NAME``, which is downloaded once.

    ``backend`` defaults to the fastest one available. ``precision`` is the data type of matrices
    and activations, ``cache_dtype`` that of the KV cache.
    """
    _cuda.prepare()
    return _native.load(model, backend=backend, precision=precision, cache_dtype=cache_dtype)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    """The run folder: the model in the layout of the hub, checkpoints in ``training/``,
    ``metrics.jsonl`` and ``loss.svg``."""
    summary: dict[str, Any]
    """The last line of ``train --json``: ``valid_loss``, ``tokens_per_second`` and so on."""

    @property
    def metrics(self) -> list[Event]:
        """All events of the run, in order."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def losses(self) -> tuple[list[int], list[float]]:
        """Steps and their training losses, in nats per target."""
        trained = [event for event in self.metrics if event["event"] == "train"]
        return [event["step"] for event in trained], [event["loss"] for event in trained]

    def load(self, *, backend: BackendName | None = None, precision: Precision = "f32") -> Model:
        """The best model of the run."""
        return load(self.path, backend=backend, precision=precision)


def train(
    recipe: Path_ | None = None,
    *,
    task: Literal["language", "masked", "chat", "preference", "intent-slot", "classify"] | None = None,
    data: Path_ | None = None,
    field: str | None = None,
    init: Path_ | None = None,
    precision: Precision | None = None,
    backend: BackendName | None = None,
    out: Path_ | None = None,
    resume: Path_ | None = None,
    allow_changed_data: bool = False,
    on_event: Callable[[Event], object] | None = None,
    **overrides: Any,
) -> Run:
    """Train a model, as ``fireclay train`` does, from a recipe (a name or a file) with changed settings.

    ``overrides`` are keys of the recipe, such as ``steps=100``, or with their section
    ``training__steps=100``. ``on_event`` is called with each event, on this thread. An exception in
    it stops the run, as Ctrl-C does; the exception is raised once the run is saved, and
    ``train(resume=FOLDER)`` continues the run.
    """
    _cuda.prepare()
    if resume is not None and not (recipe is task is data is init is out is None):
        raise UsageError("resume continues a run: leave out recipe, task, data, init and out")
    steps = overrides.get("steps", overrides.get("training__steps"))
    path, summary = _native._train(
        recipe,
        task,
        data,
        field,
        init,
        precision,
        backend,
        out,
        resume,
        allow_changed_data,
        with_bar(steps, on_event),
        overrides,
    )
    return Run(Path(path), summary)


class Trainer(_native.Trainer):
    """A model in training, for custom loops.

    >>> trainer = fireclay.Trainer("stories", backend="cpu", d_model=16, n_layers=1)  # doctest: +SKIP
    >>> loss = float(trainer.step(input_ids, target_ids))  # doctest: +SKIP

    The recipe determines shape, optimizer, schedule and tokenizer; ``init`` is a model to start from.
    """

    def __new__(cls, *arguments: Any, **keywords: Any) -> Trainer:
        _cuda.prepare()
        return super().__new__(cls, *arguments, **keywords)


def profile(
    what: Literal["train", "generate", "predict"],
    *,
    recipe: Path_ | None = None,
    data: Path_ | None = None,
    model: Path_ | None = None,
    prompt: str | None = None,
    utterances: Sequence[str] | None = None,
    batch: int = 1,
    precision: Precision | None = None,
    backend: BackendName | None = None,
    count: int = 20,
    warm_up: int = 10,
) -> Profile:
    """Profile training, generation or prediction, as ``fireclay profile`` does. ``print`` shows the table."""
    _cuda.prepare()
    return _native._profile(
        what,
        recipe,
        data,
        model,
        prompt,
        None if utterances is None else list(utterances),
        batch,
        precision,
        backend,
        count,
        warm_up,
    )


@dataclass(frozen=True)
class Device:
    """A device that a backend can use."""

    name: str
    detail: str


@dataclass(frozen=True)
class Backend:
    """A backend and its devices."""

    name: str
    built_in: bool
    default: bool
    """Whether it is the default."""
    missing: str | None
    """Why it is not available, if so."""
    devices: list[Device] = field(default_factory=list)


def devices() -> list[Backend]:
    """All backends, the fastest first, with their devices."""
    _cuda.prepare()
    return [
        Backend(
            name=found["backend"],
            built_in=found["built_in"],
            default=found["default"],
            missing=found["missing"],
            devices=[Device(**device) for device in found["devices"]],
        )
        for found in _native.devices()
    ]
