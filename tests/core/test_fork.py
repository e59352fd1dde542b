"""Copy-on-write between the sequences of one request: the prompt is computed once, and every block counted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvyard.core.plan import Plan, SequenceSpec
from kvyard.core.scheduler import Scheduler
from kvyard.policy import Admission, Victims

from tests.core.harness import commit, run_all, run_step, scheduler_of, spec, step_parts
from tests.core.kv_model import KvModel
from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, scripted_set


def request(first: int, n: int, prompt: int | range = 10, **changes: Any) -> list[SequenceSpec]:  # noqa: ANN401
    """The sequences of one request, blocks of 4."""
    tokens = range(100, 100 + prompt) if isinstance(prompt, int) else prompt
    return [spec(first + i, tokens=tokens, request=first, siblings=n > 1, **changes) for i in range(n)]


def started(n: int, prompt: int = 10, **limits: Any) -> Scheduler:  # noqa: ANN401
    """A scheduler with one request of `n` sequences."""
    scheduler = scheduler_of(scripted_set(), **limits)
    for each in request(1, n, prompt):
        scheduler.add(each)
    return scheduler


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("prompt", [1, 2, 4, 5, 8, 9, 31])
def test_the_prompt_is_computed_once(prompt: int, prefix_cache: bool) -> None:
    scheduler = started(4, prompt, prefix_cache=prefix_cache)
    logs = run_all(scheduler)
    computed = sum(sum(log.scheduled.values()) for log in logs)
    # Each computes the last token of the prompt, and all output tokens but the last.
    assert computed == prompt + 3 + 4 * 7
    assert scheduler.blocks_used == 0


def test_who_finds_the_prompt_computed_and_no_place_waits_as_all_do() -> None:
    scheduler = started(4, max_running=2)
    told = [step_parts(scheduler).waits for _ in range(3)]
    assert [(wait.id, wait.reason) for wait in told[0]] == [(2, "sibling"), (3, "sibling"), (4, "sibling")]
    assert {(wait.id, wait.reason) for wait in told[1]} == {(2, ""), (3, ""), (4, ""), (0, "slots")}
    assert told[2] == []
    assert {row.id: row.reason for row in scheduler.request_rows(9)} == {1: "", 2: "", 3: "slots", 4: "slots"}
    run_all(scheduler)
    assert scheduler.take_record_parts().waits == []


def test_who_leaves_while_it_waits_for_one_of_its_own_is_forgotten() -> None:
    scheduler = started(3, 100, max_step_tokens=16)
    run_step(scheduler)
    scheduler.cancel([2])
    assert [wait.id for wait in step_parts(scheduler).waits if wait.id] == []
    scheduler.cancel([1, 3])
    assert scheduler.schedule(0.0).idle
    assert scheduler._planner.intake._held_back == {}
    assert scheduler._journal._explained == {}


def test_full_blocks_are_shared_and_the_partial_one_is_copied() -> None:
    scheduler = started(3)
    first = run_step(scheduler)
    assert first.scheduled == {1: 10}
    assert scheduler.blocks_used == 3
    assert {row.id: row.reason for row in scheduler.request_rows(9)} == {1: "", 2: "sibling", 3: "sibling"}
    second = run_step(scheduler)
    assert second.scheduled == {1: 1, 2: 1, 3: 1}
    assert second.plan is not None
    tables = {
        id: second.plan.tables[slot, :3].tolist()
        for id, slot in zip(second.plan.ids.tolist(), second.plan.slots, strict=True)
    }
    assert tables[1][:2] == tables[2][:2] == tables[3][:2]
    assert len({tables[id][2] for id in tables}) == 3
    assert [(copy.id, copy.direction, copy.source.tolist(), copy.target.tolist()) for copy in second.plan.copies] == [
        (2, "copy", [tables[1][2]], [tables[2][2]]),
        (3, "copy", [tables[1][2]], [tables[3][2]]),
    ]
    assert scheduler.blocks_used == 5


@pytest.mark.parametrize("prompt", [5, 9])
def test_nothing_is_copied_where_a_block_ends_before_the_last_token(prompt: int) -> None:
    scheduler = started(2, prompt)
    run_step(scheduler)
    log = run_step(scheduler)
    assert log.plan is not None
    assert log.plan.copies == []
    assert log.scheduled == {1: 1, 2: 1}


def test_a_prompt_in_chunks_keeps_its_siblings_waiting_and_nobody_else() -> None:
    scheduler = started(2, 40, max_step_tokens=12)
    scheduler.add(spec(9, prompt_len=3, tokens=True))
    logs = [run_step(scheduler) for _ in range(4)]
    assert [log.scheduled.get(1) for log in logs] == [12, 12, 12, 4]
    assert 9 in logs[3].scheduled, "it came behind the sibling, which waits"
    assert all(2 not in log.scheduled for log in logs)
    assert run_step(scheduler).scheduled == {1: 1, 9: 1, 2: 1}


def test_admission_counts_shared_blocks_once() -> None:
    """Prompt 16 of 4 blocks and one more each: four times the whole prompt would need 20 of 8 blocks."""
    scheduler = started(4, 16, blocks=8)
    run_step(scheduler)
    assert run_step(scheduler).scheduled == {1: 1, 2: 1, 3: 1, 4: 1}
    # 3 shared, and of each the last block of the prompt; the leader grows by one for its output.
    assert scheduler.blocks_used == 3 + 4 + 1
    finished = {id for log in run_all(scheduler) for id, _ in log.finished}
    assert finished == {1, 2, 3, 4}
    assert scheduler.blocks_used == 0


def test_policies_see_what_could_be_shared() -> None:
    scheduler = started(2)
    views = {view.id: view for view in scheduler.snapshot.waiting}
    assert views[2].hits == 0
    run_step(scheduler)
    assert views[2].hits == 2
    assert views[1].hits == 0, "it runs"


@pytest.mark.parametrize("who", [1, 2])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_any_sibling_may_be_cancelled_at_any_time(who: int, after: int, prefix_cache: bool) -> None:
    scheduler = started(3, 11, max_step_tokens=8, prefix_cache=prefix_cache)
    kv = KvModel(scheduler.ledger.limits)
    for _ in range(after):
        step(scheduler, kv)
    assert scheduler.cancel([who]) == [who]
    assert scheduler.ledger.audit() == []
    for _ in range(60):
        if scheduler.has_work():
            step(scheduler, kv)
    assert not scheduler.has_work()
    assert scheduler.blocks_used == 0
    assert scheduler.ledger.families._families == {}


def step(scheduler: Scheduler, kv: KvModel) -> Plan:
    plan = scheduler.schedule(0.0)
    kv.run(scheduler, plan)
    commit(scheduler, plan)
    assert scheduler.ledger.audit() == []
    return plan


def test_when_the_one_that_computes_is_cancelled_the_next_one_does() -> None:
    scheduler = started(3, 20, max_step_tokens=8)
    run_step(scheduler)
    scheduler.cancel([1])
    logs = run_all(scheduler)
    assert logs[0].scheduled == {2: 8}
    assert sum(sum(log.scheduled.values()) for log in logs) == 20 + 1 + 2 * 7


def test_a_failed_step_gives_the_shared_blocks_back() -> None:
    scheduler = started(3)
    run_step(scheduler)
    plan = scheduler.schedule(1.0)
    assert len(plan.copies) == 2
    scheduler.abandon(plan)
    assert scheduler.ledger.audit() == []
    assert scheduler.blocks_used == 3
    scheduler.take_record_parts()
    assert run_step(scheduler).scheduled == {1: 1, 2: 1, 3: 1}


def test_a_preempted_sibling_takes_over_the_prompt_again() -> None:
    scheduler = started(2, 14)
    kv = KvModel(scheduler.ledger.limits)
    for _ in range(4):
        step(scheduler, kv)
    seq = scheduler.ledger.sequences[2]
    scheduler._moves.preempt(seq, seq, "growth", "recompute", front=True)
    scheduler._moves.flush()
    plan = step(scheduler, kv)
    assert [(copy.id, copy.direction) for copy in plan.copies] == [(2, "copy")]
    assert dict(zip(plan.ids.tolist(), plan.granted.tolist(), strict=True)) == {1: 1, 2: 3}


def test_a_swapped_sibling_comes_back_with_blocks_of_its_own() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running), how="swap"))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=7, swap_blocks=8)
    kv = KvModel(scheduler.ledger.limits)
    for each in request(1, 2, 14, max_new=12):
        scheduler.add(each)
    copies: list[str] = []
    for _ in range(80):
        if not scheduler.has_work():
            break
        copies += [copy.direction for copy in step(scheduler, kv).copies]
    assert copies == ["copy", "out", "in"]
    assert scheduler.blocks_used == 0


def test_whom_a_newcomer_builds_on_is_not_put_out_for_it() -> None:
    """All or nothing: with its donor gone, the sibling would need more room than it was promised."""
    admission = ScriptedAdmission(lambda s: Admission(s.waiting, evict=True), evicts=True)
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(s.running))
    scheduler = scheduler_of(scripted_set(admission, preemption), max_running=1)
    for each in request(1, 2):
        scheduler.add(each)
    run_step(scheduler)
    log = run_step(scheduler)
    assert log.preempted == []
    assert log.scheduled == {1: 1}


def test_what_comes_back_from_the_host_in_this_step_is_not_given_on() -> None:
    """Its KV is copied in after the copies within the device."""
    scheduler = started(2)
    first, second = scheduler.ledger.sequences[1], scheduler.ledger.sequences[2]
    run_step(scheduler)
    assert scheduler.ledger.fork(second) is not None
    first.admitted_step = scheduler.step
    assert scheduler.ledger.fork(second) is None
    assert scheduler.ledger.awaits(second)


def test_only_sequences_with_the_same_prompt_share() -> None:
    scheduler = scheduler_of(scripted_set())
    scheduler.add(spec(1, tokens=range(10), request=1, siblings=True))
    scheduler.add(spec(2, tokens=range(1, 11), request=1, siblings=True))
    scheduler.add(spec(3, tokens=range(10), request=3, siblings=True))
    scheduler.add(spec(4, tokens=range(10), request=4))
    assert run_step(scheduler).scheduled == {1: 10, 2: 10, 3: 10, 4: 10}


def test_one_that_comes_after_the_others_began() -> None:
    scheduler = started(1)
    (first, late) = request(20, 2)
    scheduler.add(first)
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(late)
    assert run_step(scheduler).scheduled == {1: 1, 20: 1, 21: 1}


def test_a_scored_prompt_is_taken_over_from_a_scored_one_only() -> None:
    scheduler = scheduler_of(scripted_set(), prefix_cache=True)
    plain, scored, other = request(1, 3)
    scored.scored = other.scored = True
    for each in (plain, scored, other):
        scheduler.add(each)
    assert run_step(scheduler).scheduled == {1: 10, 2: 10}
    assert run_step(scheduler).scheduled == {1: 1, 2: 1, 3: 1}


def test_emitted_tokens_are_the_sequences_own() -> None:
    """After an engine's death: the prompt is shared, what each has sent is computed by each."""
    scheduler = scheduler_of(scripted_set())
    kv = KvModel(scheduler.ledger.limits)
    for each, sent in zip(request(1, 3, 10, max_new=9), ([5, 6, 7], [8], []), strict=True):
        each.emitted = np.array(sent, np.int32)
        scheduler.add(each)
    assert dict(zip(*(column.tolist() for column in columns(step(scheduler, kv))), strict=True)) == {1: 13}
    assert dict(zip(*(column.tolist() for column in columns(step(scheduler, kv))), strict=True)) == {1: 1, 2: 1, 3: 1}


def columns(plan: Plan) -> tuple[Any, Any]:
    return plan.ids, plan.granted


def test_lengths_alone_are_shared_too() -> None:
    scheduler = scheduler_of(scripted_set())
    for id in (1, 2):
        scheduler.add(spec(id, prompt_len=10, request=1, siblings=True))
    assert run_step(scheduler).scheduled == {1: 10}
    assert run_step(scheduler).scheduled == {1: 1, 2: 1}


def test_the_record_tells_what_was_taken_over() -> None:
    scheduler = started(3)
    assert step_parts(scheduler).resident == []
    parts = step_parts(scheduler)
    assert (parts.admitted, parts.resident) == ([(2, 0), (3, 0)], [(2, 9), (3, 9)])
