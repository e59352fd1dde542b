"""What the guard makes of what a policy does to the process, and what an exit record tells of its decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvyard.core.advice import REMEMBERED
from kvyard.core.containment import Breach
from kvyard.core.guard import Fault, Guard, NotLoaded
from kvyard.core.scheduler import PolicySet, Scheduler
from kvyard.policy import Admission, OrderKey, Policy, RequestView, Snapshot
from kvyard_policies.vllm import VllmAdmission, VllmPreemption, VllmPrefill

from tests.core.harness import Clock, limits, run_step, spec
from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, ScriptedPrefill, scripted_set

FORBIDDEN = Breach("forbidden", "opened a file")


class Watch:
    """A containment that notices what the test wants, and remembers what it was asked."""

    def __init__(self) -> None:
        self.active = False
        self.noticed: Breach | None = None
        self.notice: Breach | None = None
        self.memory: Breach | None = None
        self.asked: list[bool] = []
        self.looked = 0
        self.opened = 0
        self.closed = 0

    def look(self) -> None:
        self.looked += 1

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None:
        self.closed += 1

    def breach(self, thorough: bool) -> Breach | None:
        self.asked.append(thorough)
        notice = self.notice if thorough else None
        self.notice = None if thorough else self.notice
        return notice

    def out_of_memory(self) -> Breach | None:
        return self.memory


class Anything(Policy):
    """A policy with one method that does whatever the test wants."""

    kind = "admission"

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def admit(self) -> Any:  # noqa: ANN401 - whatever the test wants
        return self.act()


def guarded() -> tuple[Guard, Watch]:
    watch = Watch()
    return Guard(clock_ns=Clock(), containment=watch), watch


def fault_of(guard: Guard, act: Callable[[], Any]) -> Fault:
    with pytest.raises(Fault) as caught:
        guard.call("admission", Anything(act), "admit", lambda value: value)
    return caught.value


def test_a_breach_puts_the_policy_out_although_its_answer_is_good() -> None:
    guard, watch = guarded()
    watch.notice = FORBIDDEN
    fault = fault_of(guard, lambda: 1)
    assert (fault.code, fault.message) == ("forbidden", "the policy opened a file in admit()")
    assert not watch.active
    assert guard.call("admission", Anything(lambda: 2), "admit", lambda value: value) == 2


def test_a_breach_is_the_cause_whatever_it_made_the_policy_raise() -> None:
    guard, watch = guarded()
    watch.notice = FORBIDDEN
    assert fault_of(guard, lambda: 1 // 0).code == "forbidden"
    assert fault_of(guard, lambda: 1 // 0).code == "raised"


def test_the_containment_is_active_while_the_policy_runs_and_only_then() -> None:
    guard, watch = guarded()
    assert guard.call("admission", Anything(lambda: watch.active), "admit", lambda value: value) is True
    assert not watch.active


def hoard() -> None:
    raise MemoryError


@pytest.mark.parametrize(("found", "code"), [(Breach("memory", "asked for too much"), "memory"), (None, "raised")])
def test_who_wanted_the_memory_decides(found: Breach | None, code: str) -> None:
    guard, watch = guarded()
    watch.memory = found
    assert fault_of(guard, hoard).code == code


def test_memory_is_limited_while_somebody_elses_policy_runs() -> None:
    guard, watch = guarded()
    with guard.armed():
        guard.call("prefill", VllmPrefill(), "dump", lambda value: value)
        assert watch.opened == 0, "ours are known by their tests"
        for _ in range(3):
            guard.call("admission", Anything(lambda: 1), "admit", lambda value: value)
        assert (watch.opened, watch.closed) == (1, 0)
    assert (watch.opened, watch.closed) == (1, 1)


def scheduler_with(policies: PolicySet, watch: Watch) -> Scheduler:
    clock = Clock()
    guard = Guard(clock_ns=clock, containment=watch)
    return Scheduler(limits(max_running=2), policies, clock_ns=clock, guard=guard, salt=b"test")


def test_a_breach_in_the_engines_step_puts_out_who_did_it_in_that_step() -> None:
    watch = Watch()

    def admit(s: Snapshot) -> Admission:
        watch.notice = FORBIDDEN
        return Admission(s.waiting)

    scheduler = scheduler_with(scripted_set(ScriptedAdmission(admit)), watch)
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    (exit_,) = scheduler.take_exits()
    assert (exit_.kind, exit_.code, exit_.step) == ("admission", "forbidden", 0)
    assert scheduler.policies.name("prefill") == "scripted"


class Keyed(ScriptedAdmission):
    """Does something else while it is asked for keys."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.key = self.order

    def order(self, r: RequestView) -> OrderKey:
        self.watch.notice = FORBIDDEN
        return (r.arrival,)


def test_keys_are_looked_at_together_and_the_admission_policy_is_blamed() -> None:
    watch = Watch()
    scheduler = scheduler_with(scripted_set(Keyed(watch)), watch)
    for id in range(1, 6):
        scheduler.add(spec(id))
    run_step(scheduler)
    (exit_,) = scheduler.take_exits()
    assert (exit_.kind, exit_.name, exit_.code) == ("admission", "scripted", "forbidden")


