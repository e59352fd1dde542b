"""The proof about tokens: requests of every shape, under every kind of pressure at once, equal their solo runs.

The pool is a fraction of what is asked for, so that sequences are preempted, by swap and by recomputation in
turns, and by recomputation where the host pool is full; prompts are longer than a step's budget and share
beginnings; and among them clients go away. Compared is everything a client is told: texts, token ids,
log-probabilities, ends, usage, and the hash of every row of logits that was sampled from.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.shapes import BYTES, WORDS, Answer, Shape, Vocabulary, bodies, run_alone, run_together
from tests.e2e.test_plugin_cases import distribution
from tests.e2e.timing import limit

BLOCK = 16
IN_TURNS = """
import numpy as np
from kvyard.policy import PreemptionPolicy, Victims

class InTurns(PreemptionPolicy):
    "Whoever has the fewest tokens in KV goes first; one is computed again, the next swapped out."
    api = (1, 0)

    def __init__(self):
        super().__init__()
        self.asked = 0

    def victims(self, s, short, who, cause):
        if cause == "admission":
            return Victims(())
        self.asked += 1
        order = np.lexsort((-s.cols.arrival, s.cols.computed)).tolist()
        return Victims([s.running[i] for i in order], how=("swap", "recompute")[self.asked % 2])
