"""Runs the examples of docs/python.md in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT


@pytest.mark.parametrize("page", ["docs/python.md"])
def test_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    examples = list(re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert len(examples) > 5
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    for example in examples:
        line = text[: example.start()].count("\n") + 1
        exec(compile("\n" * line + example[1], str(ROOT / page), "exec"), names)  # noqa: S102
    [first] = names["classifier"].predict(["turn on the radio"])
    assert first == "on"
