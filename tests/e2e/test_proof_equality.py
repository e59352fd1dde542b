"""The proof about tokens: requests of every shape, under every kind of pressure at once, equal their solo runs.

The pool is a fraction of what is asked for, so that sequences are preempted, by swap and by recomputation in
turns, and by recomputation where the host pool is full; prompts are longer than a step's budget and share
beginnings; and among them clients go away. Compared is everything a client is told: texts, token ids,
log-probabilities, ends, usage, and the hash of every row of logits that was sampled from.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import quick_model
from tests.e2e.shapes import BYTES, WORDS, Answer, Shape, Vocabulary, bodies, run_alone, run_together

BUDGET = 64
"""Tokens of a step: longer prompts are computed in chunks."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """A load, and a pool that is too small for it."""

    count: int
    shape: Shape
    vocabulary: Vocabulary
    blocks: int
    swap_blocks: int
    at_once: int = 24

    @property
    def wanted(self) -> list[dict[str, Any]]:
        """The requests."""
        return bodies(self.count, 61, self.shape, self.vocabulary)

    @property
    def leavers(self) -> list[dict[str, Any]]:
        """Those whose clients go away: long, so that they are there to leave."""
        shape = Shape((self.shape.prompt[0], self.shape.prompt[1] // 2), (self.shape.output[1],) * 2)
        asked = bodies(self.count // 5, 67, shape, self.vocabulary)
        return [body | {"ignore_eos": True, "stop": None, "stop_token_ids": None} for body in asked]


def flags(dtype: str) -> tuple[str, ...]:
    """Of both daemons."""
    return ("--dtype", dtype, "--max-step-tokens", str(BUDGET))


@contextlib.contextmanager
def under_pressure(load: Pressure, model: Path, *chosen: str) -> Iterator[DaemonProcess]:
    """A daemon with the pool that is too small."""
    pool = ("--kv-blocks", str(load.blocks), "--swap-blocks", str(load.swap_blocks), "--prefix-cache")
    with daemon(*chosen, *pool, "--max-running", "16", model=model) as running:
        yield running


@contextlib.contextmanager
def victims_in_both_ways(running: DaemonProcess) -> Iterator[None]:
    """Meanwhile victims are swapped out and computed again in turns."""
    over = threading.Event()

    def alternate() -> None:
        with Client(running.socket) as client:
            ways = itertools.cycle(("swap", "recompute"))
            while not over.wait(0.05):
                client.call("policy.set", {"kind": "preemption", "params": {"how": next(ways)}})

    with Client(running.socket) as client, ThreadPoolExecutor() as threads:
        victims = {"kind": "preemption", "name": "fewest-computed", "params": {"how": "swap"}}
        assert client.call("policy.swap", victims)["ok"]
        alternation = threads.submit(alternate)
        try:
            yield
        finally:
            over.set()
        alternation.result()


def check_pressure(running: DaemonProcess, load: Pressure, got: Sequence[Answer]) -> None:
    """Everything that was meant to happen did."""
    ways = {how: value(running, "kvyard_preemptions_total", how=how) for how in ("swap", "recompute")}
    print("\npreemptions:", ways, "tokens found:", value(running, "kvyard_prefix_hit_tokens_total"))
    assert all(ways.values()), ways
    assert value(running, "kvyard_prefix_hit_tokens_total") > 0
    assert any(answer.cached for answer in got), "the usage tells of cached tokens"
    assert value(running, "kvyard_sequences_total", outcome="cancelled") > 0
    assert any(len(body["prompt"]) > BUDGET for body in load.wanted), "some prompts take several steps"
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


def both_ways(load: Pressure, model: Path, *chosen: str) -> tuple[list[Answer], list[Answer]]:
    """The load under pressure and, at the same time in another daemon, each request alone."""
    ample = ("--kv-blocks", "512", "--max-running", "16")
    with (
        daemon(*chosen, *ample, model=model) as quiet,
        under_pressure(load, model, *chosen) as running,
        ThreadPoolExecutor() as threads,
    ):
        alone = threads.submit(run_alone, quiet.base, load.wanted)
        with victims_in_both_ways(running):
            got = asyncio.run(run_together(running.base, load.wanted, load.leavers, load.at_once))
        idle_again(running)
        check_pressure(running, load, got)
        solo = alone.result()
        assert value(quiet, "kvyard_preemptions_total") == 0
    return got, solo


def prove(load: Pressure, dtype: str, model: Path) -> None:
    """Deterministic: everything is equal."""
    got, solo = both_ways(load, model, "--deterministic", *flags(dtype))
    check_same(got, solo, load.wanted)
    hashes = sum(len(choice.hashes) for answer in got for choice in answer.choices.values())
    print(f"\n{dtype}: {len(got)} of {len(got)} requests, {hashes} rows of logits equal their solo runs")


QUICK = Pressure(200, Shape((1, 300), (1, 60)), BYTES, blocks=30, swap_blocks=24)
SHORT = Pressure(16, Shape((1, 100), (6, 36)), WORDS, blocks=14, swap_blocks=12)
WHOLE = Pressure(200, Shape((1, 300), (1, 60)), WORDS, blocks=30, swap_blocks=24)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick_model(tmp_path_factory.mktemp("quick"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_two_hundred_requests_of_a_small_model_equal_their_solo_runs(quick: Path, dtype: str) -> None:
    prove(QUICK, dtype, quick)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_of_the_default_model_equal_their_solo_runs(default_model: Path, dtype: str) -> None:
    prove(SHORT, dtype, default_model)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_hundred_requests_of_the_default_model_equal_their_solo_runs(default_model: Path, dtype: str) -> None:
    prove(WHOLE, dtype, default_model)
