"""Output equals that of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fireclay
import pytest
from conftest import BACKEND

Command = Callable[..., list[dict[str, Any]]]


def written(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == "done"]


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"temperature": 0.0}, ["--temperature", "0"]),
        ({"seed": 7}, ["--seed", "7"]),
        (
            {"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2},
            ["--top-k", "5", "--top-p", "0.9", "--repetition-penalty", "1.2"],
        ),
        ({"stop": ["."]}, ["--stop", "."]),
    ],
)
def test_a_text_is_the_command_lines(
    model: fireclay.Model, stories: Path, command: Command, options: dict[str, Any], arguments: list[str]
) -> None:
    lines = command("generate", "--model", str(stories), "--prompt", "There was", "--max-tokens", "20", *arguments)
    [wanted] = written(lines)
    found = model.generate("There was", max_tokens=20, details=True, **options)
    assert (found.text, found.tokens) == (wanted["text"], wanted["tokens"])
    assert "".join(model.stream("There was", max_tokens=20, **options)) == wanted["text"]


def test_several_prompts_are_the_command_lines(
    model: fireclay.Model, stories: Path, command: Command, tmp_path: Path
) -> None:
    prompts = ["There was", "Once", "There"]
    (tmp_path / "prompts").write_text("\n".join(prompts))
    lines = command("generate", "--model", str(stories), "--prompts", str(tmp_path / "prompts"), "--max-tokens", "12")
    assert model.generate(prompts, max_tokens=12) == [line["text"] for line in written(lines)]
    assert model.generate([]) == []


def test_a_conversation_is_streamed_and_whole_alike(chat_folder: Path) -> None:
    with fireclay.load(chat_folder, backend=BACKEND) as model:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
        whole = model.chat(messages, max_tokens=16, seed=3)
        assert whole and "".join(model.chat(messages, stream=True, max_tokens=16, seed=3)) == whole
        assert model.chat(messages, max_tokens=16, seed=3, details=True).prompt_tokens > 10
        with pytest.raises(fireclay.UsageError, match="role"):
            model.chat([{"content": "Hello!"}])


def test_tokens_become_the_text_again(model: fireclay.Model) -> None:
    tokens = model.tokenizer.encode("There was a potter")
    assert model.tokenizer.decode(tokens) == "There was a potter"
    assert model.tokenizer.vocab_size == model.config["vocab_size"]


def test_perplexity_is_the_command_lines(
    model: fireclay.Model, stories: Path, command: Command, tmp_path: Path
) -> None:
    text = "There was a potter.\n" * 30
    (tmp_path / "text.txt").write_text(text)
    [wanted] = written(command("evaluate", "--model", str(stories), "--data", str(tmp_path / "text.txt")))
    assert model.perplexity(text) == pytest.approx(wanted["perplexity"], rel=1e-6)


def test_utterances_are_predicted_as_on_the_command_line(home: Path, command: Command) -> None:
    text = "turn on the lamp in the kitchen"
    [wanted] = command("predict", "--model", str(home), "--text", text)
    with fireclay.load(home, backend=BACKEND) as model:
        found = model.predict(text)
        assert found.intent == wanted["intent"]
        assert found.probability == pytest.approx(wanted["probability"], rel=1e-5)
        spans = [{"slot": span.slot, "start": span.start, "end": span.end, "text": span.text} for span in found.spans]
        assert spans == wanted["spans"]
        assert [one.intent for one in model.predict([text, text])] == [found.intent] * 2
        embeddings = model.embed([text, "the kitchen"])
        assert embeddings.shape == (2, model.config["d_model"])
        assert (embeddings**2).sum(axis=1) == pytest.approx([1.0, 1.0], abs=1e-5)
        with pytest.raises(fireclay.Error, match="encoder"):
            model.generate("text")


def test_labels_are_predicted_as_on_the_command_line(command: Command, tmp_path: Path) -> None:
    records = [{"text": f"the kiln is {label} today", "label": label} for label in ("hot", "cold")] * 10
    (tmp_path / "kilns.json").write_text(json.dumps(records))
    shape: dict[str, Any] = {"d_model": 32, "n_layers": 1, "n_heads": 2, "pieces": 60, "seq_length": 16}
    run = fireclay.train(
        task="classify", data=tmp_path / "kilns.json", backend=BACKEND, out=tmp_path / "run", steps=3, **shape
    )
    text = "is the kiln hot"
    [wanted] = command("predict", "--model", str(run.path), "--text", text)
    with run.load(backend=BACKEND) as model:
        found = model.predict(text)
        assert found.label == wanted["label"]
        assert found.label in ("hot", "cold")
        assert found.probability == pytest.approx(wanted["probability"], rel=1e-5)
        assert found.intent is None
        assert found.spans == []
        assert [one.label for one in model.predict([text, text])] == [found.label] * 2


def test_what_cannot_be_is_refused_in_one_line(model: fireclay.Model, tmp_path: Path) -> None:
    with pytest.raises(fireclay.UsageError, match="temperature"):
        model.generate("There", temperature=-1.0)
    with pytest.raises(TypeError, match="heat"):
        model.generate("There", heat=1.0)  # type: ignore[call-overload]
    with pytest.raises(fireclay.Error, match="config.json"):
        fireclay.load(tmp_path, backend=BACKEND)
    with pytest.raises(fireclay.UsageError, match="backend"):
        fireclay.load(tmp_path, backend="tpu")  # type: ignore[arg-type]
    with pytest.raises(fireclay.UsageError, match="prompt 2: the prompt is empty"):
        model.generate(["There", ""])
    for error in (fireclay.UsageError, fireclay.DeviceError):
        assert issubclass(error, fireclay.Error)


def test_a_closed_model_says_so(stories: Path) -> None:
    model = fireclay.load(stories, backend=BACKEND)
    model.close()
    with pytest.raises(fireclay.Error, match="closed"):
        model.generate("There")
