"""Preemption by swap: KV goes to the host pool and comes back; when that is full, it is computed again."""

from __future__ import annotations

from typing import Any

import pytest
from kvyard.core.host_pool import HostPool
from kvyard.core.plan import Plan
from kvyard.core.scheduler import Scheduler
from kvyard.policy import ADMIT, PROMPT, RUNNING, Admission, Shape, Victims

from tests.core.harness import check_plan, commit, run_all, run_step, scheduler_of, spec, step_parts
from tests.core.kv_model import KvModel
from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, ScriptedPrefill, scripted_set


def swapping(host: int = 16, **changes: int) -> Scheduler:
    """Two sequences fill the pool of 4 blocks of 4; the second is swapped out when the first grows."""
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running), how="swap"))
    values: dict[str, Any] = {"blocks": 4, "swap_blocks": host, **changes}
    return scheduler_of(scripted_set(preemption=preemption), **values)


def started(scheduler: Scheduler) -> Plan:
    """The step in which sequence 2 goes out; not yet committed."""
    scheduler.add(spec(1, max_new=4, tokens=True))
    scheduler.add(spec(2, max_new=4, tokens=True))
    run_step(scheduler)
    return scheduler.schedule(1.0)


def test_a_pool_hands_out_what_it_has() -> None:
    pool = HostPool(3)
    assert pool.take(2) == [0, 1]
    assert pool.take(2) is None
    assert pool.free == 1
    pool.release([0, 1])
    assert (pool.free, pool.used) == (3, 0)


def test_a_victim_is_copied_out_and_comes_back_where_it_was() -> None:
    scheduler = swapping()
    plan = started(scheduler)
    (copy,) = plan.copies
    assert (copy.id, copy.direction, len(copy.source), len(copy.target)) == (2, "out", 2, 2)
    assert scheduler.swapped == 1
    (waiting,) = [row for row in scheduler.request_rows(9) if row.id == 2]
    assert (waiting.state, waiting.computed) == ("swapped", 8)
    commit(scheduler, plan)
    assert scheduler.ledger.host.used == 2
    scheduler.take_record_parts()
    back = next(log for log in iter(lambda: run_step(scheduler), None) if log.resumed)
    assert back.plan is not None
    (copy,) = back.plan.copies
    assert (copy.id, copy.direction) == (2, "in")
    assert back.scheduled[2] == 1, "one token to go: nothing is computed again"
    assert back.resumed == {2: 8}
    assert scheduler.ledger.host.used == 0
    assert run_all(scheduler)[-1].finished
    assert scheduler.blocks_used == 0


def test_the_record_tells_how_and_how_much() -> None:
    scheduler = swapping()
    started(scheduler)
    (entry,) = scheduler.take_record_parts().preempted
    assert (entry.id, entry.by, entry.cause, entry.how, entry.tokens) == (2, 1, "growth", "swap", 8)


def test_preempt_11_a_full_host_pool_falls_back_to_recompute() -> None:
    scheduler = swapping(host=1)
    plan = started(scheduler)
    assert plan.copies == []
    (entry,) = scheduler.take_record_parts().preempted
    assert (entry.how, entry.tokens) == ("recompute", 8)
    crowd = swapping(host=4, blocks=20, max_model_len=256)
    for id in range(1, 9):
        crowd.add(spec(id, max_new=60, tokens=True))
    finished = {id for log in run_all(crowd) for id, _ in log.finished}
    assert len(finished) == 8
    assert crowd.ledger.host.used == 0


@pytest.mark.parametrize("moment", ["swapped", "restoring"])
def test_leak_09_a_swapped_request_that_is_cancelled_gives_everything_back(moment: str) -> None:
    for _ in range(20):
        scheduler = swapping()
        plan = started(scheduler)
        commit(scheduler, plan)
        if moment == "restoring":
            while not run_step(scheduler, check=False).resumed:
                assert scheduler.has_work()
        assert scheduler.cancel([2]) == [2]
        assert scheduler.cancel([2]) == []
        assert scheduler.ledger.audit() == []
        scheduler.cancel([1])
        assert (scheduler.blocks_used, scheduler.ledger.host.used, scheduler.swapped) == (0, 0, 0)


def test_preempt_14_no_newcomer_goes_before_a_swapped_one_that_could_run() -> None:
    scheduler = swapping(max_running=2)
    plan = started(scheduler)
    commit(scheduler, plan)
    scheduler.take_record_parts()
    scheduler.add(spec(3, prompt_len=4, max_new=1, tokens=True))
    order = [id for log in run_all(scheduler) for id in (*log.resumed, *log.cached)]
    assert order == [2, 3]


def test_a_failed_step_loses_the_copy_and_computes_again() -> None:
    scheduler = swapping()
    plan = started(scheduler)
    scheduler.abandon(plan)
    assert scheduler.swapped == 0
    assert scheduler.ledger.host.used == 0
    assert [row.state for row in scheduler.request_rows(9)] == ["running", "preempted"]
    assert scheduler.ledger.audit() == []
    scheduler.take_record_parts()
    assert {id for log in run_all(scheduler) for id, _ in log.finished} == {1, 2}


