"""The soak: thousands of short requests, a third of which end badly, and nothing of them is left."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import quick_model
from tests.e2e.soak import FAULTS, Crowd, Holdings, check_nothing_left, settled

MOST_GROWTH = 20 << 20
"""Bytes that a process may grow over the second half."""
STEP_TOKENS = 64
FLAGS = (
    *("--max-running", "16", "--kv-blocks", "128", "--swap-blocks", "32", "--prefix-cache"),
    # Step records are kept for ten minutes and up to 64 MiB: growth by intention, and none of what is looked for.
    *("--retention-mib", "1"),
    # oneDNN keeps up to 1,024 compiled products, one per matrix and number of rows: these are all met beforehand.
    *("--max-step-tokens", str(STEP_TOKENS)),
)


def soak(running: DaemonProcess, requests: int) -> None:
    """Half of the requests, a look at what is held, the other half, and another look."""
    engine = running.engine_pid
    with Client(running.socket, timeout=60) as client:
        for rows in range(1, STEP_TOKENS + 1):
            running.complete([1] * rows, max_tokens=1)
        base = Holdings.of(running, engine)
        halves, began = [], time.monotonic()
        for half in (1, 2):
            crowd = Crowd(running, seed=half)
            crowd.send(requests // 2)
            idle_again(running)
            check_nothing_left(running, client)
            halves.append(settled(running, engine, base))
            print(f"\nhalf {half}: {dict(crowd.outcomes)}")
            assert len(crowd.outcomes) >= 8, "everything that can happen did"
        spent = time.monotonic() - began
    growth = [after - before for before, after in zip(halves[0].rss, halves[1].rss, strict=True)]
    print(f"{requests} requests in {spent:.0f} s; growth of front and engine {[each >> 10 for each in growth]} KiB")
    assert max(growth) < MOST_GROWTH
    assert halves[1].threads <= base.threads or halves[1].threads == halves[0].threads
    assert value(running, "kvyard_metrics_faults_total") == 0
    assert value(running, "kvyard_engine_restarts_total") == 0
    assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick_model(tmp_path_factory.mktemp("quick"))


def test_MEMORY_03_memory_that_another_process_frees_while_the_pool_is_measured(quick: Path) -> None:
    with another_process_in_and_out(size=256 << 20), daemon(model=quick) as running:
        assert running.status()["kv"]["total"] > 0
        running.complete("a", max_tokens=2)


@contextlib.contextmanager
def another_process_in_and_out(size: int) -> Iterator[None]:
    """Another process that takes `size` bytes and gives them back, again and again."""
    code = f"while True: bytes(range(1, 129)) * ({size} // 128)"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.timeout(300)
def test_two_thousand_requests_leave_nothing(quick: Path) -> None:
    with daemon(*FLAGS, model=quick, env={"KVYARD_TEST_FAULTS": FAULTS}) as running:
        soak(running, 2000)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_thousand_requests_leave_nothing(quick: Path) -> None:
    with daemon(*FLAGS, model=quick, env={"KVYARD_TEST_FAULTS": FAULTS}) as running:
        soak(running, 20_000)
