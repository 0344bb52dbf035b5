"""Small models that the tests share."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fireclay
import pytest

ROOT = Path(__file__).parents[2]
BACKEND: Any = os.environ.get("FIRECLAY_TEST_BACKEND", "cpu")


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def command() -> Callable[..., list[dict[str, Any]]]:
    """Runs the command line with ``--json``, and returns its lines."""
    program = os.environ.get("FIRECLAY_BINARY", str(ROOT / "target/ci/fireclay"))
    if not Path(program).exists():
        pytest.skip(f"{program} is not built")

    def run(*arguments: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [program, *arguments, "--json", "--backend", BACKEND], capture_output=True, text=True, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


SMALL: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 2,
    "batch_size": 4,
    "valid_tokens": 500,
    "final_valid_tokens": 500,
}


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small language model's folder."""
    out = tmp_path_factory.mktemp("stories") / "run"
    return fireclay.train("stories", backend=BACKEND, out=out, steps=30, **SMALL).path


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An utterance model's folder."""
    out = tmp_path_factory.mktemp("home") / "run"
    return fireclay.train(task="intent-slot", backend=BACKEND, out=out, steps=4).path


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a chat template."""
    out = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(ROOT / "tests/server/models.py"), str(out)], check=True)
    return out / "chat"


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory, chat_folder: Path) -> Callable[[str], Path]:
    """Copies a model of ``tests/golden``, which has no tokenizer, and adds one."""
    made = tmp_path_factory.mktemp("golden")

    def folder(name: str) -> Path:
        if not (made / name).exists():
            shutil.copytree(ROOT / "tests/golden" / name, made / name)
            shutil.copy(chat_folder / "tokenizer.json", made / name)
        return made / name

    return folder


@pytest.fixture(scope="session")
def model(stories: Path) -> Iterator[fireclay.Model]:
    with fireclay.load(stories, backend=BACKEND) as loaded:
        yield loaded
