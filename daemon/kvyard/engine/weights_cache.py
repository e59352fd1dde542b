"""A cache of converted weights, so that only the first start of a GGUF pays for reading and dequantising.

One safetensors file per model file, type and form, mapped into memory on the next start. It is written beside its
final name and renamed, so that a crash leaves the old one or none. A file that does not match or cannot be
read is as if it were not there; a cache that cannot be written costs time, never the start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvyard.engine.cache_folder import cache_folder
from kvyard.engine.model_config import ModelConfig
from kvyard.engine.weights import Form, Weights

_VERSION = 3
"""Of names and layout of the joined tensors; another one makes old files miss."""

_SAMPLE = 1 << 20


def fingerprint(path: Path) -> str:
    """Changes whenever the file does: size, time of change, and a hash of its first and last MiB."""
    state = path.stat()
    digest = hashlib.sha256(f"{state.st_size} {state.st_mtime_ns}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE))
        file.seek(max(0, state.st_size - _SAMPLE))
        digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:24]


def cached_file(path: Path, dtype: torch.dtype, form: Form) -> Path | None:
    """Where the converted weights of a model file lie, if there is a place for caches."""
    folder = cache_folder(os.environ)
    if folder is None:
        return None
    kind = str(dtype).removeprefix("torch.")
    name = f"{path.stem}-{fingerprint(path)}-{kind}-{form}-v{_VERSION}.safetensors"
    return folder / "weights" / name


def load_cached(path: Path | None) -> Weights | None:
    """Weights from a cache file, mapped; None where there is none that can be used."""
    if path is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # no mapping
        return Weights(ModelConfig.from_json(about["config"]), tensors, tuple(json.loads(about["eos_ids"])))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def store(path: Path | None, weights: Weights) -> bool:
    """Write a cache file; False where that is not possible."""
    if path is None:
        return False
    about = {"config": weights.config.to_json(), "eos_ids": json.dumps(list(weights.eos_ids))}
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        os.close(handle)
        save_file(weights.tensors, temporary, metadata=about)
        Path(temporary).replace(path)
        return True
    except (OSError, SafetensorError):
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        return False
