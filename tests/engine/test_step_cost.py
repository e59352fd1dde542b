"""A guard against regressions of `make bench-core`: generous, since machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.timing import limit

pytestmark = pytest.mark.alone

BENCH = Path(__file__).parents[2] / "bench" / "core.py"
FACTOR = 5
"""Times the limit."""


def measured(only: str) -> list[dict[str, Any]]:
    """Outcomes of the quick form."""
    done = subprocess.run(
        [sys.executable, str(BENCH), "--quick", "--json", "--only", only], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.timeout(180)
def test_a_step_costs_what_it_may_however_many_wait() -> None:
    rows = measured("mixed")
    for row in rows:
        assert row["us_p50"] < limit(FACTOR * row["limit_us"]), row
    growth = {row["waiting"]: row["growth"] for row in rows if row["growth"] is not None}
    assert growth.keys() == {10_000}
    assert growth[10_000] < 0.5, "from the same engine with a queue that has drained"
