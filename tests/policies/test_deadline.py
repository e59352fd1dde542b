"""Earliest deadline first, and what becomes of those that are late."""

from __future__ import annotations

import numpy as np
import pytest
from kvyard.sim.arrivals import Arrival
from kvyard_policies.passed_over import LONGEST, LOOK_EVERY, PASSES

from tests.core.harness import run_all, run_step, spec
from tests.policies.cores import core, scheduled
from tests.sim.loads import simulate


def test_the_earliest_deadline_comes_in_first() -> None:
    scheduler = core("deadline", max_running=1)
    for id, deadline in ((1, 90.0), (2, 30.0), (3, None), (4, 70.0)):
        scheduler.add(spec(id, 4, 1, arrived=0.0, deadline=deadline))
    assert [id for log in run_all(scheduler) for id in log.cached] == [2, 3, 4, 1], "3 is due at 60"


def test_patience_is_the_deadline_of_those_that_name_none() -> None:
    scheduler = core("deadline,admission.patience=5", max_running=1)
    scheduler.add(spec(1, 4, 1, arrived=0.0, deadline=20.0))
    scheduler.add(spec(2, 4, 1, arrived=0.0))
    assert list(scheduled(scheduler)) == [2]


def fitted(text: str) -> tuple[list[int], dict[int, str]]:
    """A core that knows a step takes a second, one that is late and one that is early: who came, who was ended."""
    scheduler = core(text, max_running=1)
    scheduler.add(spec(1, 4, 20, arrived=0.0))
    for number in range(20):
        run_step(scheduler, now=float(number))
        scheduler.observe(1, 0, 1.0)
    scheduler.add(spec(2, 4, 10, arrived=19.0, deadline=22.0))
    scheduler.add(spec(3, 4, 10, arrived=19.0, deadline=60.0))
    order = []
    for number in range(20, 45):
        order += list(run_step(scheduler, now=float(number)).cached)
    return order, dict(scheduler.take_refusals())


@pytest.mark.parametrize(
    ("late", "order", "refused"), [("last", [3, 2], []), ("keep", [2, 3], []), ("refuse", [3], [2])]
)
def test_who_is_late_goes_behind_or_is_ended(late: str, order: list[int], refused: list[int]) -> None:
    came, ended = fitted(f"deadline,admission.late={late}")
    assert came == order
    assert list(ended) == refused
    assert all("deadline" in text for text in ended.values())


def test_who_named_no_deadline_is_never_ended() -> None:
    scheduler = core("deadline,admission.late=refuse,admission.patience=0.001", max_running=1)
    for id in range(1, 20):
        scheduler.add(spec(id, 4, 3, arrived=0.0))
    for number in range(100):
        run_step(scheduler, now=float(number))
        scheduler.observe(1, 0, 1.0)
    assert scheduler.take_refusals() == []
    assert not scheduler.has_work()


def test_the_latest_deadline_gives_way() -> None:
    scheduler = core("deadline", blocks=8, max_running=3)
    for id, deadline in ((1, 50.0), (2, 900.0), (3, 100.0)):
        scheduler.add(spec(id, 8, 12, arrived=0.0, deadline=deadline))
    preempted: list[int] = []
    while not preempted:
        preempted = run_step(scheduler).preempted
    assert preempted[0] == 2


def overload() -> list[Arrival]:
    draw = np.random.default_rng(3)
    arrivals, at = [], 0.0
    for _ in range(150):
        at += float(draw.exponential(0.022))
        output = int(draw.integers(10, 60))
        arrivals.append(Arrival(at, 60, output, output, deadline=at + float(draw.uniform(1.0, 8.0))))
    return arrivals


def in_time(text: str) -> int:
    load = overload()
    finished = simulate(text, load).observer.finished[1:]
    return int(np.sum(finished <= np.array([arrival.deadline for arrival in load])))


def test_under_overload_more_are_in_time_than_in_order_of_arrival() -> None:
    first_come, plain, aware = in_time("vllm"), in_time("deadline,admission.late=keep"), in_time("deadline")
    assert aware > 1.3 * first_come
    assert aware > plain, "plain EDF spends itself on those that are late already"


def passed_over(text: str, victim: float | None, others: float, step_s: float = 0.01, most: int = 1200) -> int:
    """Requests without end, due `others` seconds after they come, and one due at `victim`: who came before it."""
    scheduler = core(text, max_running=1)
    next_id, came = 2, 0
    scheduler.add(spec(1, 4, 1, arrived=0.0, deadline=victim))
    for number in range(most):
        now = number * step_s
        while scheduler.waiting < 20:
            scheduler.add(spec(next_id, 4, 1, arrived=now, deadline=now + others))
            next_id += 1
        log = run_step(scheduler, now=now, check=False)
        if 1 in log.cached:
            return came
        came += len(log.cached)
    return most


@pytest.mark.parametrize("late", ["last", "keep", "refuse"])
def test_a_far_deadline_does_not_wait_for_ever(late: str) -> None:
    assert 200 < passed_over(f"deadline,admission.late={late}", 1e6, 60.0) <= PASSES + 2 * LOOK_EVERY


@pytest.mark.parametrize("late", ["last", "refuse"])
def test_without_a_deadline_and_with_great_patience_neither(late: str) -> None:
    text = f"deadline,admission.late={late},admission.patience=1e9"
    assert 200 < passed_over(text, None, 60.0) <= PASSES + 2 * LOOK_EVERY


def test_one_late_request_does_not_wait_for_ever() -> None:
    assert 200 < passed_over("deadline", -1.0, 60.0) <= PASSES + 2 * LOOK_EVERY


def test_on_a_slow_machine_two_minutes_are_enough() -> None:
    assert LONGEST / 5 <= passed_over("deadline", 1e6, 60.0, step_s=5.0) <= LONGEST / 5 * 1.5 + 1


def test_a_far_deadline_waits_as_long_as_nothing_speaks_against_it() -> None:
    scheduler = core("deadline", max_running=1)
    scheduler.add(spec(1, 4, 1, arrived=0.0, deadline=1e6))
    for id in range(2, 100):
        scheduler.add(spec(id, 4, 1, arrived=0.0, deadline=500.0 - id))
    order = [id for log in run_all(scheduler) for id in log.cached]
    assert order == [*range(99, 1, -1), 1]
