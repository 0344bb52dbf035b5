import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, final, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

__version__: str

_Path = str | os.PathLike[str]
_Message = Mapping[str, Any]

class _Array(Protocol):
    def __dlpack_device__(self) -> tuple[Any, int]: ...
    @property
    def __dlpack__(self) -> Callable[..., Any]: ...

_Ids = Sequence[int] | Sequence[Sequence[int]] | _Array

@final
class Tensor:
    """A tensor on a model's device. Array libraries read it in place: ``torch.from_dlpack(tensor)``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def numpy(self) -> npt.NDArray[Any]:
        """A NumPy array: a read-only view of host memory, or else a copy in float32."""
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]: ...
    def tolist(self) -> list[Any]: ...
    def __len__(self) -> int: ...

@final
class Tokenizer:
    """Converts between text and token ids."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, *, prompt: bool = False) -> list[int]:
        """Token ids of a text; ``prompt`` adds special tokens before and after it."""
    def decode(self, ids: Sequence[int] | _Array) -> str: ...
    def token_id(self, token: str) -> int | None: ...

@final
class Generated:
    """The output of a prompt."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prefill_seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...
    @property
    def decode_tokens_per_second(self) -> float: ...

@final
class Span:
    """A slot in an utterance: characters ``start`` to ``end``."""

    @property
    def slot(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def text(self) -> str: ...

@final
class Prediction:
    """Intent and slots of an utterance, or the label of a text from a classifier."""

    @property
    def label(self) -> str | None: ...
    @property
    def intent(self) -> str | None: ...
    @property
    def probability(self) -> float: ...
    @property
    def spans(self) -> list[Span]: ...

@final
class Stream(Iterator[str]):
    """Streamed output. Closing or dropping it stops the generation."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> str: ...
    def close(self) -> None: ...

@final
class Model:
    """A model on a device. Threads may share it; its calls run in order."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def backend(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @overload
    def generate(
        self,
        prompt: str,
        *,
        details: Literal[False] = False,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 1337,
    ) -> str: ...
    @overload
    def generate(
        self,
        prompt: list[str],
        *,
        details: Literal[False] = False,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 1337,
    ) -> list[str]: ...
    @overload
    def generate(
        self,
        prompt: str,
        *,
        details: Literal[True],
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 1337,
    ) -> Generated: ...
    @overload
    def generate(
        self,
        prompt: list[str],
        *,
        details: Literal[True],
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 1337,
    ) -> list[Generated]:
        """Generates from a prompt, or from several concurrently.

        ``max_tokens`` defaults to what fits the context, up to 256. ``temperature`` 0 is greedy. A seed gives the same output as
        the command line.
        """
    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 1337,
    ) -> Stream:
        """:meth:`generate`, piece by piece."""
    @overload
    def chat(
        self,
        messages: Sequence[_Message],
        *,
        stream: Literal[False] = False,
        details: Literal[False] = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.7,
        top_k: int | None = None,
        top_p: float | None = 0.9,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 1337,
    ) -> str: ...
    @overload
    def chat(
        self,
        messages: Sequence[_Message],
        *,
        stream: Literal[True],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.7,
        top_k: int | None = None,
        top_p: float | None = 0.9,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 1337,
    ) -> Stream: ...
    @overload
    def chat(
        self,
        messages: Sequence[_Message],
        *,
        stream: Literal[False] = False,
        details: Literal[True],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.7,
        top_k: int | None = None,
        top_p: float | None = 0.9,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int = 1337,
    ) -> Generated:
        """Answers messages with ``role`` and ``content``, using the model's chat template."""
    def logits(self, ids: _Ids) -> Tensor:
        """Logits of the next token at each position, ``[rows, length, vocab_size]``, in the dtype of activations."""
    def hidden_states(self, ids: _Ids) -> Tensor:
        """Hidden states ``[rows, length, d_model]`` after the last norm; refused if words have types."""
    def attention(self, ids: _Ids) -> list[Tensor]:
        """Attention weights of each layer, ``[rows, n_heads, length, length]``; the weights of a query sum to one."""
    def embed(self, sentences: str | Sequence[str]) -> npt.NDArray[np.float32]:
        """Normalized embeddings: ``[d_model]``, or ``[sentences, d_model]``."""
    @overload
    def predict(self, utterances: str) -> Prediction: ...
    @overload
    def predict(self, utterances: list[str]) -> list[Prediction]:
        """Intents and slots of utterances, or the labels that a classifier gives."""
    def perplexity(self, text: str, *, context: int | None = None, stride: int | None = None) -> float:
        """Perplexity of a text, in windows of ``context`` tokens that are ``stride`` tokens apart."""
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by its path, read-only; matrices are ``[d_output, d_input]``."""
    def close(self) -> None:
        """Frees the model."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Step:
    """A training step. Reading its loss waits for the device; ``float(step)`` is the loss."""

    @property
    def step(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def loss(self) -> float:
        """Loss before the step, in nats per target."""
    @property
    def gradient_norm(self) -> float:
        """Global gradient norm before clipping."""
    def __float__(self) -> float: ...
    def __format__(self, specification: str) -> str: ...

class Trainer:
    def __new__(
        cls,
        recipe: _Path | None = None,
        *,
        task: Literal["language", "masked", "chat", "preference", "intent-slot", "classify"] | None = None,
        data: _Path | None = None,
        field: str | None = None,
        init: _Path | None = None,
        precision: Literal["f32", "tf32", "bf16"] | None = None,
        backend: Literal["cpu", "cuda", "vulkan", "wgpu"] | None = None,
        **overrides: Any,
    ) -> Self: ...
    @property
    def steps(self) -> int: ...
    @property
    def recipe(self) -> dict[str, Any]: ...
    @property
    def backend(self) -> str: ...
    def step(self, input_ids: _Ids | None = None, target_ids: _Ids | None = None) -> Step:
        """One optimizer step over token rows ``[rows, length]`` and their targets (-100 is ignored), or over the recipe's data."""
    def validate(self, tokens: int | None = None) -> float:
        """Mean loss on the recipe's held-out data."""
    def save(self, folder: _Path) -> None:
        """Saves the model in the layout of the hub."""
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Profile:
    """A profile; ``print`` shows the table."""

    @property
    def seconds(self) -> float:
        """Seconds per step, token or batch, measured without recording."""
    def to_dict(self) -> dict[str, Any]: ...
    def write_html(self, path: _Path) -> None: ...
    def write_trace(self, path: _Path) -> None: ...

def load(model: _Path, *, backend: str | None = None, precision: str = "f32", cache_dtype: str = "auto") -> Model: ...
def devices() -> list[dict[str, Any]]: ...
def _end() -> None: ...
def _train(
    recipe: _Path | None,
    task: str | None,
    data: _Path | None,
    field: str | None,
    init: _Path | None,
    precision: str | None,
    backend: str | None,
    out: _Path | None,
    resume: _Path | None,
    allow_changed_data: bool,
    on_event: Callable[[dict[str, Any]], object] | None,
    overrides: dict[str, Any],
) -> tuple[str, dict[str, Any]]: ...
def _profile(
    what: str,
    recipe: _Path | None,
    data: _Path | None,
    model: _Path | None,
    prompt: str | None,
    utterances: list[str] | None,
    batch: int,
    precision: str | None,
    backend: str | None,
    count: int,
    warm_up: int,
) -> Profile: ...
