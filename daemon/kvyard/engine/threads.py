"""Threads and compiler cache of the engine process, set in one place and before torch is imported.

OpenMP reads its settings when the runtime is loaded, so `configure` must run before the first import of
torch. Idle workers spin briefly, then sleep: on two cores shared with the front, spinning for long takes the
core that the front needs (a step's p99 goes from 33 to 140 ms), and sleeping at once pays a wake-up of 5 to
10 us for each of the 120 products of a step.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from kvyard.engine.cache_folder import cache_folder

_SPIN_COUNT = "4000"
"""0.1 to 0.2 ms, by the processor's pause: workers stay awake between the products of a step (10 to 50 us apart)
and sleep between steps, when the front wants the core."""


def configure(environment: MutableMapping[str, str] = os.environ) -> int:
    """Set what the user has not set; the number of threads that torch will use."""
    environment.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    environment.setdefault("KMP_BLOCKTIME", "0")
    environment.setdefault("NUMBA_NUM_THREADS", "1")
    if (folder := cache_folder(environment)) is not None:
        environment.setdefault("NUMBA_CACHE_DIR", str(folder / "numba"))
    return int(environment["OMP_NUM_THREADS"].partition(",")[0])


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on, cut to the cgroup's CPU quota (rounded up)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))
