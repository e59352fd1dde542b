"""LightLLM's peak: the formula is the memory that is really needed, and admission keeps it within the pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvyard.policy.snapshot import IntColumn
from kvyard_policies import lightllm
from kvyard_policies.lightllm import SLACK, peak

from tests.core.harness import run_all
from tests.policies.cores import arrive, core, scheduled, steps

REQUESTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=12)


def held_at_most(requests: list[tuple[int, int]]) -> int:
    """Let all grow by a token at a time, each leaving when it has grown by what is expected."""
    most, now = 0, 0
    while requests:
        now += 1
        most = max(most, sum(held + now for _, held in requests))
        requests = [(expected, held) for expected, held in requests if expected > now]
    return most


@settings(max_examples=200)
@given(requests=REQUESTS)
def test_the_formula_is_the_worst_moment(requests: list[tuple[int, int]]) -> None:
    expected, held = (np.array(column, np.int64) for column in zip(*requests, strict=True))
    assert peak(expected, held) == held_at_most(requests)


@settings(max_examples=30, deadline=None)
@given(load=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=20))
def test_with_whole_outputs_expected_nothing_is_preempted(load: list[tuple[int, int]]) -> None:
    """Busy, as by default, outputs are taken for whole: the estimate is safe, in tokens of one to a block."""
    scheduler = core("lightllm-peak", blocks=300, block_size=1)
    arrive(scheduler, *((id, prompt, output) for id, (prompt, output) in enumerate(load, 1)))
    assert not [log for log in run_all(scheduler) if log.preempted]


def test_it_admits_more_than_whole_lives_when_requests_end_one_after_the_other() -> None:
    """A is nearly done when B comes: B's growth takes A's place."""
    peaked, whole = core("lightllm-peak", blocks=100, block_size=1), core("trtllm-no-evict", blocks=100, block_size=1)
    admitted = []
    for scheduler in (peaked, whole):
        arrive(scheduler, (1, 50, 6))
        steps(scheduler, 4)
        arrive(scheduler, (2, 10, 40))
        admitted.append(2 in scheduled(scheduler))
    assert admitted == [True, False]


def test_an_idle_pool_takes_outputs_for_shorter() -> None:
    load = [(id, 10, 2000) for id in range(1, 5)]
    counts = []
    for text in ("lightllm-peak", "lightllm-peak,admission.token_ratio=0.9"):
        scheduler = core(text, blocks=4500, block_size=1, max_model_len=4096)
        arrive(scheduler, *load)
        counts.append(len(scheduled(scheduler)))
    assert counts == [2, 4], "2,000 of max_tokens against 1,024"


def test_no_more_requests_than_asked() -> None:
    scheduler = core("lightllm-peak,admission.max_requests=3")
    arrive(scheduler, *((id, 4, 4) for id in range(1, 9)))
    assert list(scheduled(scheduler)) == [1, 2, 3]
    assert list(scheduled(scheduler)) == [1, 2, 3]


def test_one_that_fits_the_window_comes_in_when_nothing_runs() -> None:
    """314 tokens and the slack are the whole pool: it comes in alone, and the next when it has gone."""
    scheduler = core("lightllm-peak", blocks=20, block_size=16, max_model_len=320)
    arrive(scheduler, (1, 300, 15), (2, 300, 20))
    logs = run_all(scheduler)
    assert [id for log in logs for id, _ in log.finished] == [1, 2]
    assert not [log for log in logs if log.preempted]


@settings(max_examples=60, deadline=None)
@given(running=REQUESTS, waiting=REQUESTS, pool=st.integers(150, 900))
def test_as_many_come_in_as_one_by_one(
    running: list[tuple[int, int]], waiting: list[tuple[int, int]], pool: int
) -> None:
    scheduler = core("lightllm-peak", blocks=pool, block_size=1, max_running=64, max_step_tokens=2000)
    arrive(scheduler, *((id, prompt, output) for id, (output, prompt) in enumerate(running, 1)))
    came = scheduled(scheduler)
    assume(len(came) == len(running))
    lives = {id: (running[id - 1][0] - 1 + SLACK, running[id - 1][1] + 1) for id in came if running[id - 1][0] > 1}
    arrive(scheduler, *((100 + id, prompt, output) for id, (output, prompt) in enumerate(waiting)))
    expected = []
    for id, (output, prompt) in enumerate(waiting, 100):
        longer = {**lives, id: (output + SLACK, prompt)}
        columns = (np.array(column, np.int64) for column in zip(*longer.values(), strict=True))
        if lives and peak(*columns) >= pool:
            break
        expected.append(id)
        lives = longer
    assert [id for id in scheduled(scheduler) if id >= 100] == expected


def test_a_long_queue_costs_a_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(expected: IntColumn, held: IntColumn) -> int:
        nonlocal looks
        looks += 1
        return peak(expected, held)

    monkeypatch.setattr(lightllm, "peak", counted)
    scheduler = core("lightllm-peak", blocks=20_000, max_running=1024, max_step_tokens=8192)
    arrive(scheduler, *((id, 4, 20) for id in range(1, 1500)))
    assert len(scheduled(scheduler)) == lightllm.WINDOW
    assert looks <= 9