def test_preempt_15_a_failed_swap_in_leaves_it_swapped() -> None:
    scheduler = swapping()
    plan = started(scheduler)
    commit(scheduler, plan)
    while True:
        plan = scheduler.schedule(2.0)
        if any(copy.direction == "in" for copy in plan.copies):
            break
        commit(scheduler, plan)
    scheduler.abandon(plan)
    assert scheduler.swapped == 1
    assert scheduler.ledger.audit() == []
    assert scheduler.finish(2, "error")
    assert scheduler.ledger.host.used == 0
    assert scheduler.ledger.audit() == []


def test_what_came_in_in_this_step_goes_back_without_a_copy() -> None:
    """A sequence restored and evicted again within one step has its KV still in the host pool."""
    preemption = ScriptedPreemption(
        lambda s, who, cause: Victims([r for r in reversed(s.running) if r.id != who.id], how="swap")
    )
    prefill = ScriptedPrefill()
    scheduler = scheduler_of(scripted_set(preemption=preemption, prefill=prefill), blocks=5, swap_blocks=9)
    kv = KvModel(scheduler.ledger.limits)
    scheduler.add(spec(1, prompt_len=8, max_new=9, tokens=True))
    scheduler.add(spec(2, prompt_len=7, max_new=4, tokens=True))

    def step() -> Plan:
        plan = scheduler.schedule(0.0)
        check_plan(scheduler, plan)
        kv.run(scheduler, plan)
        commit(scheduler, plan)
        assert scheduler.ledger.audit() == []
        return plan

    plans = [step() for _ in range(4)]
    assert any(copy.direction == "out" for plan in plans for copy in plan.copies)
    prefill.fixed = Shape(((ADMIT, RUNNING),))
    for _ in range(40):
        if not scheduler.has_work():
            break
        step()
    assert not scheduler.has_work()


def test_swapped_ones_never_hold_blocks_that_others_need() -> None:
    """CAPACITY-04: nothing runs, and what is parked elsewhere must not stand in the way."""
    admission = ScriptedAdmission(lambda s: Admission(s.waiting))
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(s.running, how="swap"))
    prefill = ScriptedPrefill(Shape(((RUNNING, PROMPT, ADMIT),)))
    scheduler = scheduler_of(scripted_set(admission, preemption, prefill), blocks=12, swap_blocks=100)
    for id in range(1, 8):
        scheduler.add(spec(id, prompt_len=16, max_new=20, tokens=True))
    logs = run_all(scheduler)
    assert len({id for log in logs for id, _ in log.finished}) == 7
    gaps = [number for number, log in enumerate(logs) if not log.sampled]
    assert all(later - first < 10 for first, later in zip(gaps, gaps[10:], strict=False))


def test_what_a_newcomer_shares_may_not_be_there_yet_and_is_not_copied_out() -> None:
    """Copies are made before the step computes, so a newcomer's blocks would be copied empty."""
    scheduler = scheduler_of(scripted_set(), swap_blocks=9, prefix_cache=True, block_size=16)
    scheduler.add(spec(1, tokens=range(40)))
    scheduler.add(spec(2, tokens=range(40)))
    plan = scheduler.schedule(0.0)
    assert [entry.cached for entry in plan.admitted] == [0, 32]
    first, second = (scheduler.ledger.sequences[id] for id in (1, 2))
    scheduler._moves.preempt(second, first, "growth", "swap", front=True)
    assert second.state.value == "preempted"
    assert scheduler.ledger.host.used == 0


def test_a_restored_sequence_that_is_evicted_for_recompute_has_nothing_left() -> None:
    ways = iter(["swap", "recompute"])
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running), how=next(ways)))  # type: ignore[arg-type]
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=5, swap_blocks=9)
    scheduler.add(spec(1, max_new=5, tokens=True))
    scheduler.add(spec(2, prompt_len=12, max_new=8, tokens=True))
    for _ in range(30):
        log = run_step(scheduler)
        (view,) = [view for view in [*scheduler.snapshot.running, *scheduler.snapshot.waiting] if view.id == 2]
        if log.resumed:
            break
    assert log.resumed == {2: 12}
    row = scheduler.ledger.sequences[2]
    scheduler.schedule(0.0)
    scheduler._moves.preempt(row, row, "growth", "recompute", front=True)
    assert (view.computed, view.kept, view.wanted) == (0, "none", view.total)


def test_the_record_tells_what_comes_back_from_the_host() -> None:
    scheduler = swapping()
    commit(scheduler, started(scheduler))
    scheduler.take_record_parts()
    parts = next(parts for parts in iter(lambda: step_parts(scheduler), None) if parts.admitted)
    assert (parts.admitted, parts.resident) == ([(2, 0)], [(2, 8)])


def test_the_record_tells_nothing_of_a_return_that_was_undone() -> None:
    scheduler = swapping()
    commit(scheduler, started(scheduler))
    for _ in range(20):
        plan = scheduler.schedule(1.0)
        if plan.admitted:
            break
        commit(scheduler, plan)
    scheduler.take_record_parts()
    scheduler.abandon(plan)
    parts = scheduler.take_record_parts()
    assert (parts.admitted, parts.resident) == ([], [])
