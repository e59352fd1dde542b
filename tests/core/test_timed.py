"""Limits of time in virtual time; what real signals do is in `test_guard`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
from kvyard.core.remains import is_foreign
from kvyard.core.timed import Budget, PolicyTimeout, Timed
from kvyard.policy import Policy
from kvyard_policies.vllm import VllmAdmission

from tests.core.harness import Clock

MS = 1_000_000


class Hand:
    """A timer that goes off when the test wants."""

    def __init__(self) -> None:
        self.tick: Callable[[FrameType | None], None] | None = None
        self.intervals: list[tuple[int, int]] = []

    def arm(self, tick: Callable[[FrameType | None], None], first_ns: int, every_ns: int) -> None:
        self.tick = tick
        self.intervals.append((first_ns, every_ns))

    def disarm(self) -> None:
        self.tick = None


@pytest.fixture
def wall() -> Clock:
    return Clock()


@pytest.fixture
def cpu() -> Clock:
    return Clock()


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def timed(wall: Clock, cpu: Clock, hand: Hand) -> Timed:
    return Timed(clock_ns=wall, cpu_ns=cpu, timer=hand, budget=Budget(hard_ns=50 * MS, wall_ns=500 * MS))


def test_a_process_that_stands_still_is_not_the_policys_fault(timed: Timed, wall: Clock) -> None:
    """No tick comes while it is stopped, or gets no processor; those that come count, before and after."""

    def act() -> str:
        for _ in range(3):
            wall.ns += 5_000 * MS
            timed.tick(None)
        return "went on"

    def act_on() -> str:
        act()
        for _ in range(30):
            wall.ns += 10 * MS
            timed.tick(None)
        return "went on"

    assert timed.protected(act) == "went on"
    assert timed.protected(act) == "went on", "each call by itself"
    assert timed.protected(act_on) is None


@pytest.mark.parametrize(
    ("cpu_ms", "wall_ms", "ended"), [(50, 50, False), (51, 51, True), (50, 500, False), (0, 501, True)]
)
def test_a_tick_ends_what_is_over_either_limit(
    timed: Timed, wall: Clock, cpu: Clock, cpu_ms: int, wall_ms: int, ended: bool
) -> None:
    def act() -> str:
        cpu.ns += cpu_ms * MS
        end = wall.ns + wall_ms * MS
        while wall.ns < end:
            wall.ns = min(end, wall.ns + 10 * MS)
            timed.tick(None)
        return "went on"

    assert timed.protected(act) == (None if ended else "went on")
    assert timed.ticks == 0


def test_a_tick_outside_ends_nobody(timed: Timed, cpu: Clock) -> None:
    cpu.ns += 10_000 * MS
    timed.tick(sys._getframe())
    assert timed.ticks == 0


def test_a_window_starts_the_timer_with_its_first_call_and_stops_it(timed: Timed, hand: Hand) -> None:
    with timed.armed():
        assert hand.tick is None, "nobody was asked yet"
        timed.begin(False)
        timed.begin(False)
        assert hand.intervals == [(50 * MS, 10 * MS)]
        with timed.armed():
            assert not timed.arm()
        assert hand.tick is not None, "the inner one is not its own"
    assert hand.tick is None


def test_time_between_two_calls_of_a_window_counts_for_neither(timed: Timed, wall: Clock, cpu: Clock) -> None:
    with timed.armed():
        timed.begin(False)
        for clock in (wall, cpu):
            clock.ns += 400 * MS
        timed._started_wall = wall.ns
        cpu.ns += 7 * MS
        assert timed.cpu_spent() == 7 * MS


def test_code_that_goes_on_is_ended_level_by_level_and_leaves_no_trace_function(timed: Timed, cpu: Clock) -> None:
    levels: list[str] = []

    def stubborn(name: str) -> None:
        try:
            cpu.ns += 60 * MS
            timed.tick(sys._getframe())
        except PolicyTimeout:
            levels.append(name)

    def act() -> str:
        for name in ("first", "second", "third"):
            stubborn(name)
        return "went on"

    assert timed.protected(act) is None
    assert levels == ["first", "second"], "at the third the handler itself is ended"
    assert sys.gettrace() is None


def test_who_is_foreign_is_told_by_its_module() -> None:
    class Theirs(Policy):
        kind = "admission"

    assert is_foreign(Theirs())
    assert not is_foreign(VllmAdmission())
    Theirs.__module__ = "kvyard_policies_of_mine"
    assert is_foreign(Theirs())
