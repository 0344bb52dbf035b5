"""Measures the overhead of the Python package compared with the command line:

    python overhead.py FIRECLAY BACKEND FOLDER TOKENS STEPS [KEY=VALUE ...]

Creates a model of the recipe `stories` with these settings in FOLDER. Compares the tokens per second of `generate` with
those of `fireclay generate` over TOKENS tokens, and of `Trainer.step` with those of `fireclay.train` and of the command
`fireclay train` over STEPS steps after a warm-up: alternating runs, medians of five. Each should last more than a
second; build both in release. The command has an allocator of its own, mimalloc, and the package that of its process:
steps that the host's launches bound differ by it.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fireclay

PROMPT, TURNS, WARM_UP, READ_EVERY = "There was once", 5, 100, 100


def command(program: str, *arguments: str) -> list[dict[str, Any]]:
    lines = subprocess.run([program, *arguments, "--json"], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in lines.splitlines()]


def rate_of(lines: list[dict[str, Any]]) -> float:
    """The harmonic mean of the steps' rates after the warm-up: every step has as many tokens."""
    steps = [line for line in lines if line.get("event") == "train" and line["step"] > WARM_UP]
    seconds: float = sum(1 / step["tokens_per_second"] for step in steps)
    return len(steps) / seconds


def main() -> None:
    program, place = sys.argv[1], sys.argv[3]
    backend: Any = sys.argv[2]
    count, steps = int(sys.argv[4]), int(sys.argv[5])
    settings = sys.argv[6:]
    folder = Path(place)
    options: dict[str, Any] = dict(setting.split("=", 1) for setting in settings)
    precision: Any = "f32" if backend == "cpu" else "bf16"
    numbers = {key: json.loads(value) if value[:1].isdigit() else value for key, value in options.items()}
    numbers |= {"precision": precision, "backend": backend}
    with fireclay.Trainer("stories", **(numbers | {"context_length": count + 100, "batch_size": 1})) as trainer:
        trainer.step()
        trainer.save(folder / "model")
    common = ["--backend", backend, "--precision", precision]
    rates: dict[str, list[float]] = {name: [] for name in ("command", "generate", "call", "train", "run", "step")}
    model = fireclay.load(folder / "model", backend=backend, precision=precision)
    model.generate(PROMPT, max_tokens=count, seed=1)
    for _ in range(TURNS):
        # Random weights may generate a stop token early, so rates use the actual number of tokens.
        theirs = command(
            program,
            "generate",
            "--model",
            str(folder / "model"),
            "--prompt",
            PROMPT,
            "--max-tokens",
            str(count),
            "--seed",
            "1",
            *common,
        )[-1]
        rates["command"].append(theirs["decode_tokens_per_second"])
        begun = time.perf_counter()
        ours = model.generate(PROMPT, max_tokens=count, seed=1, details=True)
        seconds = time.perf_counter() - begun
        rates["generate"].append(ours.decode_tokens_per_second)
        rates["call"].append(100 * (seconds - ours.prefill_seconds - ours.decode_seconds) / seconds)
    model.close()
    few = {"context_length": 512, "valid_every": 100_000, "checkpoint_every": 100_000}
    few |= {"valid_tokens": 500, "final_valid_tokens": 500}
    run = ["train", "stories", "--steps", str(WARM_UP + steps)]
    run += [word for key, value in few.items() for word in ("--set", f"{key}={value}")]
    run += [word for setting in settings for word in ("--set", setting)]
    for _ in range(TURNS):
        shutil.rmtree(folder / "run", ignore_errors=True)
        lines = command(program, *run, *common, "--out", str(folder / "run"))
        rates["train"].append(rate_of(lines))
        shutil.rmtree(folder / "run", ignore_errors=True)
        events: list[dict[str, Any]] = []
        its = few | numbers | {"steps": WARM_UP + steps, "out": folder / "run"}
        fireclay.train("stories", on_event=events.append, **its)
        rates["run"].append(rate_of(events))
        with fireclay.Trainer("stories", context_length=512, **numbers) as trainer:
            for _ in range(WARM_UP):
                step = trainer.step()
            float(step)
            begun, tokens = time.perf_counter(), 0
            for number in range(steps):
                step = trainer.step()
                tokens += step.tokens
                # `fireclay train` reads losses at intervals, too.
                if number % READ_EVERY == READ_EVERY - 1:
                    float(step)
            float(step)
            rates["step"].append(tokens / (time.perf_counter() - begun))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    print(f"generate: command {medians['command']:.1f} tokens/s, Python {medians['generate']:.1f}", end="; ")
    print(
        f"{100 * (1 - medians['generate'] / medians['command']):+.2f}% slower, "
        f"and the call itself {medians['call']:.2f}%"
    )
    for name, title in [("run", "fireclay.train"), ("train", "command")]:
        slower = 100 * (1 - medians["step"] / medians[name])
        print(f"step: {title} {medians[name]:.0f} tokens/s, Trainer.step {medians['step']:.0f}; {slower:+.2f}% slower")
    print({name: [round(value, 2) for value in found] for name, found in rates.items()})


if __name__ == "__main__":
    main()
