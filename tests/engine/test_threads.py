"""Threads are settled before torch is loaded, by the user first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kvyard.engine.threads import configure, usable_cores


def test_what_the_user_set_stands() -> None:
    environment = {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "7"}
    assert configure(environment) == 3
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["GOMP_SPINCOUNT"] == "7"


def test_otherwise_one_thread_per_usable_core() -> None:
    environment: dict[str, str] = {}
    assert configure(environment) == usable_cores()
    assert environment["OMP_NUM_THREADS"] == str(usable_cores())


def test_nested_thread_counts() -> None:
    assert configure({"OMP_NUM_THREADS": "4,2"}) == 4


@pytest.mark.parametrize(("text", "most"), [("max 100000", 1 << 20), ("50000 100000", 1), ("150000 100000", 2)])
def test_a_quota_of_the_cgroup_counts(tmp_path: Path, text: str, most: int) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(text, encoding="utf-8")
    assert usable_cores(tmp_path) == min(most, usable_cores(tmp_path / "nowhere"))


def test_importing_the_engine_settles_torchs_threads() -> None:
    program = "import kvyard.engine.loading, torch; print(torch.get_num_threads())"
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(result.stdout) == usable_cores()