"""


@dataclass(frozen=True, slots=True)
class Pressure:
    """A load, and a pool that is too small for it."""

    count: int
    shape: Shape
    vocabulary: Vocabulary
    blocks: int
    swap_blocks: int
    at_once: int = 24
    step_tokens: int = 64
    """Longer prompts are computed in chunks."""

    @property
    def wanted(self) -> list[dict[str, Any]]:
        """The requests, the one with the longest prompt first."""
        asked = bodies(self.count, 61, self.shape, self.vocabulary)
        first = max(range(len(asked)), key=lambda number: len(asked[number]["prompt"]))
        return [asked[first], *asked[:first], *asked[first + 1 :]]

    @property
    def leavers(self) -> list[dict[str, Any]]:
        """Those whose clients go away: so long that no client reads too slowly to leave in time."""
        longest = self.blocks * BLOCK - self.shape.prompt[1] // 2
        shape = Shape((self.shape.prompt[0], self.shape.prompt[1] // 2), (longest, longest))
        asked = bodies(self.count // 5, 67, shape, self.vocabulary)
        return [body | {"ignore_eos": True, "stop": None, "stop_token_ids": None} for body in asked]

    def flags(self, dtype: str) -> tuple[str, ...]:
        """Of both daemons."""
        return ("--dtype", dtype, "--max-step-tokens", str(self.step_tokens))


@contextlib.contextmanager
def under_pressure(load: Pressure, model: Path, *chosen: str) -> Iterator[DaemonProcess]:
    """A daemon with the pool that is too small, where victims are swapped out and computed again in turns."""
    pool = ("--kv-blocks", str(load.blocks), "--swap-blocks", str(load.swap_blocks), "--prefix-cache")
    with tempfile.TemporaryDirectory(prefix="kvyard-victims-") as site:
        distribution(Path(site), "turns", "[kvyard.preemption]\nturns = turns:InTurns\n", turns=IN_TURNS)
        env = {"PYTHONPATH": site}
        with daemon(*chosen, *pool, "--max-running", "16", model=model, env=env) as running:
            with Client(running.socket) as client:
                assert client.call("policy.swap", {"kind": "preemption", "name": "turns", "params": {}})["ok"]
            yield running


async def all_at_once(running: DaemonProcess, load: Pressure) -> list[Answer]:
    """Run the load. Nothing is scheduled before as many wait as may come at once, each in its turn: however slowly
    they come, the same ones meet in the pool.

    The prompt of the first in the queue is in the prefix cache, so that something is found there in any case.
    """
    wanted, ahead = load.wanted, min(load.count, load.at_once)
    running.complete(wanted[0]["prompt"], max_tokens=1)
    with Client(running.socket) as client:
        client.call("pause")
        waiting = []
        for number, body in enumerate(wanted[:ahead]):
            waiting.append(asyncio.create_task(run_together(running.base, [body], [], 1)))
            come = sum(each["n"] for each in wanted[: number + 1])
            await asyncio.to_thread(wait_until, partial(all_wait, client, come), limit(20), f"request {number}")
        others = run_together(running.base, wanted[ahead:], load.leavers, load.at_once)
        following = asyncio.create_task(others)
        client.call("resume")
        return [answer for task in (*waiting, following) for answer in await task]


def all_wait(client: Client, count: int) -> bool:
    """So many sequences are there."""
    return int(client.call("requests", {"limit": 1})["total"]) >= count


def check_pressure(running: DaemonProcess, load: Pressure, got: Sequence[Answer]) -> None:
    """Everything that was meant to happen did."""
    ways = {how: value(running, "kvyard_preemptions_total", how=how) for how in ("swap", "recompute")}
    print("\npreemptions:", ways, "tokens found:", value(running, "kvyard_prefix_hit_tokens_total"))
    assert all(ways.values()), ways
    assert value(running, "kvyard_prefix_hit_tokens_total") > 0
    assert any(answer.cached for answer in got), "the usage tells of cached tokens"
    assert value(running, "kvyard_sequences_total", outcome="cancelled") > 0
    assert any(len(body["prompt"]) > load.step_tokens for body in load.wanted), "some prompts take several steps"
    assert value(running, "kvyard_engine_restarts_total") == 0


def check_same(got: Sequence[Answer], solo: Sequence[Answer], wanted: Sequence[dict[str, Any]]) -> None:
    """All of them, in everything."""
    differing = [number for number, (mine, alone) in enumerate(zip(got, solo, strict=True)) if not mine.same(alone)]
    if not differing:
        return
    first = differing[0]
    raise AssertionError(
        f"{len(differing)} of {len(wanted)} differ from their solo runs: {differing}\nrequest {first}: "
        f"{wanted[first]}\nunder pressure: {got[first]}\nalone: {solo[first]}"
    )


def both_ways(
    load: Pressure, model: Path, *chosen: str, quiet: DaemonProcess | None = None
) -> tuple[list[Answer], list[Answer]]:
    """The load under pressure and, at the same time in another daemon, each request alone.

    `quiet`: that other daemon where there is one already, with the same model in the same mode, and room.
    """
    with contextlib.ExitStack() as stack:
        ample = ("--kv-blocks", "512", "--max-running", "16")
        other = quiet or stack.enter_context(daemon(*chosen, *ample, model=model))
        running = stack.enter_context(under_pressure(load, model, *chosen))
        threads = stack.enter_context(ThreadPoolExecutor())
        before = value(other, "kvyard_preemptions_total")
        alone = threads.submit(run_alone, other.base, load.wanted)
        got = asyncio.run(all_at_once(running, load))
        idle_again(running)
        check_pressure(running, load, got)
        solo = alone.result()
        assert value(other, "kvyard_preemptions_total") == before
    return got, solo


def prove(load: Pressure, dtype: str, model: Path, quiet: DaemonProcess | None = None) -> None:
    """Deterministic: everything is equal."""
    got, solo = both_ways(load, model, "--deterministic", *load.flags(dtype), quiet=quiet)
    check_same(got, solo, load.wanted)
    hashes = sum(len(choice.hashes) for answer in got for choice in answer.choices.values())
    print(f"\n{dtype}: {len(got)} of {len(got)} requests, {hashes} rows of logits equal their solo runs")


QUICK = Pressure(200, Shape((1, 300), (1, 60)), BYTES, blocks=30, swap_blocks=24)
SHORT = Pressure(8, Shape((1, 90), (16, 40)), WORDS, blocks=6, swap_blocks=12, step_tokens=32)
WHOLE = Pressure(200, Shape((1, 300), (1, 60)), WORDS, blocks=30, swap_blocks=24)


def shared(request: pytest.FixtureRequest, name: str, dtype: str) -> DaemonProcess | None:
    """The daemon of all tests with that model, if it is of that type."""
    running: DaemonProcess | None = request.getfixturevalue(name) if dtype == "float32" else None
    return running


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_two_hundred_requests_of_a_small_model_equal_their_solo_runs(
    request: pytest.FixtureRequest, quick_model_folder: Path, dtype: str
) -> None:
    prove(QUICK, dtype, quick_model_folder, shared(request, "quick_daemon", dtype))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_of_the_default_model_equal_their_solo_runs(
    request: pytest.FixtureRequest, default_model: Path, dtype: str
) -> None:
    prove(SHORT, dtype, default_model, shared(request, "shared_daemon", dtype))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_hundred_requests_of_the_default_model_equal_their_solo_runs(default_model: Path, dtype: str) -> None:
    prove(WHOLE, dtype, default_model)
