"""Kernels on torch's own OpenMP threads: all of the work is done, once, and no second pool appears."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from kvyard_kernels import cpu, cpu_rows
from kvyard_kernels.cpu_threads import Kernel, _parallel
from numba.core import caching


def _process_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_row_is_computed_whatever_the_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    residual = torch.randn(5000, 64)
    try:
        torch.set_num_threads(threads)
        out = cpu.rms_norm(residual, torch.ones(64), 1e-6, None, torch.float32)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(out.square().mean(-1), torch.ones(5000), atol=1e-4)


@pytest.mark.skipif(_parallel() is None, reason="torch has no OpenMP runtime here")
def test_threads_are_shared_with_torch() -> None:
    torch.mm(torch.randn(600, 600), torch.randn(600, 600))
    residual = torch.randn(5000, 64)
    before, python_threads = _process_threads(), threading.active_count()
    for _ in range(3):
        cpu.rms_norm(residual, torch.ones(64), 1e-6, None, torch.float32)
        torch.mm(torch.randn(600, 600), torch.randn(600, 600))
    assert _process_threads() <= before
    assert threading.active_count() == python_threads


_PROGRAM = """
from kvyard_kernels import cpu
import torch
print(float(cpu.gated(torch.ones(1, 8)).sum()))
"""


def _start(folder: Path) -> str:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    return result.stdout


def test_compiled_kernels_are_kept_for_the_next_start(tmp_path: Path) -> None:
    first = _start(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    assert len(kept) == 1
    assert _start(tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == kept


def test_without_a_place_for_the_cache_kernels_are_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(caching.CacheImpl, "__init__", refuse)
    kernel = Kernel(cpu_rows.gate)
    assert kernel._address != 0
