"""What the daemon costs: time to ready, memory of the front, CPU while idle."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from kvyard_tui.feed import Feed
from kvyard_tui.model import Yard

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.timing import limit

pytestmark = pytest.mark.alone


def test_ready_in_under_four_seconds_and_small(default_model: Path) -> None:
    with daemon(model=default_model):
        pass  # the first start converts the weights and compiles the kernels
    with daemon(model=default_model) as running:
        assert running.ready_after < limit(4), f"{running.ready_after:.1f} s from `kvyard serve` to ready"
        front = psutil.Process(running.process.pid)
        for number in range(8):
            running.complete("A few words", max_tokens=8, seed=number)
        assert front.memory_info().rss < 150 << 20


@pytest.mark.timeout(120)
def test_the_first_start_takes_under_fifteen_seconds(default_model: Path, tmp_path: Path) -> None:
    fresh = {"KVYARD_CACHE_DIR": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    with daemon(model=default_model, env=fresh) as running:
        assert running.ready_after < limit(15), f"{running.ready_after:.1f} s at the first start"


def test_LIFECYCLE_15_idle_costs_under_two_percent_of_a_core(default_model: Path) -> None:
    """Alone, and watched by a screen and a collector of metrics that comes every second."""
    with daemon(model=default_model) as running:
        running.complete("warm", max_tokens=4)
        processes = [psutil.Process(pid) for pid in (running.process.pid, running.engine_pid)]
        time.sleep(0.5)
        check_idle(processes)
        warm = timed_first_token(running.base)
        time.sleep(1)
        assert timed_first_token(running.base) < warm + 0.05 * limit(1)
        with watched(running):
            check_idle(processes)


def check_idle(processes: list[psutil.Process]) -> None:
    """Front and engine each take less than two hundredths of a core."""
    shares = [idle_shares(processes)]
    while len(shares) < 4 and max(shares[-1]) >= 0.02:  # wake-ups cost more while the machine does other work
        shares.append(idle_shares(processes))
    print(f"shares of a core while idle, front and engine: {shares}")
    assert max(shares[-1]) < 0.02, shares


@contextlib.contextmanager
def watched(running: DaemonProcess) -> Iterator[None]:
    """The screen's own feed, as it asks for everything that it shows, and a scrape of the metrics every second."""

    async def watch() -> None:
        feed = Feed(running.socket, Yard(), lambda: None)
        task = asyncio.create_task(feed.run())
        async with httpx.AsyncClient(base_url=running.base) as http:
            while not over.is_set():
                await http.get("/metrics")
                seen.set()
                await asyncio.sleep(1.0)
        assert feed.yard.status is not None
        task.cancel()

    over, seen = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, watch())
        seen.wait(10)
        try:
            yield
        finally:
            over.set()
            done.result()


def idle_shares(processes: list[psutil.Process]) -> list[float]:
    """What each took of a core in three seconds."""
    before = [sum(process.cpu_times()[:2]) for process in processes]
    began = time.monotonic()
    time.sleep(3)
    spent = time.monotonic() - began
    return [(sum(process.cpu_times()[:2]) - start) / spent for process, start in zip(processes, before, strict=True)]


def timed_first_token(base: str) -> float:
    """Seconds for one token of a short prompt."""
    began = time.monotonic()
    body = {"model": "smollm2-135m", "prompt": [1000, 1001], "max_tokens": 1}
    httpx.post(base + "/v1/completions", json=body, timeout=30).raise_for_status()
    return time.monotonic() - began
