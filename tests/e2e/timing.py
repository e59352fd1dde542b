"""Time limits of the tests: stated for an unloaded machine, scaled in one place for a busy one."""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("KVYARD_TEST_TIME_FACTOR", "1"))
"""Multiplies every time limit; 1 unless the machine does other work at the same time."""


def limit(seconds: float) -> float:
    """A time limit for this machine at this moment: longer by as much as processes are more than cores."""
    return seconds * FACTOR * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
