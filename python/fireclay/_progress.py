"""A progress bar in notebooks, if tqdm is installed."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def with_bar(steps: int | None, on_event: Callable[[Event], object] | None) -> Callable[[Event], object] | None:
    """``on_event``, which in notebooks also updates a progress bar."""
    if not _in_notebook():
        return on_event
    try:
        with warnings.catch_warnings():
            # tqdm warns if it has to draw the bar with characters.
            warnings.simplefilter("ignore")
            tqdm = importlib.import_module("tqdm.auto")
    except ImportError:
        return on_event
    bar = tqdm.tqdm(total=steps, unit="step")

    def told(event: Event) -> None:
        if event.get("event") == "train":
            bar.update(int(event["step"]) - bar.n)
            bar.set_postfix(loss=f"{event['loss']:.3f}")
        if on_event is not None:
            on_event(event)

    return told
