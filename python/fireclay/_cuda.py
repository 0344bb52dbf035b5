"""Finds NVRTC and CUDA's headers in pip's ``nvidia-*`` wheels if the system has no toolkit."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

_LIBRARIES = ("libnvrtc.so.*", "libcudart.so.*", "libnccl.so.*")
_prepared = False


def _folders() -> list[Path]:
    """Folders of wheels with ``include`` and ``lib``: a common one since CUDA 13, one per package before."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return sorted(folder for place in places for folder in Path(place).glob("*") if folder.is_dir())


def prepare() -> None:
    """Call before using CUDA. Does nothing if the system or ``CUDA_PATH`` has a toolkit."""
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
                # The dynamic linker finds loaded libraries by name.
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
