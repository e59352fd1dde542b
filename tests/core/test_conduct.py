"""Conduct over many steps: who stands still or starves others is put out, and nobody else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvyard.core.conduct import LOOK_EVERY, ConductLimits
from kvyard.core.scheduler import Scheduler
from kvyard.link.record import Preemption
from kvyard.policy import (
    ADMIT,
    DECODE,
    PROMPT,
    RUNNING,
    Admission,
    Cause,
    RequestView,
    Shape,
    Snapshot,
    Victims,
    nobody,
)
from kvyard.policy.registry import load

from tests.core.harness import Clock, limits, run_step, spec
from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, ScriptedPrefill, scripted_set

SMALL = ConductLimits(overtakes=100, age_s=50.0, age_overtakes=10, idle_steps=200, idle_s=5.0)


def scheduler(
    admission: ScriptedAdmission | None = None,
    preemption: ScriptedPreemption | None = None,
    prefill: ScriptedPrefill | None = None,
    conduct: ConductLimits | None = SMALL,
    **changes: int,
) -> Scheduler:
    policies = scripted_set(admission, preemption, prefill)
    return Scheduler(limits(**changes), policies, clock_ns=Clock(), conduct=conduct)


def codes(target: Scheduler) -> list[tuple[str, str]]:
    return [(exit_.kind, exit_.code) for exit_ in target.take_exits()]


def run(target: Scheduler, steps: int, seconds: float, each: Callable[[int], None] | None = None) -> None:
    for number in range(steps):
        if each is not None:
            each(number)
        run_step(target, now=target.ledger.now + seconds / steps, check=False)


# ---- standing still --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decide", [lambda s: Admission(()), lambda s: nobody("never"), lambda s: nobody("x", wake=0)]
)
def test_who_admits_nobody_for_a_second_is_put_out(decide: Callable[[Snapshot], Admission]) -> None:
    target = scheduler(ScriptedAdmission(decide))
    target.add(spec(1))
    run(target, 30, 0.9)
    assert codes(target) == []
    run(target, 3, 0.3)
    assert codes(target) == [("admission", "stalled")]
    assert target.running == 1, "the built-in let it in"


def test_a_shape_that_never_asks_for_admission_is_the_one_to_blame() -> None:
    target = scheduler(prefill=ScriptedPrefill(Shape(((RUNNING,),))))
    target.add(spec(1))
    run(target, 30, 1.5)
    assert codes(target) == [("prefill", "stalled")]


def test_a_shape_without_prompt_tokens_is_the_one_to_blame() -> None:
    target = scheduler(prefill=ScriptedPrefill(Shape(((RUNNING, ADMIT),), prompts=0)))
    target.add(spec(1))
    run(target, 30, 1.5)
    assert codes(target) == [("prefill", "stalled")]


def test_a_declared_wake_up_is_no_stall() -> None:
    def window(s: Snapshot) -> Admission:
        return nobody("a window", wake=s.step + 5) if s.now < 30 else Admission(s.waiting)

    target = scheduler(ScriptedAdmission(window))
    target.add(spec(1))
    run(target, 100, 29.0)
    assert target.running == 0
    run(target, 5, 2.0)
    assert target.running == 1
    assert codes(target) == []


@pytest.mark.parametrize("ahead", [1, 10**15])
def test_waking_up_for_ever_without_a_decision_is_a_stall(ahead: int) -> None:
    target = scheduler(ScriptedAdmission(lambda s: nobody("a window", wake=s.step + ahead)))
    target.add(spec(1))
    run(target, 500, 119.0)
    assert codes(target) == []
    run(target, 20, 2.0)
    (exit_,) = target.take_exits()
    assert (exit_.kind, exit_.code) == ("admission", "stalled")
    assert "although wake-ups are declared" in exit_.message
    assert target.running == 1


def test_wake_ups_that_alternate_with_none_are_a_stall_too() -> None:
    target = scheduler(ScriptedAdmission(lambda s: nobody("a window", wake=s.step + s.step % 2)))
    target.add(spec(1))
    run(target, 500, 122.0)
    assert codes(target) == [("admission", "stalled")]


def test_windows_with_batches_in_between_are_no_stall() -> None:
    """Each of them half as long as what is too long, and something runs at the end of each."""

    def window(s: Snapshot) -> Admission:
        oldest = next(iter(s.waiting))
        return Admission(s.waiting) if s.now - oldest.arrived > 60 else nobody("a window", wake=s.step + 1)

    target = scheduler(ScriptedAdmission(window))
    for id in range(1, 8):
        target.add(spec(id, arrived=target.ledger.now))
        run(target, 200, 70.0)
    assert codes(target) == []
    assert not target.has_work()


def test_a_machine_that_stands_still_during_a_window_blames_nobody() -> None:
    target = scheduler(ScriptedAdmission(lambda s: nobody("a window", wake=s.step + 1)))
    target.add(spec(1))
    run(target, 10, 1000.0)
    assert codes(target) == []


def test_the_longest_window_of_a_discipline_is_far_from_a_stall() -> None:
    longest = load("admission", "dynamic-window").policy.params.specs["window"].le
    assert longest is not None
    assert ConductLimits().asleep_s >= 2 * longest


def test_holding_the_queue_while_something_runs_is_no_stall() -> None:
    target = scheduler(ScriptedAdmission(lambda s: nobody("static") if s.running else Admission(s.waiting)))
    target.add(spec(1, prompt_len=8, max_new=60))
    run_step(target)
    target.add(spec(2))
    run(target, 55, 60.0)
    assert codes(target) == []


def test_a_machine_that_stands_still_itself_blames_nobody() -> None:
    target = scheduler(ScriptedAdmission(lambda s: nobody("not yet") if s.step < 9 else Admission(s.waiting)))
    target.add(spec(1))
    run(target, 10, 100.0)
    assert codes(target) == []
    assert target.running == 1


def test_an_idle_or_paused_scheduler_blames_nobody() -> None:
    target = scheduler(ScriptedAdmission(lambda s: nobody("never")))
    run(target, 10, 100.0)
    target.add(spec(1))
    target.pause()
    run(target, 10, 100.0)
    target.resume()
    run_step(target, now=target.ledger.now + 0.5)
    assert codes(target) == []


def test_a_full_pool_blames_nobody() -> None:
    target = scheduler(blocks=4)
    target.add(spec(1, prompt_len=8, max_new=8))
    target.add(spec(2, prompt_len=15, max_new=2))
    run(target, 8, 20.0)
    assert codes(target) == []


# ---- starving --------------------------------------------------------------------------------------------------


def newcomer(target: Scheduler) -> Callable[[int], None]:
    return lambda number: target.add(spec(100 + number, prompt_len=2, max_new=1))


def test_who_passes_one_request_over_is_put_out() -> None:
    target = scheduler(ScriptedAdmission(lambda s: Admission([r for r in s.waiting if r.id != 1])))
    target.add(spec(1))
    run(target, 80, 5.0, newcomer(target))
    assert codes(target) == []
    run(target, 200, 5.0, lambda number: target.add(spec(1000 + number, prompt_len=2, max_new=1)))
    assert codes(target) == [("admission", "starving")]
    assert 1 not in [row.id for row in target.request_rows(99) if row.state == "waiting"]


@pytest.mark.parametrize(("priority", "ends"), [(1, []), (0, [("admission", "starving")])])
def test_who_serves_the_more_urgent_first_starves_nobody(priority: int, ends: list[tuple[str, str]]) -> None:
    """A request that its own client made less urgent than all the others waits for them, however many they are."""
    target = scheduler(ScriptedAdmission(lambda s: Admission([r for r in s.waiting if r.id != 1])))
    target.add(spec(1, priority=priority))
    run(target, 280, 5.0, newcomer(target))
    assert codes(target) == ends


def test_age_counts_only_with_overtakers() -> None:
    admission = ScriptedAdmission(lambda s: Admission([r for r in s.waiting if r.id != 1]))
    target = scheduler(admission, conduct=ConductLimits(age_s=50.0, age_overtakes=10))
    target.add(spec(1))
    run(target, LOOK_EVERY * 3, 100.0, newcomer(target))
    assert codes(target) == [("admission", "starving")]
    patient = scheduler(max_running=1, max_model_len=1024, blocks=300)
    patient.add(spec(1, prompt_len=2, max_new=1000))
    patient.add(spec(2))
    run(patient, LOOK_EVERY * 8, 1000.0)
    assert codes(patient) == [], "a long wait behind a long request is nobody's fault"


def retracting() -> tuple[ScriptedAdmission, ScriptedPreemption]:
    """In the order of the queue; the first victims are those that came first, and line up again at the end."""
    oldest = ScriptedPreemption(
        lambda s, who, cause: Victims(sorted(s.running, key=lambda r: r.arrival), requeue="tail")
    )
    return ScriptedAdmission(lambda s: Admission([(r, 1) for r in s.waiting])), oldest


def retracted(conduct: ConductLimits) -> Scheduler:
    """A scheduler in which sequence 1 was just put behind 200 that came after it."""
    target = scheduler(*retracting(), conduct=conduct, blocks=4, max_running=2)
    for id in (1, 2):
        target.add(spec(id, prompt_len=7, max_new=9))
    for id in range(3, 203):
        target.add(spec(id, prompt_len=2, max_new=1))
    for _ in range(40):
        run_step(target, now=target.ledger.now + 0.01, check=False)
        first = target.ledger.sequences[1]
        if first.preemptions:
            return target
    raise AssertionError("the pool is large enough for both")


def test_who_lines_up_again_at_the_end_is_not_passed_over_by_those_before_it() -> None:
    target = retracted(ConductLimits(overtakes=100, age_s=0.1, age_overtakes=10))
    run(target, 400, 40.0)
    assert codes(target) == []
    assert 1 not in target.ledger.sequences, "its turn came"


def test_a_successor_is_not_blamed_for_the_order_that_it_inherits() -> None:
    target = retracted(ConductLimits(overtakes=100, age_s=0.1, age_overtakes=10))
    assert target.swap({"admission": ScriptedAdmission()}).ok
    run(target, 400, 40.0)
    assert codes(target) == []
    assert 1 not in target.ledger.sequences


def test_who_passes_it_over_after_that_is_put_out() -> None:
    target = retracted(ConductLimits(overtakes=100, age_s=1e9))
    assert target.swap({"admission": ScriptedAdmission(lambda s: Admission([r for r in s.waiting if r.id != 1]))}).ok
    exits: list[tuple[str, str]] = []
    for number in range(800):
        target.add(spec(1000 + number, prompt_len=2, max_new=1))
        run_step(target, now=target.ledger.now + 0.01, check=False)
        exits += codes(target)
    assert exits == [("admission", "starving")]


def test_letting_in_and_out_again_without_anything_hides_no_starving() -> None:
    """The count of those that overtake goes on: whoever is let in without a token and put out got nothing."""
    target = scheduler(ScriptedAdmission(lambda s: Admission([r for r in s.waiting if r.id != 1])))
    target.add(spec(1))

    def in_and_out(number: int) -> None:
        newcomer(target)(number)
        seq = target.ledger.sequences.get(1)
        if seq is not None:
            seq.admissions += 1
            target._conduct._weigh(seq, seq, Preemption(1, 1, "growth", "recompute", 0))

    run(target, 300, 5.0, in_and_out)
    assert codes(target) == [("admission", "starving")]


def test_a_row_without_tokens_hides_no_starving() -> None:
    """It has a row while others pass it, gives it back by growth, and waits alone: at each look it waits."""
    victim = 3

    def admit(s: Snapshot) -> Admission:
        if s.preempted:
            return nobody("after a preemption")
        if all(view.id != victim for view in s.waiting):
            return Admission([view for view in s.waiting if len(s.running) < 6])
        if s.step % LOOK_EVERY > 40 or s.step % LOOK_EVERY == 0:
            return nobody("not yet")
        return Admission([(view, 1) for view in s.waiting if view.id == victim])

    def victims(s: Snapshot, who: RequestView, cause: Cause) -> Victims:
        out = [view for view in s.running if view.id == victim and s.step % LOOK_EVERY > 40]
        return Victims(out or list(reversed(s.running)), requeue="front")

    shape = Shape(((DECODE, ADMIT, PROMPT),))
    prefill = ScriptedPrefill(shape, share=lambda s, views, left: [0 if v.id == victim else left for v in views])
    policies = scripted_set(ScriptedAdmission(admit), ScriptedPreemption(victims), prefill)
    small = limits(blocks=14, max_running=8, max_step_tokens=64)
    conduct = ConductLimits(overtakes=100, age_s=50.0, age_overtakes=10)
    target = Scheduler(small, policies, clock_ns=Clock(), conduct=conduct)
    for id in (1, 2, victim):
        target.add(spec(id, prompt_len=6, max_new=12))
    for step in range(1000):
        if len(target.ledger.sequences) < 5:
            target.add(spec(100 + step, prompt_len=6, max_new=6 + step % 12))
        run_step(target, now=step * 0.01, check=False)
        if target.has_news:
            break
    assert codes(target) == [("admission", "starving")]


def test_a_backlog_in_order_blames_nobody() -> None:
    target = scheduler(max_running=2)
    for id in range(1, 801):
        target.add(spec(id, prompt_len=2, max_new=1))
    run(target, 420, 1000.0)
    assert codes(target) == []
    assert not target.has_work()


def test_a_shape_that_leaves_running_ones_without_tokens_is_put_out() -> None:
    prefill = ScriptedPrefill(Shape(((PROMPT, ADMIT), (DECODE,))))
    target = scheduler(prefill=prefill)
    target.add(spec(1, max_new=20))
    run(target, 2, 0.1)
    run(target, 600, 30.0, lambda number: target.add(spec(100 + number, prompt_len=2, max_new=1)))
    assert codes(target) == [("prefill", "starving")]


# ---- overrides -------------------------------------------------------------------------------------------------


def test_who_is_overridden_in_most_of_its_decisions_is_put_out() -> None:
    prefill = ScriptedPrefill(share=lambda s, prompts, left: [0] * len(prompts))
    target = scheduler(prefill=prefill, max_running=1)
    for id in range(1, 300):
        target.add(spec(id, prompt_len=2, max_new=1))
    run(target, 40, 0.5)
    assert codes(target) == []
    run(target, 100, 0.5)
    assert codes(target) == [("prefill", "overridden")]


def test_naming_no_victim_for_ever_is_put_out() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(()))
    target = scheduler(preemption=preemption, blocks=4, max_running=2, conduct=ConductLimits(window=20))
    for id in range(1, 100):
        target.add(spec(id, prompt_len=8, max_new=4))
    exits: list[tuple[str, str]] = []
    for _ in range(2500):
        run_step(target, now=target.ledger.now + 0.001, check=False)
        exits += codes(target)
        if exits or not target.has_work():
            break
    assert exits == [("preemption", "overridden")]
