"""Backends: where the model runs. One interface, one test for all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from kvyard.engine.backends.base import BackendError

if TYPE_CHECKING:
    from kvyard.engine.backends.base import Backend
    from kvyard.engine.weights import Progress, Weights

Maker = Callable[["Weights", torch.dtype, bool, int, "Progress"], "Backend"]
"""`(weights, dtype, deterministic, block_size, progress) -> Backend`."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """`auto` is a GPU that works, else the CPU. Raises BackendError where `cuda` was asked for in vain."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() and _cuda_maker() is not None else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        built = "has no CUDA support" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        raise BackendError(
            f"device 'cuda' was asked for, but there is none that works: torch {torch.__version__} {built} "
            f"and sees {torch.cuda.device_count()} devices",
            "install a CUDA build of torch and a driver, or start with --device cpu",
        )
    return wanted


def backend_maker(device: Literal["cpu", "cuda"]) -> Maker:
    """What makes a backend for a device; imported late, since each pulls in its own kernels."""
    if device == "cpu":
        from kvyard.engine.backends.cpu import CpuBackend

        return CpuBackend
    maker = _cuda_maker()
    if maker is None:
        raise BackendError(
            "the CUDA backend needs Triton, which is not installed",
            "install triton, or start with --device cpu",
        )
    return maker


def _cuda_maker() -> Maker | None:
    """The CUDA backend, where the installation can run its kernels (Triton is made for Linux alone)."""
    if importlib.util.find_spec("triton") is None:
        return None
    from kvyard.engine.backends.cuda import CudaBackend

    return CudaBackend
