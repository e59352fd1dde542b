"""What policies leave behind: the end of their objects runs code of theirs, and the guard times it.

With real signals: an endless finalizer must end, and nobody may be blamed for the collector's own work.
"""

from __future__ import annotations

import gc
import re
import signal
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from kvyard.core.containment import Breach
from kvyard.core.guard import Fault, Guard, NotLoaded
from kvyard.core.interrupt import SignalTimer
from kvyard.core.remains import MOST_KEPT, Blame, Collection, Remains, Suspect, culprit
from kvyard.core.timed import Budget, PolicyTimeout
from kvyard.policy import Policy
from kvyard.policy.registry import RegistryError
from kvyard_policies.vllm import VllmAdmission

from tests.core.harness import Clock

MS = 1_000_000


class Anything(Policy):
    """A policy with one method that does whatever the test wants."""

    kind = "admission"

    def __init__(self, act: Callable[[], Any] = lambda: 1) -> None:
        super().__init__()
        self.act = act

    def admit(self) -> Any:  # noqa: ANN401 - whatever the test wants
        return self.act()


@pytest.fixture
def timed() -> Iterator[Guard]:
    """A guard with a real timer and a small budget; finalizers end with their tests."""
    before = signal.getsignal(signal.SIGALRM)
    timer = SignalTimer()
    budget = Budget(hard_ns=20 * MS, wall_ns=100 * MS, tick_ns=4 * MS)
    gc.collect()
    gc.disable()
    yield Guard(clock_ns=time.perf_counter_ns, cpu_ns=time.thread_time_ns, timer=timer, budget=budget)
    timer.disarm()
    signal.signal(signal.SIGALRM, before)
    gc.enable()
    assert sys.gettrace() is None
    assert sys.unraisablehook is hook


hook = sys.unraisablehook


