"""A guard against regressions of `make bench-core`: generous, since the machine may do other work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.timing import limit

BENCH = Path(__file__).parents[2] / "bench" / "core.py"
FACTOR = 6
"""Times the limit on a quiet machine."""


def measured(only: str) -> list[dict[str, Any]]:
    """Outcomes of the quick form."""
    done = subprocess.run(
        [sys.executable, str(BENCH), "--quick", "--json", "--only", only], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.timeout(180)
@pytest.mark.parametrize("only", ["decode", "mixed"])
def test_a_step_costs_what_it_may(only: str) -> None:
    for row in measured(only):
        assert row["us_p50"] < limit(FACTOR * row["limit_us"]), row


@pytest.mark.timeout(180)
def test_the_queue_costs_nothing_per_step() -> None:
    cost = {row["waiting"]: row["us_p50"] for row in measured("mixed") if row["running"] == 1024}
    assert cost[10_000] < cost[0] * 1.5
