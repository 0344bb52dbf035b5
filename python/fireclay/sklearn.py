"""Intents and slots with scikit-learn's interface: ``fit``, ``predict``, ``score``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import BackendName, Model, UsageError, load, train

Slots = list[tuple[int, int, str]]
"""Spans ``(start, end, slot)``, in characters."""

_HELD_OUT = 10


Row = dict[str, Any]


def _parts(utterances: Sequence[str], intents: Sequence[str], slots: Sequence[Slots]) -> tuple[list[Row], list[Row]]:
    """Training and validation rows: every tenth row of an intent is for validation."""
    learnt: list[Row] = []
    held_out: list[Row] = []
    seen: dict[str, int] = {}
    for text, intent, spans in zip(utterances, intents, slots, strict=True):
        seen[intent] = seen.get(intent, 0) + 1
        filled = [{"start": start, "end": end, "slot": slot} for start, end, slot in spans]
        part = held_out if seen[intent] % _HELD_OUT == 0 else learnt
        part.append({"text": text, "intent": intent, "spans": filled})
    return learnt, held_out or learnt


class IntentSlotClassifier:
    """A classifier of intents and slots.

    >>> classifier = IntentSlotClassifier(steps=200).fit(utterances, intents, slots)  # doctest: +SKIP
    >>> classifier.predict(["turn on the lamp"])  # doctest: +SKIP
    ['light_on']

    ``settings`` are keys of the recipe ``intent-slot``, such as ``steps`` or ``d_model``. Every tenth utterance
    of an intent is held out to select the best model.
    """

    def __init__(self, *, backend: BackendName | None = None, out: str | Path | None = None, **settings: Any) -> None:
        self.backend = backend
        self.out = out
        self.settings = settings
        self._model: Model | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"backend": self.backend, "out": self.out, **self.settings}

    def set_params(self, **params: Any) -> IntentSlotClassifier:
        """Changes arguments for the next ``fit``."""
        self.backend = params.pop("backend", self.backend)
        self.out = params.pop("out", self.out)
        self.settings.update(params)
        return self

    def fit(
        self, utterances: Sequence[str], intents: Sequence[str], slots: Sequence[Slots] | None = None
    ) -> IntentSlotClassifier:
        """Trains on utterances, their intents and, optionally, their slots."""
        slots = [[] for _ in utterances] if slots is None else slots
        if not len(utterances) == len(intents) == len(slots) or len(utterances) < 2:
            raise UsageError(
                f"{len(utterances)} utterances, {len(intents)} intents and {len(slots)} lists of slots: "
                "give the same number of each, at least two"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="fireclay-")
        folder = Path(self._folder.name)
        learnt, held_out = _parts(utterances, intents, slots)
        for name, part in (("train", learnt), ("valid", held_out)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        out = folder / "run" if self.out is None else self.out
        run = train(task="intent-slot", data=folder, out=out, backend=self.backend, **self.settings)
        self._model = load(run.path, backend=self.backend)
        self.classes_ = sorted(set(intents))
        return self

    def _fitted(self) -> Model:
        if self._model is None:
            raise UsageError("not fitted yet: call fit first")
        return self._model

    def predict(self, utterances: Sequence[str]) -> list[str | None]:
        """The intent of each utterance; ``None`` for empty ones."""
        return [prediction.intent for prediction in self._fitted().predict(list(utterances))]

    def predict_slots(self, utterances: Sequence[str]) -> list[Slots]:
        """The slots of each utterance."""
        found = self._fitted().predict(list(utterances))
        return [[(span.start, span.end, span.slot) for span in prediction.spans] for prediction in found]

    def score(self, utterances: Sequence[str], intents: Sequence[str]) -> float:
        """Accuracy of the intents."""
        pairs = list(zip(self.predict(utterances), intents, strict=True))
        return sum(found == wanted for found, wanted in pairs) / max(len(pairs), 1)