@pytest.fixture(autouse=True)
def original_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest puts its own in its place, which would keep the exceptions."""
    global hook
    hook = sys.__unraisablehook__
    monkeypatch.setattr(sys, "unraisablehook", hook)


def call(guard: Guard, act: Callable[[], Any], policy: Policy | None = None) -> Any:  # noqa: ANN401
    with guard.armed():
        return guard.call("admission", policy or Anything(act), "admit", lambda value: None)


def collect(guard: Guard) -> Blame[str] | None:
    start = time.perf_counter()
    blame = guard.collect(lambda kind, policy: f"{kind}/{type(policy).__name__}")
    assert time.perf_counter() - start < 3.0, "three times the hard limit on an idle machine"
    assert guard.protected(lambda: sys.gettrace()) is None
    return blame


def spin() -> None:
    while True:
        pass


def swallow() -> None:
    while True:
        try:  # noqa: SIM105 - as a policy would
            sum(range(10))
        except BaseException:
            pass


def left(finish: Callable[[], Any], count: int = 1) -> Callable[[], None]:
    """Leaves cycles behind whose end is `finish`."""

    class Left:
        def __del__(self) -> None:
            finish()

    def act() -> None:
        for _ in range(count):
            one = Left()
            one.self = one  # type: ignore[attr-defined]

    return act


def left_callback() -> None:
    class Left:
        pass

    one = Left()
    one.self = one  # type: ignore[attr-defined]
    kept.append(weakref.ref(one, lambda ref: spin()))


def left_generator() -> None:
    def numbers() -> Iterator[Any]:
        try:
            yield mine
        finally:
            spin()

    mine: list[Any] = []
    mine.append(numbers())
    next(mine[0])


kept: list[Any] = []

ENDLESS: dict[str, Callable[[], None]] = {
    "loops": left(spin),
    "swallows": left(swallow),
    "sleeps": left(lambda: time.sleep(3600)),
    "a thousand loop": left(spin, 1000),
    "a thousand swallow": left(swallow, 1000),
    "a thousand take 1 ms each": left(lambda: sum(range(60_000)), 1000),
    "a callback loops": left_callback,
    "a generator loops in its end": left_generator,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_end_is_ended_and_blamed(timed: Guard, name: str) -> None:
    call(timed, ENDLESS[name])
    blame = collect(timed)
    assert blame is not None
    assert (blame.kind, blame.known_as, blame.code) == ("admission", "admission/Anything", "timeout")
    said = re.search(r"not done within 20 ms of CPU time or 100 ms, and was ended after (\d+) ms", blame.message)
    assert said is not None
    assert name.startswith("a thousand") or int(said[1]) <= 3 * 20
    assert "test_guard_remains.py" in blame.trace
    kept.clear()
    gc.collect()
    assert collect(timed) is None
    assert call(timed, lambda: 5) is None


def test_the_end_of_a_policy_itself_comes_within_the_guard(timed: Guard) -> None:
    class Endless(Anything):
        def __del__(self) -> None:
            spin()

    call(timed, lambda: 1, Endless())
    assert not timed.remains
    call(timed, lambda: 1)
    assert timed.remains, "another policy is called now"
    blame = collect(timed)
    assert blame is not None
    assert (blame.known_as, blame.code) == ("admission/Endless", "timeout")
    assert not timed.remains


def test_who_is_held_elsewhere_is_kept_for_a_while(timed: Guard) -> None:
    ended: list[bool] = []

    class Noted(Anything):
        def __del__(self) -> None:
            ended.append(timed.inside)

    holder = [Noted()]
    call(timed, lambda: 1, holder[0])
    call(timed, lambda: 1)
    assert collect(timed) is None
    assert not timed.remains, "no reason to collect at once again"
    holder.clear()
    assert ended == []
    assert collect(timed) is None
    assert ended == [True]


def test_who_holds_itself_is_let_go_all_the_same(timed: Guard) -> None:
    policy = Anything()
    policy.me = policy  # type: ignore[attr-defined]
    gone = weakref.ref(policy)
    call(timed, lambda: 1, policy)
    del policy
    call(timed, lambda: 1)
    for _ in range(MOST_KEPT + 1):
        assert gone() is not None
        assert collect(timed) is None
    assert gone() is None


def test_a_candidate_that_is_refused_ends_within_the_guard(timed: Guard) -> None:
    ended: list[bool] = []

    class Noted(Anything):
        def __del__(self) -> None:
            ended.append(timed.inside)

    timed.load(lambda: ({"admission": Noted()}, 1))
    assert ended == []
    assert timed.remains
    assert collect(timed) is None
    assert ended == [True]


def test_what_an_exception_holds_ends_within_the_guard(timed: Guard) -> None:
    ended: list[bool] = []

    class Noted:
        def __del__(self) -> None:
            ended.append(timed.inside)
            spin()

    def act() -> None:
        mine = Noted()
        raise ValueError(mine)

    start = time.perf_counter()
    with pytest.raises(Fault, match="raised ValueError"):
        call(timed, act)
    assert ended == [True]
    assert time.perf_counter() - start < 3.0


def test_what_a_candidates_frames_hold_ends_within_the_guard(timed: Guard) -> None:
    ended: list[bool] = []

    class Noted:
        def __del__(self) -> None:
            ended.append(timed.inside)

    def inner() -> None:
        mine, told = Noted(), Noted()
        raise KeyError(told, id(mine))

    def make() -> None:
        try:
            inner()
        except KeyError as error:
            raise RegistryError("not made") from error

    with pytest.raises(RegistryError, match="not made"):
        timed.load(make)
    assert ended == [True, True]


def test_a_timeout_while_loading_keeps_its_words(timed: Guard) -> None:
    timed.budget = Budget(loading_cpu_ns=20 * MS, loading_wall_ns=100 * MS, tick_ns=4 * MS)
    with pytest.raises(NotLoaded, match="did not end"):
        timed.load(spin)
    assert timed.remains, "it may have left cycles behind"
    assert collect(timed) is None
    assert not timed.remains


class Endless:
    """Its end does not end; `inside` tells of each whether the guard was there."""

    inside: ClassVar[list[bool]] = []

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def __del__(self) -> None:
        self.inside.append(self.guard.inside)
        end = time.perf_counter() + 3.0  # no `spin`: outside the guard nothing would end it
        while time.perf_counter() < end:
            pass


def keeps_and_spins(guard: Guard) -> None:
    mine = Endless(guard)
    spin()
    del mine


def raises_it_when_told_to_stop(guard: Guard) -> None:
    try:
        spin()
    except BaseException:
        raise ValueError(Endless(guard)) from None


def keeps_and_raises(guard: Guard) -> None:
    mine = Endless(guard)
    raise RegistryError("not made", str(id(mine)))


def leaves_a_cycle_and_raises(guard: Guard) -> None:
    mine = Endless(guard)
    mine.self = mine  # type: ignore[attr-defined]
    raise RegistryError("not made")


FAILURES: dict[str, tuple[Callable[[Guard], None], type[Exception]]] = {
    "keeps it and does not end": (keeps_and_spins, NotLoaded),
    "raises it when told to stop": (raises_it_when_told_to_stop, NotLoaded),
    "keeps it and raises": (keeps_and_raises, RegistryError),
    "leaves a cycle": (leaves_a_cycle_and_raises, RegistryError),
}


@pytest.mark.parametrize(("make", "error"), FAILURES.values(), ids=FAILURES.keys())
def test_what_a_candidate_that_failed_leaves_ends_within_the_guard(
    timed: Guard, make: Callable[[Guard], None], error: type[Exception]
) -> None:
    timed.budget = Budget(hard_ns=20 * MS, wall_ns=100 * MS, loading_cpu_ns=40 * MS, tick_ns=4 * MS)
    Endless.inside.clear()
    start = time.perf_counter()
    with pytest.raises(error) as caught:
        timed.load(lambda: make(timed))
    del caught
    assert collect(timed) is None, "nobody is in charge who could be blamed"
    assert Endless.inside == [True]
    assert time.perf_counter() - start < 2.0
    assert call(timed, lambda: 5) is None


class Mine:
    """Garbage of the engine's."""


