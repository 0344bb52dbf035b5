"""Finds CUDA's compiler and headers in pip's ``nvidia-*`` wheels, where the system has none."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

_LIBRARIES = ("libnvrtc.so.*", "libcudart.so.*", "libnccl.so.*")
_prepared = False


def _folders() -> list[Path]:
    """Folders of wheels with ``include`` and ``lib``: one for all of CUDA 13, one for each part before."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return sorted(folder for place in places for folder in Path(place).glob("*") if folder.is_dir())


def prepare() -> None:
    """Called before CUDA is looked for; changes nothing where the system or ``CUDA_PATH`` has a toolkit."""
    global _prepared
    if _prepared or sys.platform != "linux":
        return
    _prepared = True
    if "CUDA_PATH" in os.environ or Path("/usr/local/cuda").exists() or Path("/opt/cuda").exists():
        return
    folders = _folders()
    for folder in folders:
        if (folder / "include" / "cuda_runtime.h").is_file():
            os.environ["CUDA_PATH"] = str(folder)
            break
    else:
        return
    for pattern in _LIBRARIES:
        for library in sorted(path for folder in folders for path in (folder / "lib").glob(pattern)):
            try:
                # A library that is loaded is found by its name from here on.
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
