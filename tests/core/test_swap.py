"""Changing policies while requests run: nobody is lost, nothing changes until the candidate is ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from kvyard.core.advice import PolicySet
from kvyard.core.scheduler import Scheduler
from kvyard.core.swap import SLICE_NS, TRANSITIONS, SwapBusy, SwapState
from kvyard.link.record import Wait
from kvyard.policy import KINDS, Admission, Kind, OrderKey, ParamError, Policy, RequestView, Snapshot, Victims, nobody
from kvyard.policy.registry import load, load_discipline
from kvyard_policies.aging import AgingAdmission
from kvyard_policies.vllm import VllmAdmission, VllmPreemption, VllmPrefill

from tests.core.harness import Clock, run_all, run_step, scheduler_of, spec, step_parts
from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, ScriptedPrefill, scripted_set


def vllm_set(order: str = "fcfs") -> PolicySet:
    return PolicySet(VllmAdmission(order=order), VllmPreemption(order=order), VllmPrefill())


def everything(policies: PolicySet) -> dict[Kind, Policy]:
    return {kind: policies.get(kind) for kind in KINDS}


def waiting_ids(scheduler: Scheduler) -> list[int]:
    return [view.id for view in scheduler.snapshot.waiting]


class Adopting(ScriptedAdmission):
    """Keeps whom it was shown, in slices; may take its time and may fail."""

    def __init__(self, clock: Clock | None = None, fail_at: int = -1) -> None:
        super().__init__()
        self.slices: list[list[int]] = []
        self.clock = clock
        self.fail_at = fail_at

    def adopt(self, views: Sequence[RequestView]) -> None:
        if len(self.slices) == self.fail_at:
            raise ValueError("cannot take over")
        self.slices.append([view.id for view in views])
        if self.clock is not None:
            self.clock.ns += SLICE_NS

    @property
    def seen(self) -> list[int]:
        return [id for part in self.slices for id in part]


def test_the_table_ends_in_done_or_refused() -> None:
    assert {state for state in SwapState if not TRANSITIONS[state]} == {SwapState.DONE, SwapState.REFUSED}
    assert set(TRANSITIONS) == set(SwapState)


def test_a_small_change_is_over_in_the_call() -> None:
    scheduler = scheduler_of(scripted_set())
    scheduler.add(spec(1))
    run_step(scheduler)
    old = scheduler.policies
    ticket = scheduler.swap(everything(vllm_set()), names={"admission": "a"}, discipline="vllm")
    assert ticket.ok
    assert ticket.over
    assert ticket.previous is old
    assert ticket.step == 1, "the next step is the first that the new ones decide"
    assert scheduler.policies.discipline == "vllm"
    assert scheduler.policies.name("admission") == "a"
    assert scheduler.policies.name("prefill") == "vllm"
    assert run_all(scheduler)[-1].finished


def test_one_kind_alone_leaves_the_others_and_ends_the_discipline() -> None:
    policies = vllm_set()
    policies.discipline = "vllm"
    scheduler = scheduler_of(policies)
    ticket = scheduler.swap({"prefill": ScriptedPrefill()})
    assert ticket.ok
    assert scheduler.policies.discipline is None
    assert scheduler.policies.admission is policies.admission
    assert scheduler.policies.name("prefill") == "scripted"


def test_a_rollback_is_a_swap_to_the_previous_set() -> None:
    scheduler = scheduler_of(vllm_set("priority"))
    for id, priority in ((1, 0), (2, 9), (3, 1)):
        scheduler.add(spec(id, priority=priority))
    ticket = scheduler.swap(everything(vllm_set()))
    assert waiting_ids(scheduler) == [1, 2, 3]
    scheduler.swap(everything(ticket.previous))
    assert waiting_ids(scheduler) == [1, 3, 2]


def test_the_queue_is_in_the_new_order_when_the_swap_is_done() -> None:
    scheduler = scheduler_of(vllm_set(), max_running=1)
    for id, priority in ((1, 9), (2, 5), (3, 0), (4, 5)):
        scheduler.add(spec(id, priority=priority, max_new=1))
    assert run_step(scheduler).scheduled.keys() == {1}
    assert scheduler.swap({"admission": VllmAdmission(order="priority")}).ok
    assert [next(iter(log.scheduled)) for log in run_all(scheduler)] == [3, 2, 4]


def test_new_parameters_take_effect_at_the_boundary_with_their_order() -> None:
    scheduler = scheduler_of(vllm_set())
    for id, priority in ((1, 9), (2, 0)):
        scheduler.add(spec(id, priority=priority))
    ticket = scheduler.set_params("admission", {"order": "priority"})
    assert ticket.ok
    assert waiting_ids(scheduler) == [2, 1]
    with pytest.raises(ParamError, match="is one of fcfs, priority"):
        scheduler.set_params("admission", {"order": "random"})
    with pytest.raises(ParamError, match="no parameter 'color'"):
        scheduler.set_params("prefill", {"color": 1})
    assert scheduler.policies.admission.params.values()["order"] == "priority"
    assert not scheduler.has_work() or waiting_ids(scheduler) == [2, 1]
    assert scheduler.set_params("prefill", {"long_prefill": 4}).ok


def test_adoption_goes_in_slices_and_the_old_policy_serves_meanwhile() -> None:
    clock = Clock()
    scheduler = scheduler_of(scripted_set(), clock=clock, max_running=1)
    for id in range(1, 301):
        scheduler.add(spec(id, max_new=1))
    candidate = Adopting(clock)
    ticket = scheduler.swap({"admission": candidate})
    assert not ticket.over
    assert scheduler.has_work()
    assert len(candidate.slices) == 1
    old = scheduler.policies
    served: list[int] = []
    while not ticket.over:
        assert scheduler.policies is old, "`current` never names what is not in charge"
        scheduler.add(spec(1000 + len(served), max_new=1))
        served += run_step(scheduler).scheduled
        assert len(served) < 50
    assert scheduler.policies.admission is candidate
    assert served[: len(served) - 1] == list(range(1, len(served)))
    alive = set(scheduler.ledger.sequences)
    assert alive <= set(candidate.seen), "those that came in the meantime were shown too"
    assert len(candidate.seen) == len(set(candidate.seen)), "each once"


def test_a_candidate_that_fails_to_adopt_is_refused_with_nothing_changed() -> None:
    scheduler = scheduler_of(scripted_set())
    for id in range(1, 101):
        scheduler.add(spec(id))
    old = scheduler.policies
    ticket = scheduler.swap({"admission": Adopting(fail_at=1)})
    assert ticket.state is SwapState.REFUSED
    assert (ticket.code, ticket.ok) == ("raised", False)
    assert "cannot take over" in ticket.error
    assert scheduler.policies is old
    assert scheduler.take_exits() == [], "nobody in charge did anything wrong"
    assert scheduler.swap({"admission": Adopting()}).ok, "the next change is free to begin"


class BadKey(ScriptedAdmission):
    """Its key fails for one request."""

    def key(self, r: RequestView) -> OrderKey:
        return (1.0 / (r.arrival - 3),)


def test_a_candidate_whose_key_fails_is_refused_with_nothing_changed() -> None:
    scheduler = scheduler_of(scripted_set())
    for id in range(1, 6):
        scheduler.add(spec(id))
    ticket = scheduler.swap({"admission": BadKey()})
    assert ticket.state is SwapState.REFUSED
    assert "ZeroDivisionError" in ticket.error
    assert waiting_ids(scheduler) == [1, 2, 3, 4, 5]
    assert run_all(scheduler)[-1].finished
    assert scheduler.take_exits() == []


def test_a_candidate_with_unusable_declarations_is_refused() -> None:
    scheduler = scheduler_of(scripted_set())
    candidate = ScriptedPrefill()
    preemption = VllmPreemption()
    preemption.lookahead = 0  # type: ignore[misc]  # a mistake of its author
    assert scheduler.swap({"prefill": candidate, "preemption": preemption}).state is SwapState.REFUSED
    assert scheduler.policies.prefill is not candidate, "all or nothing"


def test_one_change_at_a_time() -> None:
    clock = Clock()
    scheduler = scheduler_of(scripted_set(), clock=clock)
    for id in range(1, 301):
        scheduler.add(spec(id))
    ticket = scheduler.swap({"admission": Adopting(clock)})
    with pytest.raises(SwapBusy):
        scheduler.swap({"prefill": VllmPrefill()})
    with pytest.raises(SwapBusy):
        scheduler.set_params("preemption", {})
    while not ticket.over:
        run_step(scheduler)
    assert scheduler.swap({"prefill": VllmPrefill()}).ok


def test_a_policy_of_another_kind_is_refused() -> None:
    scheduler = scheduler_of(scripted_set())
    with pytest.raises(ValueError, match="VllmPrefill is no admission policy"):
        scheduler.swap({"admission": VllmPrefill()})
    with pytest.raises(ValueError, match="is no order policy"):
        scheduler.swap({"order": VllmPrefill()})  # type: ignore[dict-item]  # what a client may send
    assert scheduler.swap({"admission": VllmAdmission()}).ok


def test_a_long_queue_is_reordered_in_slices() -> None:
    clock = Clock()
    scheduler = scheduler_of(vllm_set(), clock=clock, max_running=1)
    for id in range(1, 2001):
        scheduler.add(spec(id, priority=-id, max_new=1))

    class Slow(VllmAdmission):
        def key(self, r: RequestView) -> OrderKey:  # type: ignore[override]  # it was a constant
            clock.ns += SLICE_NS // 32
            return (r.priority,)

    ticket = scheduler.swap({"admission": Slow()})
    boundaries = 0
    while not ticket.over:
        run_step(scheduler)
        boundaries += 1
    assert 10 < boundaries < 80
    left = waiting_ids(scheduler)
    assert left == sorted(left, reverse=True)
    assert len(left) == 2000 - boundaries


def test_an_ejection_during_a_change_does_not_bring_the_culprit_back() -> None:
    clock = Clock()
    culprit = ScriptedPrefill()
    scheduler = scheduler_of(scripted_set(prefill=culprit), clock=clock)
    for id in range(1, 301):
        scheduler.add(spec(id))
    ticket = scheduler.swap({"admission": Adopting(clock)})
    culprit.share = lambda s, prompts, left: 1 // 0
    while not ticket.over:
        run_step(scheduler)
    assert ticket.ok
    assert scheduler.policies.name("prefill") == "builtin"
    assert scheduler.policies.name("admission") == "scripted"


def test_an_ejected_admission_policy_does_not_spoil_the_new_order() -> None:
    clock = Clock()
    culprit = ScriptedAdmission()
    scheduler = scheduler_of(scripted_set(culprit), clock=clock, max_running=1)
    for id in range(1, 301):
        scheduler.add(spec(id, priority=id % 7, max_new=1))

    class Candidate(AgingAdmission):
        def key(self, r: RequestView) -> OrderKey:  # type: ignore[override]  # it was a constant
            clock.ns += SLICE_NS // 32
            return (-r.arrival,)

    ticket = scheduler.swap({"admission": Candidate()})
    assert not ticket.over
    culprit.decide = lambda s: 1 // 0
    while not ticket.over:
        run_step(scheduler)
    assert ticket.ok
    left = waiting_ids(scheduler)
    assert left == sorted(left, reverse=True)
    assert set(left) | {row.id for row in scheduler.request_rows(1)} == set(scheduler.ledger.sequences)


def test_parameters_that_break_the_policy_put_it_out() -> None:
    class Fragile(VllmAdmission):
        def key(self, r: RequestView) -> OrderKey:  # type: ignore[override]  # it was a constant
            return (1.0 / (self.params.watermark - 0.5),)

    scheduler = scheduler_of(PolicySet(Fragile(), VllmPreemption(), VllmPrefill()))
    scheduler.add(spec(1))
    run_step(scheduler)
    scheduler.add(spec(2))
    scheduler.ledger.queue.settle()
    ticket = scheduler.set_params("admission", {"watermark": 0.5})
    assert ticket.state is SwapState.REFUSED
    assert [exit_.name for exit_ in scheduler.take_exits()] == ["vllm"]
    assert scheduler.policies.name("admission") == "builtin"
    assert run_all(scheduler)[-1].finished


def test_who_is_put_out_while_its_parameters_change_keeps_no_say_in_the_order() -> None:
    clock = Clock()

    class Slow(VllmAdmission):
        broken = False

        def key(self, r: RequestView) -> OrderKey:  # type: ignore[override]  # it was a constant
            clock.ns += SLICE_NS // 32
            return (-r.arrival,)

        def admit(self, s: Snapshot) -> Admission:
            return super().admit(s) if not self.broken else Admission(1 // 0)  # type: ignore[arg-type]

    policy = Slow()
    scheduler = scheduler_of(PolicySet(policy, VllmPreemption(), VllmPrefill()), clock=clock, max_running=1)
    for id in range(1, 301):
        scheduler.add(spec(id, max_new=1))
    run_step(scheduler)
    ticket = scheduler.set_params("admission", {"watermark": 0.2})
    assert not ticket.over
    policy.broken = True
    for _ in range(20):
        run_step(scheduler)
    assert (ticket.state, ticket.code) == (SwapState.REFUSED, "")
    assert "put out" in ticket.error
    assert [exit_.code for exit_ in scheduler.take_exits()] == ["raised"]
    left = waiting_ids(scheduler)
    assert left == sorted(left), "the built-in's order"
    assert scheduler.set_params("prefill", {"long_prefill": 4}).ok, "the next change is free to begin"


class DeclaresOnce(ScriptedPreemption):
    """Its declaration can be read once only."""

    reads = 0

    def __init__(self) -> None:
        VllmPreemption.__init__(self)

    @property
    def lookahead(self) -> int:  # type: ignore[override]
        self.reads += 1
        return 3 // (self.reads < 2)


def test_putting_one_out_asks_nothing_of_the_others() -> None:
    scheduler = scheduler_of(scripted_set(ScriptedAdmission(lambda s: 1 // 0), preemption=DeclaresOnce()))
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    assert [exit_.kind for exit_ in scheduler.take_exits()] == ["admission"]
    assert scheduler.advice.traits.lookahead == 2


def test_a_change_asks_nothing_of_those_that_stay_and_undoes_no_ejection() -> None:
    clock = Clock()
    culprit = ScriptedPrefill()
    scheduler = scheduler_of(scripted_set(preemption=DeclaresOnce(), prefill=culprit), clock=clock)
    for id in range(1, 301):
        scheduler.add(spec(id))
    ticket = scheduler.swap({"admission": Adopting(clock)})
    assert scheduler.advice.traits.divides
    culprit.share = lambda s, prompts, left: 1 // 0
    while not ticket.over:
        run_step(scheduler)
    assert ticket.ok
    assert not scheduler.advice.traits.divides, "the built-in's"
    assert scheduler.advice.traits.lookahead == 2


@pytest.mark.parametrize("moment", ["half a prompt", "swapped out", "paused", "idle"])
def test_a_swap_at_any_moment_loses_nothing(moment: str) -> None:
    swapping = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running), how="swap"))
    at_first = scripted_set(preemption=swapping) if moment == "swapped out" else vllm_set()
    scheduler = scheduler_of(at_first, blocks=10, swap_blocks=20, max_step_tokens=6)
    ended: list[int] = []
    if moment != "idle":
        for id in range(1, 6):
            scheduler.add(spec(id, prompt_len=10, max_new=9, tokens=True))
        for _ in range(1 if moment == "half a prompt" else 12):
            ended += [id for id, _ in run_step(scheduler).finished]
            if moment == "swapped out" and scheduler.swapped:
                break
        assert (scheduler.swapped > 0) == (moment == "swapped out")
        if moment == "paused":
            scheduler.pause()
    fresh: Any
    for number in range(40):
        fresh = scripted_set() if number % 2 else vllm_set("priority")
        assert scheduler.swap(everything(fresh)).ok
        ended += [id for id, _ in run_step(scheduler).finished]
    scheduler.resume()
    ended += [id for log in run_all(scheduler) for id, _ in log.finished]
    assert sorted(ended) == ([] if moment == "idle" else [1, 2, 3, 4, 5])
    assert not scheduler.has_work()
    assert scheduler.blocks_used == 0


def test_reasons_of_a_policy_that_is_no_longer_in_charge_are_forgotten() -> None:
    scheduler = scheduler_of(scripted_set(), blocks=4)
    scheduler.add(spec(1, prompt_len=12, max_new=4))
    scheduler.add(spec(2, prompt_len=8, max_new=4))
    assert Wait(2, "blocks") in step_parts(scheduler).waits
    assert {row.id: row.reason.partition(":")[0] for row in scheduler.request_rows(9)} == {1: "", 2: "blocks"}
    assert scheduler.swap({"prefill": ScriptedPrefill()}).ok
    assert step_parts(scheduler).waits == [], "the same admission policy says the same"
    assert scheduler.swap({"admission": ScriptedAdmission(lambda s: nobody("not on Mondays"))}).ok
    assert step_parts(scheduler).waits == [Wait(2, ""), Wait(0, "not on Mondays")]
    assert {row.id: row.reason for row in scheduler.request_rows(9)} == {1: "", 2: "not on Mondays"}


def test_a_pause_does_not_keep_the_reasons_of_a_policy_that_went() -> None:
    scheduler = scheduler_of(scripted_set(), blocks=4)
    scheduler.add(spec(1, prompt_len=12, max_new=4))
    scheduler.add(spec(2, prompt_len=8, max_new=4))
    run_step(scheduler)
    scheduler.pause()
    assert scheduler.swap({"admission": ScriptedAdmission()}).ok
    scheduler.take_record_parts()
    scheduler.schedule(1.0)
    assert scheduler.take_record_parts().waits == [Wait(2, ""), Wait(0, "paused")]


@pytest.mark.parametrize("first", ["kvyard", "vllm-priority", "vllm"])
def test_a_key_with_state_is_asked_in_the_order_of_arrival_whatever_the_order_was(first: str) -> None:
    scheduler = scheduler_of(PolicySet(**parts_of(first)), max_running=1)  # type: ignore[arg-type]
    for id in range(1, 9):
        scheduler.add(spec(id, 4, 4, priority=9 - id, tenant="a", arrived=id / 100))
    scheduler.pause()
    run_step(scheduler)  # ordered by the first
    assert scheduler.swap(parts_of("fair-share")).ok
    scheduler.resume()
    served: list[int] = []
    while scheduler.has_work():
        served += [id for id, _ in run_step(scheduler).finished]
    assert served == list(range(1, 9))


def parts_of(discipline: str) -> dict[Kind, Policy]:
    """New policies of a discipline."""
    parts = load_discipline(discipline).parts
    return {kind: load(kind, name, params).policy for kind, (name, params) in parts.items()}


def test_a_change_ends_also_while_nothing_is_placed() -> None:
    clock = Clock()
    scheduler = scheduler_of(vllm_set(), clock=clock)
    for id in range(1, 2001):
        scheduler.add(spec(id, priority=id % 7))

    class Slow(AgingAdmission):
        def adopt(self, views: Sequence[RequestView]) -> None:
            clock.ns += SLICE_NS

    scheduler.pause()
    ticket = scheduler.swap({"admission": Slow()})
    assert not ticket.over
    steps = 0
    while not ticket.over and steps < 500:
        assert scheduler.changing
        assert scheduler.schedule(0.0).idle
        steps += 1
    assert ticket.ok
    assert steps > 5, "in slices"
    assert not scheduler.changing
    assert scheduler.running == 0


class Remembering(ScriptedAdmission):
    """Has state that it can hand on; says in which order it was called."""

    def __init__(self, known: int = 0, fail: str = "") -> None:
        super().__init__()
        self.known = known
        self.fail = fail
        self.calls: list[str] = []

    def export_state(self) -> dict[str, Any]:
        if self.fail == "export":
            raise ValueError("cannot tell")
        return {"known": self.known}

    def import_state(self, state: dict[str, Any]) -> None:  # type: ignore[override]  # plain values are what it gets
        self.calls.append("import")
        if self.fail == "import":
            raise ValueError("not mine")
        self.known = state["known"]

    def adopt(self, views: Sequence[RequestView]) -> None:
        self.calls.append("adopt")


def test_what_takes_the_place_under_the_same_name_gets_the_state_before_the_live_requests() -> None:
    scheduler = scheduler_of(scripted_set(admission=Remembering(5)))
    scheduler.add(spec(1))
    newer = Remembering()
    assert scheduler.swap({"admission": newer}).ok
    assert (newer.known, newer.calls) == (5, ["import", "adopt"])
    other = Remembering()
    assert scheduler.swap({"admission": other}, names={"admission": "another"}).ok
    assert (other.known, other.calls) == (0, ["adopt"]), "another policy: its state would mean something else"
    assert run_all(scheduler)


def test_a_candidate_that_cannot_take_the_state_is_refused() -> None:
    scheduler = scheduler_of(scripted_set(admission=Remembering(5)))
    in_charge = scheduler.policies.admission
    ticket = scheduler.swap({"admission": Remembering(fail="import")})
    assert (ticket.ok, ticket.code) == (False, "raised")
    assert "import_state() raised ValueError: not mine" in ticket.error
    assert scheduler.policies.admission is in_charge
    assert scheduler.take_exits() == []


def test_who_leaves_and_cannot_tell_its_state_hinders_nobody() -> None:
    scheduler = scheduler_of(scripted_set(admission=Remembering(5, fail="export")))
    newer = Remembering(1)
    assert scheduler.swap({"admission": newer}).ok
    assert (newer.known, newer.calls) == (1, [])
    assert scheduler.take_exits() == []


def test_new_parameters_alone_hand_nothing_over() -> None:
    scheduler = scheduler_of(PolicySet(AgingAdmission(), VllmPreemption(), VllmPrefill()))
    assert scheduler.set_params("admission", {"aging": 0.5}).ok
    assert run_step(scheduler).finished == []
