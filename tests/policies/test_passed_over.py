"""Who was passed over for too long: found in time, kept until it came in, and looked for seldom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from kvyard.policy import Snapshot
from kvyard_policies import passed_over
from kvyard_policies.passed_over import LONGEST, LOOK_EVERY, PASSES, PassedOver


@dataclass
class Waits:
    arrival: int
    preemptions: int = 0


@dataclass
class Seen:
    """What is read of a snapshot."""

    waiting: list[Waits]
    admitted: int
    now: float = 0.0

    @property
    def count(self) -> Seen:
        return self


def due(watch: PassedOver, waiting: list[Waits], admitted: int, now: float = 0.0) -> Waits | None:
    return cast("Waits | None", watch.due(cast(Snapshot, Seen(waiting, admitted, now))))


def first_due(step: int, waiting: list[Waits]) -> int:
    watch = PassedOver()
    return next(n for n in range(0, 2000, step) if due(watch, waiting, n) is not None)


@pytest.mark.parametrize("step", [1, 7, LOOK_EVERY, 100])
def test_the_oldest_is_due_after_enough_others(step: int) -> None:
    assert PASSES <= first_due(step, [Waits(9), Waits(4), Waits(7)]) <= PASSES + LOOK_EVERY + step


def test_it_stays_due_until_it_is_gone_and_the_next_has_to_wait_as_long() -> None:
    watch, old, young = PassedOver(), Waits(4), Waits(9)
    due(watch, [young, old], 0)
    assert [due(watch, [young, old], PASSES + n) for n in range(3)] == [old] * 3
    assert due(watch, [young], PASSES + 4) is None
    assert due(watch, [young], 2 * PASSES) is None
    assert due(watch, [young], 2 * PASSES + LOOK_EVERY) is young


def test_after_a_preemption_it_is_counted_anew() -> None:
    watch, old = PassedOver(), Waits(4)
    due(watch, [old], 0)
    old.preemptions = 1
    assert due(watch, [old], PASSES) is None


def test_time_counts_where_few_come_in_and_not_where_nobody_does() -> None:
    watch, old = PassedOver(), Waits(4)
    assert due(watch, [old], 0) is None
    assert due(watch, [old], 0, LONGEST + 1) is None
    assert due(watch, [old], 1, LONGEST + 2 + LONGEST / 4) is old


def test_nobody_waits() -> None:
    watch = PassedOver()
    assert all(due(watch, [], n) is None for n in range(0, 999, 50))


def test_a_long_queue_is_walked_seldom_and_not_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed_over, "LOOKED_AT", 5)
    watch, walked = PassedOver(), 0

    class Line(list[Waits]):
        def __iter__(self) -> Any:  # noqa: ANN401 - an iterator
            nonlocal walked
            for view in super().__iter__():
                walked += 1
                yield view

    line = Line(Waits(99 - n) for n in range(50))
    for admitted in range(LOOK_EVERY * 4):
        due(watch, line, admitted)
    assert walked == 4 * 5
