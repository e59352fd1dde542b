"""From a path to a model on a device: the one entry of the engine process into the model side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kvyard.engine import weights_cache
from kvyard.engine.backends import backend_maker, choose_device
from kvyard.engine.backends.base import Backend
from kvyard.engine.model_config import ModelConfig, ModelError
from kvyard.engine.weights import Form, Progress, Weights

DtypeName = Literal["float32", "bfloat16"]


@dataclass(slots=True)
class Loaded:
    """A model ready for `backend.allocate`."""

    backend: Backend
    config: ModelConfig
    eos_ids: tuple[int, ...]
    dtype_name: DtypeName


def load(
    path: str,
    *,
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["auto", "float32", "bfloat16"],
    deterministic: bool,
    block_size: int,
    progress: Progress,
) -> Loaded:
    """Load a GGUF file or a Hugging Face folder. Raises ModelError or BackendError, both with a `hint`."""
    chosen = choose_device(device)
    name = choose_dtype(chosen) if dtype == "auto" else dtype
    form = weight_form(chosen, name, deterministic)
    if chosen == "cpu":
        from kvyard_kernels import cpu_ahead  # numba's part of it is not for GPUs

        cpu_ahead.start()
    weights = load_weights(Path(path), getattr(torch, name), progress, form)
    backend = backend_maker(chosen)(weights, getattr(torch, name), deterministic, block_size, progress)
    return Loaded(backend, weights.config, weights.eos_ids, name)


def weight_form(device: Literal["cpu", "cuda"], dtype: DtypeName, deterministic: bool) -> Form:
    """Which form of quantised matrices is loaded.

    On a CPU the quantised one is the faster for few rows, and exact. bfloat16 products are much faster for
    many, so outside deterministic mode (one form for all numbers of rows) both are kept.
    """
    if device == "cuda":
        return "dense"
    return "both" if dtype == "bfloat16" and not deterministic else "quantised"


def load_weights(path: Path, dtype: torch.dtype, progress: Progress, form: Form = "dense") -> Weights:
    """Weights of a file or folder, a GGUF's through the cache of converted weights."""
    if path.is_dir():
        from kvyard.engine.weights_hf import load_hf

        return load_hf(path, dtype, progress, form)
    if not path.exists():
        raise ModelError(f"{path} does not exist", "give the path of a .gguf file or a Hugging Face folder")
    cached = weights_cache.cached_file(path, dtype, form)
    weights = weights_cache.load_cached(cached)
    if weights is None:
        from kvyard.engine.weights_gguf import load_gguf  # the reader's import and parse are only paid here

        weights = load_gguf(path, dtype, progress, form)
        weights_cache.store(cached, weights)
    return weights


def choose_dtype(device: Literal["cpu", "cuda"]) -> DtypeName:
    """bfloat16 where the device computes in it: half the bytes of weights and KV, which is what limits decoding.

    On a CPU without bfloat16 products it would be emulated, and slower than float32.
    """
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "float32"
