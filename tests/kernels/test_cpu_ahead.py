"""The dearest kernels are compiled beside the loading of weights, once, and where they can be handed over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvyard_kernels import cpu_ahead


@pytest.fixture(autouse=True)
def nothing_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ahead, "_processes", [])


def test_they_are_in_the_cache_afterwards_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    cpu_ahead.start()
    assert len(cpu_ahead._processes) == 1
    (process,) = cpu_ahead._processes
    cpu_ahead.join()
    assert process.returncode == 0
    made = {path.name.partition("-")[0] for path in tmp_path.glob("*/*.nbi")}
    assert {"cpu_attention.attention", "cpu_quant.product", "cpu_quant.prepare"} <= made
    cpu_ahead.start()
    assert cpu_ahead._processes == []
    for index in tmp_path.glob("*/*.nbi"):
        os.utime(index, (0, 0))
    cpu_ahead.start()
    assert len(cpu_ahead._processes) == 1, "they are of older sources"
    cpu_ahead.join()


def test_without_a_cache_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    cpu_ahead.start()
    assert cpu_ahead._processes == []
    cpu_ahead.join()


def test_one_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_ahead, "LONGEST_S", 0.01)
    cpu_ahead.start()
    (process,) = cpu_ahead._processes
    cpu_ahead.join()
    assert process.returncode == -9
