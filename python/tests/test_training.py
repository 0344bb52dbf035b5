"""Training runs, their events, and custom loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fireclay
import numpy as np
import pytest
from conftest import BACKEND, SMALL


def test_a_run_tells_its_events(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    run = fireclay.train("stories", backend=BACKEND, out=tmp_path / "run", steps=12, on_event=events.append, **SMALL)
    assert run.path == tmp_path / "run" and run.summary["steps"] == 12
    trained = [event for event in events if event["event"] == "train"]
    assert [event["step"] for event in trained] == list(range(1, 13))
    assert events[-1]["event"] in ("valid", "sample") and events == run.metrics
    steps, losses = run.losses
    assert steps[-1] == 12 and losses[-1] < losses[0]
    with run.load(backend=BACKEND) as model:
        assert model.generate("Once", max_tokens=4)


def test_the_command_line_trains_the_same_model(tmp_path: Path, command: Any) -> None:
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    command("train", "stories", "--steps", "5", "--out", str(tmp_path / "command"), *settings)
    run = fireclay.train("stories", backend=BACKEND, out=tmp_path / "here", steps=5, **SMALL)
    ours = [event["loss"] for event in run.metrics if event["event"] == "train"]
    theirs = fireclay.Run(tmp_path / "command", {}).losses[1]
    assert ours == theirs


def test_an_exception_of_a_callback_stops_and_saves(tmp_path: Path) -> None:
    def fail(event: dict[str, Any]) -> None:
        if event["event"] == "train" and event["step"] >= 3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        fireclay.train("stories", backend=BACKEND, out=tmp_path / "run", steps=5000, on_event=fail, **SMALL)
    # The run resumes from its checkpoint.
    events: list[dict[str, Any]] = []
    saved = max(int(folder.name.rsplit("-", 1)[-1]) for folder in (tmp_path / "run" / "training").glob("*-*"))
    run = fireclay.train(resume=tmp_path / "run", backend=BACKEND, steps=saved + 2, on_event=events.append)
    assert run.summary["steps"] == saved + 2
    assert [event["step"] for event in events if event["event"] == "train"] == [saved + 1, saved + 2]


def test_settings_are_refused_by_their_names(tmp_path: Path) -> None:
    with pytest.raises(fireclay.UsageError, match="n_layer"):
        fireclay.train("stories", backend=BACKEND, out=tmp_path / "run", n_layer=2)
    with pytest.raises(fireclay.UsageError, match="no-such"):
        fireclay.train("no-such", backend=BACKEND)
    with pytest.raises(fireclay.UsageError, match="resume"):
        fireclay.train("stories", resume=tmp_path)
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "file").touch()
    with pytest.raises(fireclay.Error):
        fireclay.train("stories", backend=BACKEND, out=tmp_path / "held" / "file", steps=1, **SMALL)


def test_settings_keep_their_types(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a text about clay, fire and water. " * 200)
    trainer = fireclay.Trainer(
        "shakespeare-char-cpu",
        data=tmp_path / "data",
        backend=BACKEND,
        training__learning_rate=1e-3,
        tokenizer="byte",
        **SMALL,
    )
    assert trainer.recipe["training"]["learning_rate"] == 1e-3
    assert trainer.recipe["data"]["tokenizer"] == "byte"
    assert trainer.step().tokens > 0


def test_a_loop_of_ones_own_learns_and_saves(tmp_path: Path) -> None:
    with fireclay.Trainer("stories", backend=BACKEND, warmup_steps=1, **SMALL) as trainer:
        generator = np.random.default_rng(0)
        rows = generator.integers(0, 40, (4, 17))
        losses = [trainer.step(rows[:, :-1], rows[:, 1:]) for _ in range(30)]
        first, last = float(losses[0]), float(losses[-1])
        assert first > 4.0 > last, (first, last)
        assert losses[0].tokens == 64 and losses[-1].step == trainer.steps == 30
        assert f"{losses[0]:.2f}" == f"{first:.2f}" and losses[0].gradient_norm > 0
        ignored = rows[:, 1:].copy()
        ignored[:, :8] = -100
        assert trainer.step(rows[:, :-1], ignored).tokens == 32
        trainer.save(tmp_path / "saved")
        assert trainer.validate() > 0
    with fireclay.load(tmp_path / "saved", backend=BACKEND) as model:
        logits = model.logits(rows[:, :-1]).numpy()
        assert (logits.argmax(-1) == rows[:, 1:]).mean() > 0.3


def test_a_step_is_that_of_the_run(tmp_path: Path) -> None:
    run = fireclay.train("stories", backend=BACKEND, out=tmp_path / "run", steps=3, **SMALL)
    trainer = fireclay.Trainer("stories", backend=BACKEND, steps=3, **SMALL)
    assert [float(trainer.step()) for _ in range(3)] == run.losses[1]


def test_rows_that_cannot_be_learnt_from_are_refused() -> None:
    trainer = fireclay.Trainer("stories", backend=BACKEND, **SMALL)
    rows = np.zeros((4, 8), np.int64)
    for inputs, targets, match in [
        (rows, rows[:, :-1], "targets"),
        (rows, rows[:2], "targets"),
        (rows + 100_000, rows, "token 100000"),
        (rows, rows - 1, "target -1"),
        (rows, rows - 100, "ignored"),
        (rows, None, "or neither"),
    ]:
        with pytest.raises(fireclay.UsageError, match=match):
            trainer.step(inputs, targets)
    assert trainer.steps == 0


def test_profiles_have_a_table(stories: Path) -> None:
    found = fireclay.profile("generate", model=stories, prompt="Once", backend=BACKEND, count=4, warm_up=1)
    assert found.seconds > 0 and found.to_dict()["unit"] == "token"
    assert "linear" in str(found)
    with pytest.raises(fireclay.UsageError):
        fireclay.profile("generate", recipe="stories")


def test_devices_are_listed() -> None:
    backends = {backend.name: backend for backend in fireclay.devices()}
    assert set(backends) == {"cuda", "vulkan", "wgpu", "cpu"}
    assert backends["cpu"].built_in and backends["cpu"].devices[0].name == "CPU"
    assert sum(backend.default for backend in backends.values()) == 1
