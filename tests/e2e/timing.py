"""Time limits of the tests: stated for an unloaded machine, scaled in one place for a busy one."""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("KVYARD_TEST_TIME_FACTOR", "1"))
"""Multiplies every time limit; 1 unless the machine does other work at the same time."""


def limit(seconds: float) -> float:
    """A time limit for this machine at this moment.

    Where it is known to be busy, longer by as much as processes are more than cores. What measures the machine runs
    alone, and then the load of a minute ago says nothing.
    """
    crowded = os.getloadavg()[0] / (os.cpu_count() or 1) if FACTOR > 1 else 1.0
    return seconds * FACTOR * max(1.0, crowded)
