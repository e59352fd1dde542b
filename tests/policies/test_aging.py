"""The default discipline: urgent first, nobody starves, and the bound on overtaking holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.core.advice import PolicySet
from kvyard.core.scheduler import Scheduler
from kvyard_policies.aging import AGING, AgingAdmission, AgingPreemption
from kvyard_policies.vllm import VllmPrefill

from tests.core.harness import run_all, run_step, scheduler_of, spec


def kvyard(aging: float = AGING, **changes: Any) -> Scheduler:  # noqa: ANN401
    policies = PolicySet(AgingAdmission(aging=aging), AgingPreemption(aging=aging), VllmPrefill())
    return scheduler_of(policies, **changes)


def order_of_admission(scheduler: Scheduler) -> list[int]:
    return [id for log in run_all(scheduler) for id in log.cached]


def test_without_priorities_it_is_first_come_first_served() -> None:
    scheduler = kvyard(max_running=2)
    for id in range(1, 9):
        scheduler.add(spec(id, max_new=3))
    assert order_of_admission(scheduler) == list(range(1, 9))


def test_a_smaller_number_is_more_urgent() -> None:
    scheduler = kvyard(max_running=1)
    for id, priority in ((1, 5), (2, -3), (3, 0)):
        scheduler.add(spec(id, priority=priority, arrived=0.0))
    assert order_of_admission(scheduler) == [2, 3, 1]


@settings(max_examples=50, deadline=None)
@given(
    load=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 20)), min_size=2, max_size=30),
    aging=st.sampled_from((0.05, 0.1, 1.0)),
)
def test_the_bound_on_overtaking(load: list[tuple[float, int]], aging: float) -> None:
    """Priority p is overtaken only by q < p that arrive within (p - q) / aging seconds after it."""
    scheduler = kvyard(aging, max_running=1)
    arrived = sorted(load)
    for id, (at, priority) in enumerate(arrived, 1):
        scheduler.add(spec(id, prompt_len=2, max_new=1, arrived=at, priority=priority))
    order = order_of_admission(scheduler)
    for place, id in enumerate(order):
        at, priority = arrived[id - 1]
        for overtaker in order[:place]:
            if overtaker > id:
                later, other = arrived[overtaker - 1]
                assert other < priority
                assert later - at <= (priority - other) / aging + 1e-9


def test_a_flow_of_urgent_requests_does_not_starve_the_others() -> None:
    scheduler = kvyard(aging=1.0, max_running=1)
    scheduler.add(spec(1, priority=5, arrived=0.0, max_new=2))
    started = None
    for second in range(1, 40):
        scheduler.add(spec(second + 1, priority=0, arrived=float(second), max_new=2))
        for _ in range(2):
            log = run_step(scheduler, now=float(second))
            if 1 in log.cached:
                started = second
    assert started is not None
    assert started <= 12, "five levels are made up in five seconds; the rest is the queue before it"


def test_zero_aging_is_strict_priority() -> None:
    scheduler = kvyard(aging=0.0, max_running=1)
    scheduler.add(spec(1, priority=1, arrived=0.0))
    for id in range(2, 6):
        scheduler.add(spec(id, priority=0, arrived=1e6))
    assert order_of_admission(scheduler) == [2, 3, 4, 5, 1]


def test_fair_06_an_urgent_request_takes_a_place_from_a_lesser_one() -> None:
    scheduler = kvyard(max_running=4, blocks=4000, max_model_len=1024)
    for id in range(1, 5):
        scheduler.add(spec(id, priority=10, max_new=400))
    for _ in range(20):
        run_step(scheduler)
    scheduler.add(spec(5, priority=0))
    logs = [run_step(scheduler) for _ in range(5)]
    assert [id for log in logs for id in log.preempted] == [4]
    assert 5 in logs[0].sampled
    finished = {id for log in run_all(scheduler) for id, _ in log.finished}
    assert finished | {id for log in logs for id, _ in log.finished} == {1, 2, 3, 4, 5}


def test_nobody_is_put_out_for_an_equal_or_for_somebody_younger() -> None:
    scheduler = kvyard(max_running=1)
    scheduler.add(spec(1, priority=1, arrived=0.0, max_new=30))
    run_step(scheduler)
    scheduler.add(spec(2, priority=1, arrived=1.0))
    assert run_step(scheduler).preempted == []
    scheduler.add(spec(3, priority=0, arrived=11.0))  # a level more urgent, more than a level younger
    assert run_step(scheduler).preempted == []
    scheduler.add(spec(4, priority=0, arrived=9.0))
    assert run_step(scheduler).preempted == [1]


def test_making_way_can_be_turned_off() -> None:
    scheduler = kvyard(max_running=1)
    scheduler.add(spec(1, priority=9, max_new=30))
    run_step(scheduler)
    scheduler.add(spec(2, priority=0))
    assert scheduler.set_params("admission", {"make_way": False}).ok
    log = run_step(scheduler)
    assert log.preempted == []
    assert scheduler.wait_reason()[0] == "slots"


def test_the_watermark_keeps_blocks_while_anything_runs() -> None:
    scheduler = kvyard(blocks=10)
    scheduler.set_params("admission", {"watermark": 0.5})
    scheduler.add(spec(1, prompt_len=12))
    scheduler.add(spec(2, prompt_len=12))
    assert run_step(scheduler).scheduled == {1: 12, 2: 12}
    scheduler.add(spec(3, prompt_len=4))
    assert 3 not in run_step(scheduler).scheduled


@pytest.mark.parametrize("priorities", [(0, 0, 0), (5, 0, 5), (0, 5, 9)])
def test_the_least_urgent_gives_way_when_blocks_are_short(priorities: tuple[int, ...]) -> None:
    scheduler = kvyard(blocks=6)
    scheduler.set_params("admission", {"watermark": 0.0})
    for id, priority in enumerate(priorities, 1):
        scheduler.add(spec(id, priority=priority))
    run_step(scheduler)
    worst = max(range(1, 4), key=lambda id: (priorities[id - 1] + AGING * id, id))
    log = run_step(scheduler)
    assert log.preempted[0] == worst
    assert log.scheduled


def test_a_crowd_under_pressure_ends_whole() -> None:
    scheduler = kvyard(blocks=20)
    for id in range(1, 41):
        scheduler.add(spec(id, max_new=1 + id % 30, priority=id % 3))
    finished = {id: reason for log in run_all(scheduler) for id, reason in log.finished}
    assert finished == dict.fromkeys(range(1, 41), "length")
    assert scheduler.take_exits() == []
