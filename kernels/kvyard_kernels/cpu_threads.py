"""Launch compiled kernels on the very OpenMP threads that torch uses.

Two thread pools on the same cores slow each other down: the idle one spins where the other wants to run.
So kernels are C functions handed to `GOMP_parallel` of the runtime that torch has loaded (GNU's, or LLVM's
and Intel's, which offer the same entry). Where there is none, a kernel runs on the calling thread alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numba import cfunc

from kvyard_kernels.cpu_memory import SIGNATURE

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _parallel() -> Callable[..., Any] | None:
    """`GOMP_parallel(body, data, threads, flags)`, or None without an OpenMP runtime."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for name in (None, str(library)):  # a preloaded runtime comes first, as it does for torch itself
        try:
            function = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


class Kernel:
    """A compiled `void(int64*)` whose items are drawn from a counter in its parameters."""

    def __init__(self, body: Callable[[int], None]) -> None:
        try:
            self._compiled = cfunc(SIGNATURE, cache=True)(body)  # owns the machine code
        except RuntimeError:  # no folder for the cache can be written: compile anew on every start
            self._compiled = cfunc(SIGNATURE)(body)
        self._address = int(self._compiled.address or 0)
        self._single = _BODY(self._address)

    def __call__(self, parameters: int, threads: int) -> None:
        """Run with the parameter block at address `parameters` on at most `threads` threads; returns when done."""
        parallel = _parallel() if threads > 1 else None
        if parallel is None:
            self._single(parameters)
        else:
            parallel(self._address, parameters, threads, 0)
