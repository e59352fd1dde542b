"""The guard: whatever a policy does in a call becomes a Fault, and the built-in answers in the same step."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvyard.core.guard import Fault, Guard, Nonsense, NotLoaded
from kvyard.core.interrupt import SignalTimer
from kvyard.core.scheduler import Scheduler
from kvyard.core.timed import Budget
from kvyard.policy import RUNNING, Admission, Policy, Shape, Snapshot, Victims, nobody

from tests.core.harness import Clock, limits, run_all, run_step, scheduler_of, spec
from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, ScriptedPrefill, by_id, scripted_set

MS = 1_000_000


class Anything(Policy):
    """A policy with one method that does whatever the test wants."""

    kind = "admission"
    name = "anything"

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def admit(self) -> Any:  # noqa: ANN401 - whatever the test wants
        return self.act()


def same(value: Any) -> Any:  # noqa: ANN401 - whatever the test wants
    return value


# ---- what is returned ------------------------------------------------------------------------------------------

NOT_ADMISSIONS: dict[str, tuple[Callable[[Snapshot], Any], str]] = {
    "None": (lambda s: None, "not-a-decision"),
    "garbage": (lambda s: "all of them", "not-a-decision"),
    "a list": (lambda s: list(s.waiting), "not-a-decision"),
    "another decision": (lambda s: Victims(()), "not-a-decision"),
    "entries that are no iterable": (lambda s: Admission(5), "raised"),  # type: ignore[arg-type]
    "unknown ids": (lambda s: Admission([3]), "unknown"),  # type: ignore[list-item]
    "a view of its own making": (lambda s: Admission([type("View", (), {"id": 1})()]), "unknown"),
    "a running request": (lambda s: Admission([*s.running, *s.waiting]), "not-waiting"),
    "a request twice": (lambda s: Admission([*s.waiting, *s.waiting]), "duplicate"),
    "a negative need": (lambda s: Admission([(r, -1) for r in s.waiting]), "nonsense"),
    "a need that is no number": (lambda s: Admission([(r, 1.5) for r in s.waiting]), "nonsense"),  # type: ignore[misc]
    "a need beyond any pool": (
        lambda s: Admission([(r, 4 * s.blocks * s.block_size + 1) for r in s.waiting]),
        "over-committed",
    ),
    "a triple": (lambda s: Admission([(r, 1, 2) for r in s.waiting]), "nonsense"),  # type: ignore[misc]
    "a negative keep": (lambda s: Admission(s.waiting, keep=-1), "nonsense"),
    "a keep that is no number": (lambda s: Admission(s.waiting, keep=float("nan")), "nonsense"),  # type: ignore[arg-type]
    "a negative skip": (lambda s: Admission(s.waiting, skip=-5), "nonsense"),
    "a wake that is no step": (lambda s: nobody("later", wake="soon"), "nonsense"),  # type: ignore[arg-type]
    "a reason that is no text": (lambda s: nobody(object()), "nonsense"),  # type: ignore[arg-type]
    "a refusal without text": (lambda s: Admission(refuse=tuple((r, None) for r in s.waiting)), "nonsense"),  # type: ignore[misc]
    "a refusal twice": (lambda s: Admission(refuse=tuple((r, "no") for r in [*s.waiting] * 2)), "duplicate"),
    "a refusal of nobody": (lambda s: Admission(refuse=((None, "no"),)), "unknown"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("decide", "code"), NOT_ADMISSIONS.values(), ids=NOT_ADMISSIONS.keys())
def test_a_nonsensical_admission_puts_the_policy_out_in_the_same_step(
    decide: Callable[[Snapshot], Any], code: str
) -> None:
    scheduler = scheduler_of(scripted_set(ScriptedAdmission()))
    scheduler.add(spec(1))
    run_step(scheduler)
    scheduler.add(spec(2))
    scheduler.policies.admission.decide = decide  # type: ignore[attr-defined]
    log = run_step(scheduler)
    (exit_,) = scheduler.take_exits()
    assert (exit_.kind, exit_.name, exit_.code) == ("admission", "scripted", code)
    assert exit_.step == 1
    assert log.scheduled == {1: 1, 2: 8}, "the built-in admits what the policy did not"
    assert scheduler.policies.name("admission") == "builtin"
    assert scheduler.policies.name("prefill") == "scripted", "the others stay where no discipline is in charge"
    assert run_all(scheduler)[-1].finished


def finished_view(s: Snapshot, kept: list[Any] = []) -> Victims:  # noqa: B006 - it keeps a view over steps on purpose
    if not kept:
        kept.extend(s.running)
    return Victims(kept)


NOT_VICTIMS: dict[str, tuple[Callable[..., Any], str]] = {
    "None": (lambda s, who, cause: None, "not-a-decision"),
    "unknown ids": (lambda s, who, cause: Victims([7]), "unknown"),  # type: ignore[list-item]
    "a waiting request": (lambda s, who, cause: Victims(by_id(s, 9)), "not-running"),
    "a victim twice": (lambda s, who, cause: Victims([s.running[0]] * 2), "duplicate"),
    "an unknown way": (lambda s, who, cause: Victims(s.running, how="burn"), "nonsense"),  # type: ignore[arg-type]
    "an unknown place": (lambda s, who, cause: Victims(s.running, requeue="middle"), "nonsense"),  # type: ignore[arg-type]
    "an exception": (lambda s, who, cause: 1 // 0, "raised"),
}


@pytest.mark.parametrize(("decide", "code"), NOT_VICTIMS.values(), ids=NOT_VICTIMS.keys())
def test_nonsensical_victims_put_the_policy_out_in_the_same_step(decide: Callable[..., Any], code: str) -> None:
    scheduler = scheduler_of(scripted_set(preemption=ScriptedPreemption(decide)), blocks=4, max_running=2)
    for id in (1, 2):
        scheduler.add(spec(id))
    run_step(scheduler)
    scheduler.add(spec(9))
    log = run_step(scheduler)
    (exit_,) = scheduler.take_exits()
    assert (exit_.kind, exit_.code) == ("preemption", code)
    assert log.preempted == [2]
    assert log.scheduled == {1: 1}


def test_a_finished_request_is_told_from_an_unknown_one() -> None:
    kept: list[Any] = []

    def decide(s: Snapshot) -> Admission:
        kept.extend(s.waiting if not kept else ())
        return Admission(kept)

    scheduler = scheduler_of(scripted_set(ScriptedAdmission(decide)))
    scheduler.add(spec(1, max_new=1))
    run_step(scheduler)
    scheduler.add(spec(2))
    run_step(scheduler)
    (exit_,) = scheduler.take_exits()
    assert exit_.code == "finished"
    assert "sequence 1 is finished" in exit_.message


NOT_SHAPES: dict[str, tuple[Any, str]] = {
    "None": (None, "not-a-decision"),
    "phases by name": (Shape((("running",),)), "nonsense"),  # type: ignore[arg-type]
    "no groups": (Shape(()), "nonsense"),
    "lists": (Shape([[1]]), "nonsense"),  # type: ignore[arg-type]
    "a group that is no tuple": (Shape((5,)), "nonsense"),  # type: ignore[arg-type]
    "too many phases": (Shape(((RUNNING,) * 17,)), "nonsense"),
    "negative prompts": (Shape(ScriptedPrefill().fixed.groups, prompts=-1), "nonsense"),
}


@pytest.mark.parametrize(("shape", "code"), NOT_SHAPES.values(), ids=NOT_SHAPES.keys())
def test_a_nonsensical_shape_puts_the_policy_out(shape: Any, code: str) -> None:  # noqa: ANN401
    prefill = ScriptedPrefill()
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    prefill.fixed = shape
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    assert [exit_.code for exit_ in scheduler.take_exits()] == [code]


@pytest.mark.parametrize("shares", [None, [], [1, 2, 3], [-1], [1.0], ["4"], [True], 4])
def test_nonsensical_shares_put_the_policy_out(shares: Any) -> None:  # noqa: ANN401
    prefill = ScriptedPrefill(share=lambda s, prompts, left: shares)
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    (exit_,) = scheduler.take_exits()
    assert exit_.kind == "prefill"


@pytest.mark.parametrize(
    ("share", "codes"),
    [
        (lambda s, prompts, left: [4 * s.budget] * len(prompts), []),
        (lambda s, prompts, left: [4 * prompt.wanted for prompt in prompts], []),
        (
            lambda s, prompts, left: [prompt.wanted + 1000 * (prompt.wanted < 16) for prompt in prompts],
            ["over-budget"],
        ),
        (lambda s, prompts, left: [4 * max(s.budget, prompt.wanted) + 1 for prompt in prompts], ["over-budget"]),
    ],
)
def test_a_share_may_be_more_than_fits_but_not_beyond_all_measure(share: Any, codes: list[str]) -> None:  # noqa: ANN401
    """Together they may be more than the step has in any case."""
    scheduler = scheduler_of(scripted_set(prefill=ScriptedPrefill(share=share)), max_step_tokens=16)
    for id, prompt_len in ((1, 40), (2, 8), (3, 50)):
        scheduler.add(spec(id, prompt_len=prompt_len))
    assert run_step(scheduler).scheduled == {1: 16}
    assert run_all(scheduler)[-1].finished
    exits = scheduler.take_exits()
    assert [exit_.code for exit_ in exits] == codes
    assert all(re.search(r"sequence \d is granted \d+ tokens, wants \d+", exit_.message) for exit_ in exits)


def test_what_divide_is_handed_is_not_its_to_change() -> None:
    def clears(s: Snapshot, prompts: Any, left: int) -> list[int]:  # noqa: ANN401
        prompts.clear()
        return []

    scheduler = scheduler_of(scripted_set(prefill=ScriptedPrefill(share=clears)), max_step_tokens=4)
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 4}
    assert [exit_.code for exit_ in scheduler.take_exits()] == ["raised"]
    assert run_all(scheduler)[-1].finished


def test_endless_decisions_are_cut() -> None:
    def forever(s: Snapshot) -> Iterator[Any]:
        yield from by_id(s, 1)
        yield from itertools.repeat(next(iter(s.waiting)))

    scheduler = scheduler_of(scripted_set(ScriptedAdmission(lambda s: Admission(forever(s)))))
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    assert [exit_.code for exit_ in scheduler.take_exits()] == ["duplicate"]


@pytest.mark.parametrize("key", [5, (None,), (float("nan"),), ("a",), [1.0]])
def test_a_nonsensical_key_puts_the_policy_out_and_the_queue_is_ordered_anew(key: Any) -> None:  # noqa: ANN401
    admission = ScriptedAdmission()
    admission.key = lambda r: (r.arrival,) if r.arrival < 3 else key
    scheduler = scheduler_of(scripted_set(admission), max_running=1)
    scheduler.add(spec(1, priority=5, max_new=1))
    scheduler.add(spec(2, priority=4, max_new=1))
    run_step(scheduler)
    scheduler.add(spec(3, priority=0, max_new=1))
    scheduler.add(spec(4, priority=9, max_new=1))
    order = [next(iter(run_step(scheduler).scheduled)) for _ in range(3)]
    assert order == [3, 2, 4], "the built-in goes by priority"
    assert [exit_.code for exit_ in scheduler.take_exits()] == ["nonsense"]


def test_a_key_that_fails_with_many_waiting_is_the_fault_of_its_policy_alone() -> None:
    """Keys are asked for in parts: after the first that fails, the built-in's order is declared, not a method."""
    admission = ScriptedAdmission()
    admission.key = lambda r: (1 // (r.arrival - 1),)
    scheduler = scheduler_of(scripted_set(admission), max_running=1)
    for id in range(1, 201):
        scheduler.add(spec(id, priority=200 - id))
    assert run_step(scheduler).scheduled == {200: 8}
    assert [exit_.name for exit_ in scheduler.take_exits()] == ["scripted"]


def test_who_comes_before_the_queue_is_in_the_order_of_the_built_in_puts_nobody_out() -> None:
    """A discipline with a key leaves for what another part of it did; the queue follows in the next step."""
    admission, preemption = ScriptedAdmission(), ScriptedPreemption(lambda s, who, cause: 1 // 0)
    admission.key = lambda r: (-r.arrival,)
    policies = scripted_set(admission, preemption)
    policies.discipline = "scripted"
    scheduler = scheduler_of(policies, max_running=2, blocks=4, block_size=4)
    for id in range(1, 5):
        scheduler.add(spec(id, prompt_len=8, max_new=8, priority=id))
    while not scheduler.has_news:
        run_step(scheduler)
    scheduler.add(spec(9, prompt_len=4, max_new=4, priority=0))
    steps = run_all(scheduler)
    assert [(exit_.kind, exit_.name) for exit_ in scheduler.take_exits()] == [("preemption", "scripted")]
    ended = [id for step in steps for id, _ in step.finished]
    assert sorted(ended) == [1, 2, 3, 4, 9]


def test_the_built_in_decides_in_its_own_order_at_once() -> None:
    scheduler = scheduler_of(scripted_set(ScriptedAdmission(lambda s: 1 // 0)), max_running=1)
    scheduler.add(spec(1, priority=9))
    scheduler.add(spec(2, priority=0))
    assert run_step(scheduler).scheduled == {2: 8}


# ---- what is raised --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(2), GeneratorExit(), RecursionError(), MemoryError()]
)
def test_whatever_is_raised_stays_inside(error: BaseException) -> None:
    def act() -> None:
        raise error

    guard = Guard(clock_ns=Clock())
    with pytest.raises(Fault) as caught:
        guard.call("admission", Anything(act), "admit", same)
    assert caught.value.code == "raised"
    assert type(error).__name__ in caught.value.message
    assert "act" in caught.value.trace


def test_an_exception_whose_text_fails_is_still_told() -> None:
    class Nasty(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    def act() -> None:
        raise Nasty

    with pytest.raises(Fault) as caught:
        Guard(clock_ns=Clock()).call("admission", Anything(act), "admit", same)
    assert "Nasty" in caught.value.message


def test_nonsense_in_a_check_keeps_its_code() -> None:
    def check(value: object) -> None:
        raise Nonsense("duplicate", "twice")

    with pytest.raises(Fault, match="returned nonsense: twice") as caught:
        Guard(clock_ns=Clock()).call("admission", Anything(lambda: 1), "admit", check)
    assert caught.value.code == "duplicate"


def test_a_missing_method_is_a_fault() -> None:
    with pytest.raises(Fault) as caught:
        Guard(clock_ns=Clock()).call("admission", Anything(lambda: 1), "nothing", same)
    assert caught.value.code == "raised"


def test_what_a_policy_was_handed_cannot_be_changed() -> None:
    for change in (
        lambda s: setattr(s, "free", 10**6),
        lambda s: setattr(next(iter(s.waiting)), "priority", 0),
        lambda s: delattr(s, "_ledger"),
        lambda s: s.cols.total.__setitem__(0, 5),
        lambda s: setattr(s.count, "finished", 5),
        lambda s: setattr(s.waiting, "x", 5),
    ):
        scheduler = scheduler_of(scripted_set(ScriptedAdmission(change)))
        scheduler.add(spec(1))
        scheduler.add(spec(2))
        run_step(scheduler)
        (exit_,) = scheduler.take_exits()
        assert exit_.code in ("raised", "not-a-decision")
        assert run_all(scheduler)


# ---- the discipline goes as a whole, and the exit record tells --------------------------------------------------


def test_a_discipline_goes_as_a_whole() -> None:
    policies = scripted_set(ScriptedAdmission(lambda s: 1 // 0))
    policies.discipline = "mine"
    scheduler = scheduler_of(policies)
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    (exit_,) = scheduler.take_exits()
    assert exit_.with_it == ("preemption/scripted", "prefill/scripted")
    assert scheduler.policies.discipline == "builtin"


def test_the_exit_record_has_snapshot_and_the_policys_own_words() -> None:
    admission = ScriptedAdmission(lambda s: 1 // 0)
    admission.dump = lambda: {"seen": 3, "deep": {"list": [1, object()]}}  # type: ignore[method-assign,dict-item]
    admission.export_state = lambda: {"version": 1}  # type: ignore[method-assign]
    scheduler = scheduler_of(scripted_set(admission))
    scheduler.add(spec(1))
    run_step(scheduler)
    (exit_,) = scheduler.take_exits()
    assert exit_.message == "admit() raised ZeroDivisionError: integer division or modulo by zero"
    assert exit_.snapshot["waiting"] == 1
    assert exit_.snapshot["free"] == 64
    assert exit_.dump["seen"] == 3
    assert isinstance(exit_.dump["deep"]["list"][1], str)
    assert exit_.exported == {"version": 1}
    assert "ZeroDivisionError" in exit_.traceback
    assert scheduler.take_exits() == []


def test_a_policy_whose_dump_fails_as_well_is_put_out_once() -> None:
    admission = ScriptedAdmission(lambda s: 1 // 0)
    admission.dump = lambda: 1 // 0  # type: ignore[method-assign,return-value,assignment]
    scheduler = scheduler_of(scripted_set(admission))
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    (exit_,) = scheduler.take_exits()
    assert exit_.dump == {}


def test_state_is_exported_and_handed_over_by_kind_and_name() -> None:
    class Learning(ScriptedAdmission):
        learnt = 0

        def export_state(self) -> dict[str, Any]:
            return {"version": 1, "learnt": self.learnt}

        def import_state(self, state: Any) -> None:  # noqa: ANN401 - plain JSON values
            self.learnt = state["learnt"]

    first, second = Learning(), Learning()
    first.learnt = 7
    states = scheduler_of(scripted_set(first)).export_states()
    assert states == {"admission/scripted": {"version": 1, "learnt": 7}}
    heir = scheduler_of(scripted_set(second))
    heir.import_states({**states, "prefill/gone": {"x": 1}})
    assert second.learnt == 7
    assert heir.take_exits() == []


@pytest.mark.parametrize("way", ["export_state", "import_state"])
def test_who_fails_in_handing_state_over_is_put_out(way: str) -> None:
    admission = ScriptedAdmission()
    setattr(admission, way, lambda *args: 1 // 0)
    scheduler = scheduler_of(scripted_set(admission))
    scheduler.add(spec(1))
    scheduler.export_states()
    scheduler.import_states({"admission/scripted": {"a": 1}})
    assert [exit_.code for exit_ in scheduler.take_exits()] == ["raised"]
    assert run_step(scheduler).scheduled == {1: 8}


# ---- cost ------------------------------------------------------------------------------------------------------


def ticking(clock: Clock, ns: int) -> Callable[[], int]:
    def act() -> int:
        clock.ns += ns
        return 1

    return act


def test_calls_and_time_are_counted_by_kind() -> None:
    clock = Clock()
    guard = Guard(clock_ns=clock)
    for _ in range(3):
        guard.call("prefill", Anything(ticking(clock, 500)), "admit", same)
    guard.override("prefill", "alone")
    costs = guard.take_costs()
    assert (costs["prefill"].calls, costs["prefill"].ns, costs["prefill"].overrides) == (3, 1500, {"alone": 1})
    assert guard.take_costs() == {}


def slow_calls(guard: Guard, policy: Anything, pattern: list[int]) -> int | None:
    """Call with these CPU times; the number of the call that put the policy out."""
    for number, spent in enumerate(pattern):
        policy.act = ticking(guard.cpu_ns, spent)  # type: ignore[arg-type]
        try:
            guard.call("admission", policy, "admit", same)
        except Fault as fault:
            assert fault.code == "too-slow"
            return number
    return None


def test_twenty_overruns_in_a_hundred_calls_are_too_many() -> None:
    def guard() -> Guard:
        clock = Clock()
        return Guard(clock_ns=clock, cpu_ns=clock)

    policy = Anything(lambda: 1)
    assert slow_calls(guard(), policy, [3 * MS] * 30) == 19
    assert slow_calls(guard(), policy, [3 * MS, 0, 0, 0, 0] * 30) == 95
    assert slow_calls(guard(), policy, [3 * MS, 0, 0, 0, 0, 0] * 60) is None
    assert slow_calls(guard(), policy, [2 * MS] * 300) is None, "at the budget is not over it"


def test_a_busy_machine_is_not_the_policys_fault() -> None:
    wall = Clock()
    guard = Guard(clock_ns=wall, cpu_ns=lambda: 0)
    begun, policy = wall.ns, Anything(ticking(wall, 30 * MS))
    assert [guard.call("admission", policy, "admit", same) for _ in range(300)] == [1] * 300
    assert wall.ns - begun >= 300 * 30 * MS


def test_the_watcher_is_told_who_runs_and_when_nobody_does() -> None:
    seen: list[Policy | None] = []
    guard = Guard(clock_ns=Clock(), watch=lambda kind, policy, at: seen.append(policy))
    good, bad = Anything(lambda: 1), Anything(lambda: 1 // 0)
    guard.call("admission", good, "admit", same)
    with pytest.raises(Fault):
        guard.call("admission", bad, "admit", same)
    assert seen == [good, None, bad, None]


# ---- the timer, with real signals ------------------------------------------------------------------------------


@pytest.fixture
def timed() -> Iterator[Guard]:
    """A guard with a real timer and a small budget."""
    before = signal.getsignal(signal.SIGALRM)
    timer = SignalTimer()
    loading = {"loading_cpu_ns": 80 * MS, "loading_wall_ns": 300 * MS}
    budget = Budget(hard_ns=20 * MS, wall_ns=100 * MS, tick_ns=4 * MS, **loading)
    yield Guard(clock_ns=time.perf_counter_ns, cpu_ns=time.thread_time_ns, timer=timer, budget=budget)
    timer.disarm()
    signal.signal(signal.SIGALRM, before)
    assert sys.gettrace() is None


def spin() -> None:
    while True:
        pass


def test_a_dump_that_hangs_is_ended(timed: Guard) -> None:
    """An operator's report must not take the engine down."""
    admission = ScriptedAdmission()
    admission.dump = spin  # type: ignore[method-assign, assignment]
    scheduler = Scheduler(limits(), scripted_set(admission), clock_ns=time.perf_counter_ns, guard=timed)
    scheduler.add(spec(1))
    told = scheduler.dump()["policies"]["admission"]
    assert (told["name"], told["state"]) == ("scripted", {})
    assert run_step(scheduler).scheduled == {1: 8}


def swallow_base() -> None:
    while True:
        try:  # noqa: SIM105 - the plain form is a case of its own
            sum(range(10))
        except BaseException:
            pass


def swallow_around_a_loop() -> None:
    while True:
        try:
            spin()
        except BaseException:
            for _ in range(1000):
                pass


def suppress() -> None:
    while True:
        with contextlib.suppress(BaseException):
            spin()


def finally_continue() -> None:
    while True:
        try:
            spin()
        finally:
            continue  # noqa: B012 - the case


def finally_spin() -> None:
    try:
        spin()
    finally:
        spin()


def lazy_generator() -> Iterator[int]:
    return (x for x in itertools.count() if x < 0)


def closing_generator() -> None:
    def numbers() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            spin()

    generator = numbers()
    next(generator)
    generator.close()  # type: ignore[attr-defined]


HANGS: list[Callable[[], Any]] = [
    spin,
    swallow_base,
    swallow_around_a_loop,
    suppress,
    finally_continue,
    finally_spin,
    closing_generator,
    lambda: re.match(r"(a+)+$", "a" * 40 + "b"),
    lambda: sorted(range(10**5), key=lambda x: sum(range(50))),
    lambda: [x for x in itertools.count() if x < 0],
    lambda: time.sleep(60),
    lambda: threading.Lock().acquire() and threading.Event().wait(60),
]


def test_a_process_that_was_stopped_is_not_the_policys_fault(timed: Guard) -> None:
    stopper = f"sleep 0.1; kill -STOP {os.getpid()}; sleep 0.8; kill -CONT {os.getpid()}"
    guard = Guard(clock_ns=time.perf_counter_ns, cpu_ns=time.thread_time_ns, timer=timed.timer)
    with subprocess.Popen(["sh", "-c", stopper]) as stopping:
        with guard.armed():
            assert guard.call("admission", Anything(lambda: time.sleep(0.3)), "admit", same) is None
        stopping.wait()


@pytest.mark.parametrize("hang", HANGS, ids=[f.__name__ + str(i) for i, f in enumerate(HANGS)])
def test_python_code_that_hangs_is_ended(timed: Guard, hang: Callable[[], Any]) -> None:
    start = time.perf_counter()
    with timed.armed(), pytest.raises(Fault) as caught:
        timed.call("admission", Anything(hang), "admit", same)
    assert caught.value.code == "timeout"
    spent = re.search(r"and was ended after (\d+) ms of CPU time and (\d+) ms by the clock$", caught.value.message)
    assert spent is not None
    limits = timed.budget
    assert int(spent[1]) >= limits.hard_ns / 1e6 or int(spent[2]) >= limits.wall_ns / 1e6
    assert int(spent[1]) <= 3 * limits.hard_ns / 1e6, "of CPU time, on whatever machine"
    # Three times the hard limit on an idle machine; a busy one takes the CPU away meanwhile.
    assert time.perf_counter() - start < 3.0
    assert sys.gettrace() is None
    with timed.armed():
        assert timed.call("admission", Anything(lambda: 5), "admit", same) == 5


@pytest.mark.parametrize("hang", [spin, swallow_base, finally_continue, lambda: time.sleep(60)])
def test_loading_that_does_not_end_is_ended(timed: Guard, hang: Callable[[], Any]) -> None:
    with pytest.raises(
        NotLoaded, match=r"did not end within 0\.08 s of CPU time or 0\.3 s; nothing changed"
    ) as caught:
        timed.load(hang)
    assert caught.value.code == "timeout"
    assert sys.gettrace() is None
    assert timed.load(lambda: 5) == 5
    with timed.armed(), pytest.raises(Fault, match="within 20 ms of CPU time or 100 ms"):
        timed.call("admission", Anything(spin), "admit", same)


def test_loading_may_take_longer_than_a_call_and_raise_what_it_likes(timed: Guard) -> None:
    def sleep() -> int:
        time.sleep(0.15)
        return 5

    assert timed.load(sleep) == 5
    with pytest.raises(KeyError):
        timed.load(lambda: sys.modules["no.such.module"])


def test_a_lazy_decision_is_timed_too(timed: Guard) -> None:
    with timed.armed(), pytest.raises(Fault) as caught:
        timed.call("admission", Anything(lazy_generator), "admit", list)
    assert caught.value.code == "timeout"


def test_an_exceptions_text_is_timed_too(timed: Guard) -> None:
    class Endless(Exception):
        def __str__(self) -> str:
            spin()
            return ""

    def act() -> None:
        raise Endless

    with timed.armed(), pytest.raises(Fault, match="Endless"):
        timed.call("admission", Anything(act), "admit", same)


def test_time_outside_policies_is_nobodys_fault(timed: Guard) -> None:
    with timed.armed():
        end = time.thread_time() + 0.06
        while time.thread_time() < end:
            pass
        assert timed.call("admission", Anything(lambda: 5), "admit", same) == 5


def test_a_hanging_policy_is_replaced_within_the_step() -> None:
    before = signal.getsignal(signal.SIGALRM)
    guard = Guard(
        clock_ns=time.perf_counter_ns,
        cpu_ns=time.thread_time_ns,
        timer=SignalTimer(),
        budget=Budget(hard_ns=10 * MS, tick_ns=2 * MS),
    )
    policies = scripted_set(ScriptedAdmission(lambda s: spin()))
    scheduler = Scheduler(limits(), policies, clock_ns=time.perf_counter_ns, guard=guard)
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    assert [exit_.code for exit_ in scheduler.take_exits()] == ["timeout"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "disarmed"
    signal.signal(signal.SIGALRM, before)


def test_the_timer_needs_the_main_thread() -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            SignalTimer()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_replaced_or_blocked_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGALRM)
    timer = SignalTimer()
    assert not timer.restore()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert timer.restore()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    assert timer.restore()
    assert not timer.restore()
    signal.signal(signal.SIGALRM, before)