def test_what_comes_with_kvyard_is_not_searched_after_every_call() -> None:
    watch = Watch()
    scheduler = scheduler_with(PolicySet(VllmAdmission(), VllmPreemption(), VllmPrefill()), watch)
    scheduler.add(spec(1))
    run_step(scheduler)
    assert True not in watch.asked
    assert watch.opened == 0


# ---- declarations and parameters are the policy's code, too -----------------------------------------------------


class Sets(ScriptedAdmission):
    """Does something else, or fails, while its parameters are set; and says in whose name it was entered."""

    def __init__(self, watch: Watch, fails: bool) -> None:
        super().__init__()
        self.watch = watch
        self.fails = fails

    def set_params(self, values: Any) -> None:  # noqa: ANN401 - any values
        if self.fails:
            raise ZeroDivisionError("half done")
        self.watch.notice = FORBIDDEN


@pytest.mark.parametrize(("fails", "code"), [(False, "forbidden"), (True, "raised")])
def test_who_fails_while_its_parameters_are_set_is_put_out(fails: bool, code: str) -> None:
    watch, seen = Watch(), list[Policy | None]()
    guard = Guard(clock_ns=Clock(), containment=watch, watch=lambda kind, policy, at: seen.append(policy))
    policies = scripted_set(Sets(watch, fails))
    scheduler = Scheduler(limits(), policies, clock_ns=Clock(), guard=guard, salt=b"test")
    scheduler.add(spec(1))
    run_step(scheduler)
    seen.clear()
    with pytest.raises(Fault, match=r"set_params\(\)") as caught:
        scheduler.set_params("admission", {})
    assert caught.value.code == code
    assert seen[0] is policies.admission, "who looks on from outside must know whose code it is"
    (exit_,) = scheduler.take_exits()
    assert (exit_.kind, exit_.name, exit_.code) == ("admission", "scripted", code)
    assert scheduler.policies.name("admission") == "builtin"
    scheduler.add(spec(2))
    assert run_step(scheduler).scheduled == {1: 1, 2: 8}


def test_memory_is_limited_while_somebody_elses_parameters_are_set_and_declarations_read() -> None:
    watch = Watch()
    scheduler = scheduler_with(scripted_set(), watch)
    watch.opened = 0
    assert scheduler.set_params("admission", {}).ok
    assert watch.opened == 1
    assert not scheduler.guard.remains, "nobody left"


def test_what_a_declaration_does_to_the_process_refuses_the_candidate() -> None:
    watch = Watch()

    class Declares(ScriptedPreemption):
        def __init__(self) -> None:
            VllmPreemption.__init__(self)  # its own would assign to the property

        @property
        def lookahead(self) -> int:  # type: ignore[override]
            watch.notice = FORBIDDEN
            return 1

    scheduler = scheduler_with(scripted_set(), watch)
    ticket = scheduler.swap({"preemption": Declares()})
    assert (ticket.ok, ticket.code, ticket.error) == (False, "forbidden", "the policy opened a file in `lookahead`")
    assert scheduler.take_exits() == []


# ---- last decisions --------------------------------------------------------------------------------------------


def test_the_exit_record_has_the_last_decisions_of_its_kind() -> None:
    scheduler = scheduler_with(scripted_set(ScriptedAdmission()), Watch())
    for id in range(1, 30):
        scheduler.add(spec(id, prompt_len=4, max_new=1))
        run_step(scheduler, now=float(id))
    scheduler.policies.admission.decide = lambda s: 1 // 0  # type: ignore[attr-defined]
    scheduler.add(spec(99))
    run_step(scheduler)
    (exit_,) = scheduler.take_exits()
    assert len(exit_.decisions) == REMEMBERED
    assert {told["call"] for told in exit_.decisions} == {"admit"}
    steps = [told["step"] for told in exit_.decisions]
    assert steps == sorted(steps)
    assert steps[-1] == exit_.step - 1
    assert exit_.decisions[-1]["answer"]["keep"] == 0


def test_a_successor_does_not_inherit_decisions() -> None:
    scheduler = scheduler_with(scripted_set(), Watch())
    for id in range(1, 9):
        scheduler.add(spec(id, max_new=1))
        run_step(scheduler)
    failing = ScriptedPrefill(share=lambda s, prompts, left: 1 // 0)
    assert scheduler.swap({"prefill": failing}).ok
    scheduler.add(spec(99))
    run_step(scheduler)
    (exit_,) = scheduler.take_exits()
    assert [(told["step"], told["call"]) for told in exit_.decisions] == [(exit_.step, "shape")]


def test_what_loading_does_to_the_process_refuses_it() -> None:
    guard, watch = guarded()
    watch.notice = Breach("tampered", "replaced a module of kvyard")
    with pytest.raises(NotLoaded, match="it replaced a module of kvyard while it was loaded") as caught:
        guard.load(lambda: 5)
    assert caught.value.code == "tampered"
    assert guard.load(lambda: 5) == 5
