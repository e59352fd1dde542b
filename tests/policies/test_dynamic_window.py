"""Dynamic batching over a window."""

from __future__ import annotations

import pytest
from kvyard.policy.params import ParamError
from kvyard.sim.arrivals import Arrival

from tests.policies.cores import arrive, core, scheduled
from tests.sim.loads import simulate


def test_the_oldest_waits_no_longer_than_the_window() -> None:
    run = simulate("dynamic-window,admission.window=0.5", [Arrival(1.0, 10, 2, 2), Arrival(1.2, 10, 2, 2)])
    assert run.observer.admitted[1:].tolist() == pytest.approx([1.5, 1.5], abs=0.011), "asked anew each 10 ms"


def test_enough_requests_start_at_once() -> None:
    load = [Arrival(1.0 + 0.01 * n, 10, 2, 2) for n in range(4)]
    run = simulate("dynamic-window,admission.window=9,admission.size=4", load)
    assert run.observer.admitted[1:].tolist() == pytest.approx([1.03] * 4)


def test_a_batch_runs_to_its_end() -> None:
    run = simulate("dynamic-window,admission.window=0", [Arrival(0.0, 10, 30, 30), Arrival(0.01, 10, 2, 2)])
    assert run.observer.admitted[2] == run.observer.finished[1]


def test_no_more_than_its_size() -> None:
    scheduler = core("dynamic-window,admission.size=2,admission.window=0")
    arrive(scheduler, *((id, 4, 1) for id in range(1, 6)))
    assert [scheduled(scheduler) for _ in range(3)] == [{1: 4, 2: 4}, {3: 4, 4: 4}, {5: 4}]


def test_waiting_for_the_window_is_declared_and_not_held_against_it() -> None:
    scheduler = core("dynamic-window,admission.window=30")
    arrive(scheduler, (1, 4, 1))
    for number in range(600):
        assert scheduled(scheduler, now=number * 0.05) == {}
    assert scheduler.wait_reason()[0] == "the window is open"
    assert scheduler.take_exits() == []
    assert scheduled(scheduler, now=30.0) == {1: 4}


def test_the_window_can_be_changed_while_it_waits() -> None:
    scheduler = core("dynamic-window,admission.window=30")
    arrive(scheduler, (1, 4, 1))
    assert scheduled(scheduler, now=2.0) == {}
    scheduler.set_params("admission", {"window": 1.0})
    assert scheduled(scheduler, now=2.0) == {1: 4}
    with pytest.raises(ParamError, match="at most 60"):
        scheduler.set_params("admission", {"window": 100.0})
