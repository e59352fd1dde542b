"""The promise about tokens: in deterministic mode a row's logits never depend on its neighbours or on pressure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.streams import Result, Wish, run_all, run_each, stream, wishes
from tests.e2e.timing import limit

STREAMS = 100
POOL_BLOCKS = 60
"""Holds about 20 of the sequences below, so that preemption is forced."""


@pytest.fixture(scope="module")
def wanted() -> list[Wish]:
    return wishes(STREAMS, seed=1, output=(4, 32))


@pytest.fixture(scope="module")
def solo(default_model: Path, wanted: list[Wish]) -> Iterator[list[Result]]:
    with daemon("--deterministic", "--dtype", "float32", "--kv-blocks", "512", model=default_model) as running:
        yield run_each(running.base, wanted)


def check_equal(got: list[Result], solo: list[Result], wanted: list[Wish]) -> None:
    """Every stream whole, once, and with the logits of its solo run."""
    for number, (mine, alone, wish) in enumerate(zip(got, solo, wanted, strict=True)):
        assert mine.error == "", f"stream {number}: {mine.error}"
        assert mine.finishes == ["length"], f"stream {number}"
        assert len(mine.tokens) == wish.max_tokens
        assert mine.tokens == alone.tokens, f"stream {number}: tokens differ"
        assert len(mine.hashes) == wish.max_tokens
        assert mine.hashes == alone.hashes, f"stream {number}: logits differ from the solo run"


@pytest.mark.slow  # test_proof_equality is its short form, and harder
@pytest.mark.timeout(300)
@pytest.mark.parametrize("budget", [64, 256])
def test_a_hundred_streams_under_pressure_equal_their_solo_runs(
    default_model: Path, solo: list[Result], wanted: list[Wish], budget: int
) -> None:
    flags = ("--deterministic", "--dtype", "float32", "--kv-blocks", str(POOL_BLOCKS))
    with daemon(*flags, "--max-step-tokens", str(budget), model=default_model) as running:
        base_kv = running.status()["kv"]
        got = asyncio.run(run_all(running.base, wanted))
        check_equal(got, solo, wanted)
        assert value(running, "kvyard_preemptions_total") > 0, "the pool was meant to be too small"
        idle_again(running)
        assert running.status()["kv"] == base_kv


HELD_AT = 100
"""Tokens of a sequence in KV with which the first step is held."""


def test_a_client_that_goes_away_frees_its_blocks_within_two_steps(quick_model_folder: Path, tmp_path: Path) -> None:
    """The engine is in a step while one goes; then it goes on."""
    go_on = tmp_path / "go on"
    held = {"point": "model", "action": "hold", "computed": HELD_AT, "until": str(go_on)}
    # A client that has read all and hangs up is known to be gone when it answers more bytes with a reset: steps take
    # so long that a busy front hears of it within one.
    slow = {"point": "model", "action": "sleep", "computed": HELD_AT, "seconds": limit(0.03)}
    faults = json.dumps([held, slow])
    with daemon("--kv-blocks", "256", model=quick_model_folder, env={"KVYARD_TEST_FAULTS": faults}) as running:
        stays = wishes(1, seed=3, output=(HELD_AT + 10, HELD_AT + 10), ids=(0, 250))[0]
        leaves = wishes(1, seed=4, output=(900, 900), ids=(0, 250))[0]
        asyncio.run(_leave_early(running, stays, leaves, go_on))


def _watch_steps(running: DaemonProcess, steps: list[tuple[float, int]]) -> None:
    """Start and number of sequences of each step, as they come, until the daemon ends."""
    with contextlib.suppress(ControlError, OSError), Client(running.socket) as client:
        found = (event.data for event in client.subscribe(["steps"]))
        steps.extend((data["at"], len(data["ids"])) for data in found if data.get("ids"))


async def _leave_early(running: DaemonProcess, stays: Wish, leaves: Wish, go_on: Path) -> None:
    steps: list[tuple[float, int]] = []
    threading.Thread(target=_watch_steps, args=(running, steps), daemon=True).start()
    reached = asyncio.Event()

    def on_token(wish: Wish, result: Result) -> None:
        if len(result.tokens) > HELD_AT - len(wish.prompt):
            reached.set()

    async with httpx.AsyncClient(base_url=running.base, timeout=60, verify=False) as client:
        staying, leaving = (
            asyncio.create_task(stream(client, wish, partial(on_token, wish))) for wish in (stays, leaves)
        )
        async with asyncio.timeout(limit(20)):
            await reached.wait()
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        await asyncio.sleep(limit(0.25))  # those that left unread bytes are known to be gone by now
        left = time.monotonic()
        await asyncio.to_thread(go_on.touch)
        await asyncio.to_thread(wait_until, lambda: steps[-1][1] == 1, limit(5), "one to be gone")
        assert sum(rows == 2 for at, rows in steps if at > left) <= 2, "steps that still computed for nobody"
        result = await staying
        assert result.finishes == ["length"]
    assert any(rows == 2 for _, rows in steps), "they ran together"
    idle_again(running)