def garbage(count: int) -> None:
    for _ in range(count):
        one = Mine()
        one.self = one  # type: ignore[attr-defined]


def test_a_long_collection_blames_nobody(timed: Guard) -> None:
    """The collector's own work, many times the hard limit."""
    call(timed, lambda: 1)
    garbage(400_000)
    start = time.thread_time()
    assert collect(timed) is None
    assert time.thread_time() - start > timed.budget.hard_ns / 1e9


def test_a_long_collection_with_short_finalizers_blames_nobody(timed: Guard) -> None:
    call(timed, left(lambda: sum(range(10)), 200))
    garbage(400_000)
    call(timed, left(lambda: sum(range(10)), 200))
    assert collect(timed) is None


def test_a_policy_of_ours_is_not_timed(timed: Guard) -> None:
    with timed.armed():
        timed.call("admission", VllmAdmission(), "dump", lambda value: value)
    ended: list[bool] = []

    class Noted:
        def __del__(self) -> None:
            ended.append(timed.inside)

    one = Noted()
    one.self = one  # type: ignore[attr-defined]
    del one
    assert collect(timed) is None
    assert ended == [False]


def test_other_exceptions_of_a_finalizer_are_told_as_ever(timed: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    call(timed, left(lambda: 1 // 0))
    assert collect(timed) is None
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_nobody_is_lost_when_a_tick_ends_the_collection_in_the_guards_own_code() -> None:
    """Over its limit, the timer goes off every 0.2 ms, between any two lines."""
    held, ends = [Anything(), Anything()], Anything()
    remains = Remains()
    for policy in (*held, ends):
        remains.leave("admission", policy)
    gone = weakref.ref(ends)
    del ends, policy
    one = Mine()
    one.self = one  # type: ignore[attr-defined]
    garbage_left = weakref.ref(one)
    del one

    def leavers() -> Iterator[Suspect[str]]:
        yield from (Suspect("admission", Anything, "it"), Suspect("admission", Anything, "held"))
        raise PolicyTimeout

    collection: Collection[str] = Collection(Clock(), Clock(), tick_ns=1, limits_ns=(1, 1))
    with pytest.raises(PolicyTimeout):
        collection.run(remains, leavers())
    assert [left.policy for left in remains.left] == held
    assert [left.kept for left in remains.left] == [0, 1]
    assert gone() is None
    assert garbage_left() is None, "what it left behind ends within the guard, too"


# ---- samples, in virtual time ----------------------------------------------------------------------------------


def sampled(*steps: tuple[int, int]) -> list[bool]:
    """Whether it is over at each tick, after so much CPU time and wall time (ms) since the one before."""
    cpu, wall = Clock(), Clock()
    collection: Collection[str] = Collection(cpu, wall, tick_ns=10 * MS, limits_ns=(50 * MS, 500 * MS))
    over = []
    for cpu_ms, wall_ms in steps:
        cpu.ns += cpu_ms * MS
        wall.ns += wall_ms * MS
        over.append(collection.over(sys._getframe()))
    return over


def test_time_between_two_samples_counts_as_one_interval_at_most() -> None:
    assert sampled((10, 10), *[(10, 10)] * 6) == [False] * 6 + [True]
    assert sampled((900, 900), (700, 5000), (700, 700), (700, 700)) == [False] * 4
    assert sampled(*[(0, 10)] * 52) == [False] * 51 + [True]
    assert sampled(*[(0, 1000)] * 40) == [False] * 40, "a busy machine"


# ---- who it was ------------------------------------------------------------------------------------------------


def plugin(name: str) -> tuple[Suspect[str], dict[str, Any]]:
    """A suspect from a module of its own, and that module's names."""
    module = types.ModuleType(name)
    text = "from kvyard.policy import Policy\nclass Theirs(Policy):\n    def admit(self): pass\n"
    exec(text, module.__dict__)
    return Suspect("admission", module.__dict__["Theirs"], name), module.__dict__


def test_the_code_tells_who_it_was() -> None:
    (one, of_one), (two, of_two) = plugin("one.policies"), plugin("two.policies")
    ours, other = {"__name__": "kvyard.core.guard"}, {"__name__": "functools"}
    both = [one, two]
    assert culprit((other, of_two, ours), both) is two
    assert culprit((other, of_one, ours), both) is one
    assert culprit((other, {"__name__": "two.helper"}, ours), both) is two
    assert culprit((other, ours), both) is None, "it might be either"
    assert culprit((), both) is None
    assert culprit((other, ours), [two]) is two
    assert culprit((), []) is None


def test_two_versions_of_a_plugin_are_told_apart() -> None:
    (old, of_old), (new, of_new) = plugin("same"), plugin("same")
    assert culprit((of_old,), [new, old]) is old
    assert culprit((of_new,), [new, old]) is new


class Refusing:
    """A containment that refuses what the test calls `forbidden`."""

    active = False
    noticed: Breach | None = None

    def look(self) -> None: ...

    def open(self) -> None: ...

    def close(self) -> None: ...

    def out_of_memory(self) -> Breach | None: ...

    def breach(self, thorough: bool) -> Breach | None:
        noticed, self.noticed = self.noticed, None
        return noticed

    def forbidden(self) -> None:
        if self.active:
            self.noticed = Breach("forbidden", "opened a file", (globals(),))


def test_what_a_finalizer_must_not_do_is_blamed() -> None:
    containment = Refusing()
    guard = Guard(clock_ns=Clock(), containment=containment)
    guard.call("admission", Anything(left(containment.forbidden)), "admit", lambda value: value)
    blame = collect(guard)
    assert blame is not None
    assert (blame.known_as, blame.code) == ("admission/Anything", "forbidden")
    assert "opened a file in code that it left behind" in blame.message


def test_without_a_step_a_policy_that_something_holds_is_kept_however_often_it_is_asked(timed: Guard) -> None:
    """Changes without a step between them: the core itself holds who left until the next step."""
    policy = Anything()
    gone = weakref.ref(policy)
    timed.remains.leave("admission", policy)
    holder = [policy]
    del policy
    for _ in range(3 * MOST_KEPT):
        assert timed.collect(lambda kind, policy: kind, stepped=False) is None
        assert len(timed.remains.left) == 1
    holder.clear()
    assert gone() is not None, "it ends within the guard"
    assert timed.collect(lambda kind, policy: kind) is None
    assert gone() is None
