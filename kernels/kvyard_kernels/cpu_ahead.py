"""Compile the dearest CPU kernels in a process of their own, while the engine reads its weights.

Only where numba's cache has none of them yet, or those of older sources: then a first start takes a quarter less.
Without torch, so that the process begins at once: `python -m kvyard_kernels.cpu_ahead` is that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from numba import cfunc

from kvyard_kernels import cpu_attention, cpu_quant
from kvyard_kernels.cpu_memory import SIGNATURE

LONGEST_S = 60.0
"""Then it is ended."""
_INDEX = "*/cpu_quant.product-*.nbi"


_processes: list[subprocess.Popen[bytes]] = []


def main() -> None:
    """Compile into the cache, the dearest first."""
    for body in (cpu_attention.attention, cpu_quant.product, cpu_quant.prepare):
        cfunc(SIGNATURE, cache=True)(body)


def start() -> None:
    """Start that process, unless there is no cache to hand over the kernels with or they are there."""
    folder = os.environ.get("NUMBA_CACHE_DIR")
    if folder and not _cached(Path(folder)):
        command, nowhere = [sys.executable, "-m", "kvyard_kernels.cpu_ahead"], subprocess.DEVNULL
        _processes.append(subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere))


def _cached(folder: Path) -> bool:
    made = Path(cpu_quant.__file__).stat().st_mtime
    return any(index.stat().st_mtime >= made for index in folder.glob(_INDEX))


def join() -> None:
    """Wait until it is done, where there is one; what it did not get done is compiled by whoever needs it."""
    while _processes:
        process = _processes.pop()
        try:
            process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
