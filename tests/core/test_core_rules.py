"""The rules of a step that no policy can change, one test each (and the cases from public reports)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvyard.core.scheduler import NeverFits
from kvyard.policy import (
    ADMIT,
    DECODE,
    DECODE_FIRST,
    PROMPT,
    PROMPT_OR_DECODE,
    RUNNING,
    Admission,
    OrderKey,
    RequestView,
    Shape,
    Snapshot,
    Victims,
    nobody,
)

from tests.core.harness import run_all, run_step, scheduler_of, spec
from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, ScriptedPrefill, by_id, scripted_set

# ---- limits ----------------------------------------------------------------------------------------------------


def test_places_tokens_and_blocks_are_three_separate_limits() -> None:
    scheduler = scheduler_of(scripted_set(), max_running=3, max_step_tokens=20, blocks=9)
    for id in range(1, 6):
        scheduler.add(spec(id, prompt_len=8))
    assert run_step(scheduler).scheduled == {1: 8, 2: 8, 3: 4}
    assert scheduler.running == 3
    assert scheduler.wait_reason() == ("budget", None)
    assert run_step(scheduler).scheduled == {1: 1, 2: 1, 3: 4}
    assert scheduler.wait_reason() == ("slots", None)
    narrow = scheduler_of(scripted_set(), blocks=4)
    for id in range(1, 4):
        narrow.add(spec(id, prompt_len=7, max_new=2))
    assert run_step(narrow).scheduled == {1: 7, 2: 7}
    (waiting,) = [row for row in narrow.request_rows(9) if row.state == "waiting"]
    assert waiting.reason == "blocks: 2 more KV blocks needed"


def test_capacity_02_the_limit_is_exact() -> None:
    scheduler = scheduler_of(scripted_set(), max_model_len=64, blocks=16, block_size=4)
    scheduler.add(spec(1, prompt_len=63, max_new=1))
    with pytest.raises(NeverFits, match="needs 65 tokens and a sequence may hold 64"):
        scheduler.add(spec(2, prompt_len=64, max_new=1))
    assert [log.finished for log in run_all(scheduler)] == [[(1, "length")]]


def test_boundary_06_a_block_is_taken_by_the_token_that_needs_it() -> None:
    """Two that fill the pool exactly: never a block more than their tokens in KV need, and nobody gives way."""
    scheduler = scheduler_of(scripted_set(), blocks=10, block_size=16, max_step_tokens=64)
    for id in (1, 2):
        scheduler.add(spec(id, prompt_len=16, max_new=64))
    most = 0
    while scheduler.has_work():
        log = run_step(scheduler)
        assert log.preempted == []
        for row in scheduler.request_rows(2):
            assert row.blocks == -(-row.computed // 16)
        most = max(most, scheduler.blocks_used)
    assert most == 10


def test_what_never_fits_names_the_blocks() -> None:
    scheduler = scheduler_of(scripted_set(), blocks=8, block_size=4, max_model_len=256)
    scheduler.add(spec(1, prompt_len=30, max_new=3))  # the last token is never fed back: 32 in KV
    with pytest.raises(NeverFits, match="needs 9 KV blocks and the pool has 8"):
        scheduler.add(spec(2, prompt_len=31, max_new=3))
    assert len(run_all(scheduler)) == 3


@pytest.mark.parametrize(("prompt", "new", "emitted"), [(0, 4, 0), (4, 0, 0), (4, 2, 2)])
def test_a_sequence_with_nothing_to_do_is_refused(prompt: int, new: int, emitted: int) -> None:
    scheduler = scheduler_of(scripted_set())
    with pytest.raises(NeverFits, match="at least one"):
        scheduler.add(spec(1, prompt, new, emitted=[1] * emitted if emitted else None))
    assert not scheduler.has_work()


def test_an_id_is_taken_once() -> None:
    scheduler = scheduler_of(scripted_set())
    scheduler.add(spec(1))
    with pytest.raises(ValueError, match="already there"):
        scheduler.add(spec(1))
    assert scheduler.waiting == 1


def test_a_request_that_needs_exactly_the_pool_is_served() -> None:
    scheduler = scheduler_of(scripted_set(), blocks=8, block_size=4, max_step_tokens=9)
    scheduler.add(spec(1, prompt_len=20, max_new=13))
    assert run_all(scheduler)[-1].finished == [(1, "length")]


# ---- phases ----------------------------------------------------------------------------------------------------


def test_the_first_group_that_places_anything_is_the_step() -> None:
    prefill = ScriptedPrefill(PROMPT_OR_DECODE)
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    scheduler.add(spec(2))
    assert run_step(scheduler).scheduled == {2: 8}, "a newcomer makes it a step of prompts"
    assert run_step(scheduler).scheduled == {1: 1, 2: 1}


def test_running_is_walked_in_the_order_of_admission_prompts_among_decodes() -> None:
    prefill = ScriptedPrefill(share=lambda s, prompts, left: [3] * len(prompts))
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    scheduler.add(spec(1, prompt_len=3))
    scheduler.add(spec(2, prompt_len=9))
    scheduler.add(spec(3, prompt_len=3))
    assert list(run_step(scheduler).scheduled.items()) == [(1, 3), (2, 3), (3, 3)]
    assert list(run_step(scheduler).scheduled.items()) == [(1, 1), (2, 3), (3, 1)]


def test_decode_first_serves_decodes_before_older_prompts() -> None:
    prefill = ScriptedPrefill(DECODE_FIRST, share=lambda s, prompts, left: [3] * len(prompts))
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    scheduler.add(spec(1, prompt_len=9))
    scheduler.add(spec(2, prompt_len=3))
    run_step(scheduler)
    assert list(run_step(scheduler).scheduled.items()) == [(2, 1), (1, 3)]


def test_prompts_caps_running_and_new_prompts_together() -> None:
    prefill = ScriptedPrefill(Shape(DECODE_FIRST.groups, prompts=10))
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    for id in (1, 2, 3):
        scheduler.add(spec(id, prompt_len=8))
    assert run_step(scheduler).scheduled == {1: 8, 2: 2}
    assert run_step(scheduler).scheduled == {1: 1, 2: 6, 3: 4}


def test_admit_before_prompt_lets_divide_see_newcomers() -> None:
    prefill = ScriptedPrefill(Shape(((DECODE, ADMIT, PROMPT),)), share=lambda s, prompts, left: [2] * len(prompts))
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    assert run_step(scheduler).scheduled == {1: 2, 2: 2}
    assert prefill.asked == [([1, 2], 64)], "newcomers get nothing in ADMIT, and their share in PROMPT"


def test_divide_is_cut_at_what_is_left() -> None:
    prefill = ScriptedPrefill(share=lambda s, prompts, left: [4 * left] * len(prompts))
    scheduler = scheduler_of(scripted_set(prefill=prefill), max_step_tokens=10)
    scheduler.add(spec(1, prompt_len=8))
    scheduler.add(spec(2, prompt_len=8))
    assert run_step(scheduler).scheduled == {1: 8, 2: 2}


# ---- admission -------------------------------------------------------------------------------------------------


def test_admission_is_asked_only_when_it_can_matter() -> None:
    admission = ScriptedAdmission()
    scheduler = scheduler_of(scripted_set(admission), max_running=1, max_step_tokens=8)
    run_step(scheduler)
    assert admission.asked == 0, "nothing waits"
    scheduler.add(spec(1, prompt_len=16))
    scheduler.add(spec(2))
    run_step(scheduler)
    assert admission.asked == 1
    run_step(scheduler)
    assert admission.asked == 1, "no tokens are left"
    run_step(scheduler)
    assert admission.asked == 1, "no place is free"


def test_an_evicting_policy_is_asked_although_all_places_are_taken() -> None:
    admission = ScriptedAdmission(evicts=True)
    scheduler = scheduler_of(scripted_set(admission), max_running=1)
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    run_step(scheduler)
    run_step(scheduler)
    assert admission.asked == 2
    assert scheduler.running == 1


def test_the_first_refusal_is_a_barrier_unless_some_may_be_skipped() -> None:
    def start(skip: int) -> dict[int, int]:
        admission = ScriptedAdmission(lambda s: Admission(s.waiting, skip=skip))
        scheduler = scheduler_of(scripted_set(admission), blocks=10)
        scheduler.add(spec(1, prompt_len=24))
        scheduler.add(spec(2, prompt_len=24))
        scheduler.add(spec(3, prompt_len=24))
        scheduler.add(spec(4, prompt_len=4))
        return run_step(scheduler).scheduled

    assert start(0) == {1: 24}
    assert start(1) == {1: 24}
    assert start(2) == {1: 24, 4: 4}


def test_keep_and_need_are_tested_against_the_free_blocks() -> None:
    def placed(keep: int, need: int | None) -> set[int]:
        def decide(s: Snapshot) -> Admission:
            return Admission([r if need is None else (r, need) for r in s.waiting], keep=keep if s.running else 0)

        scheduler = scheduler_of(scripted_set(ScriptedAdmission(decide)), blocks=6)
        scheduler.add(spec(1, prompt_len=8))
        run_step(scheduler)
        scheduler.add(spec(2, prompt_len=8))
        return set(run_step(scheduler).scheduled)

    # Blocks of 4: sequence 1 holds 3 after its second step, so 3 are free and sequence 2's prompt takes 2.
    assert placed(keep=1, need=None) == {1, 2}
    assert placed(keep=2, need=None) == {1}
    assert placed(keep=0, need=12) == {1, 2}
    assert placed(keep=0, need=13) == {1}
    assert placed(keep=0, need=0) == {1, 2}


def test_a_need_of_nothing_still_needs_the_first_chunk() -> None:
    def decide(s: Snapshot) -> Admission:
        return Admission([(r, 0) for r in s.waiting])

    scheduler = scheduler_of(scripted_set(ScriptedAdmission(decide)), blocks=5, max_step_tokens=16)
    scheduler.add(spec(1, prompt_len=12))
    scheduler.add(spec(2, prompt_len=12))
    assert run_step(scheduler).scheduled == {1: 12, 2: 4}


def test_hold_keeps_what_was_promised_and_not_taken() -> None:
    def placed(hold: bool) -> set[int]:
        admission = ScriptedAdmission(lambda s: Admission([(r, r.kv_max) for r in s.waiting], hold=hold))
        scheduler = scheduler_of(scripted_set(admission), blocks=10)
        scheduler.add(spec(1, prompt_len=4, max_new=21))  # 6 blocks for its life, 1 now
        scheduler.add(spec(2, prompt_len=4, max_new=17))  # 5 blocks for its life
        return set(run_step(scheduler).scheduled)

    assert placed(hold=False) == {1, 2}
    assert placed(hold=True) == {1}


def test_nobody_says_why_and_when_to_ask_again() -> None:
    scheduler = scheduler_of(scripted_set(ScriptedAdmission(lambda s: nobody("a window", wake=7))))
    scheduler.add(spec(1))
    plan = scheduler.schedule(0.0)
    assert plan.idle
    assert scheduler.wait_reason() == ("a window", 7)
    assert [(w.id, w.reason, w.wake) for w in scheduler.take_record_parts().waits] == [(0, "a window", 7)]
    scheduler.schedule(0.0)
    assert scheduler.take_record_parts().waits == [], "a reason is told when it changes"


def test_steps_are_counted_while_nothing_can_run() -> None:
    """A wake-up is a step, so waiting for one must not stand still."""

    def decide(s: Snapshot) -> Admission:
        return Admission(s.waiting) if s.step >= 3 else nobody("a window", wake=3)

    scheduler = scheduler_of(scripted_set(ScriptedAdmission(decide)))
    scheduler.add(spec(1))
    assert [len(run_step(scheduler).scheduled) for _ in range(4)] == [0, 0, 0, 1]


def test_refuse_ends_a_request_for_good_with_its_text() -> None:
    def decide(s: Snapshot) -> Admission:
        return Admission(s.waiting, refuse=tuple((r, "too long for this hour") for r in s.waiting if r.id == 2))

    scheduler = scheduler_of(scripted_set(ScriptedAdmission(decide)))
    for id in (1, 2, 3):
        scheduler.add(spec(id))
    log = run_step(scheduler)
    assert log.scheduled == {1: 8, 3: 8}
    assert scheduler.take_refusals() == [(2, "too long for this hour")]
    assert scheduler.take_refusals() == []
    assert 2 not in scheduler.ledger.sequences


def test_a_pending_refusal_is_in_the_record_once() -> None:
    scheduler = scheduler_of(
        scripted_set(ScriptedAdmission(lambda s: Admission(refuse=tuple((r, "no") for r in s.waiting))))
    )
    scheduler.add(spec(1))
    scheduler.schedule(0.0)
    assert scheduler.take_record_parts().finished == [(1, "error")]
    scheduler.schedule(0.0)
    assert scheduler.take_record_parts().finished == []


# ---- preemption ------------------------------------------------------------------------------------------------


def pressed(preemption: ScriptedPreemption, count: int = 3, **changes: Any) -> Callable[[], dict[int, int]]:  # noqa: ANN401
    """`count` sequences whose prompts fill the pool exactly; each further token needs a block."""
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=2 * count, **changes)
    for id in range(1, count + 1):
        scheduler.add(spec(id, prompt_len=8, priority=5 if id < count else 0))
    assert len(run_step(scheduler).scheduled) == count
    return lambda: run_step(scheduler).scheduled


def test_victims_are_asked_once_per_phase_for_the_whole_order() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running)))
    step = pressed(preemption, count=4)
    assert step() == {1: 1, 2: 1}
    assert preemption.asked == [(1, 1, "growth")]


def test_preempt_08_a_victim_placed_earlier_leaves_the_plan_and_gives_its_tokens_back() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(by_id(s, 1, 2)))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=7, max_step_tokens=24)
    for id in (1, 2, 3):
        scheduler.add(spec(id, prompt_len=8))
    run_step(scheduler)
    # One block is free: sequence 1 takes it and is placed; sequence 2 is short, and 1 has to go.
    log = run_step(scheduler)
    assert log.preempted == [1]
    assert log.scheduled == {2: 1, 3: 1}
    assert log.plan is not None
    assert log.plan.granted.sum() == 2


def test_preempt_09_no_innocent_is_skipped_when_a_victim_leaves() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(by_id(s, 2)))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=10)
    for id in (1, 2, 3, 4):
        scheduler.add(spec(id, prompt_len=8))
    run_step(scheduler)
    log = run_step(scheduler)
    assert log.preempted == [2]
    assert log.scheduled == {1: 1, 3: 1, 4: 1}


@pytest.mark.parametrize(("self_ends", "scheduled"), [(True, {}), (False, {2: 1})])
def test_a_requester_that_is_its_own_victim_is_left_out_or_ends_the_phase(
    self_ends: bool, scheduled: dict[int, int]
) -> None:
    step = pressed(
        ScriptedPreemption(lambda s, who, cause: Victims(by_id(s, 1), self_ends=self_ends)), count=2, max_running=2
    )
    assert step() == scheduled


def test_a_victim_does_not_come_back_in_its_step() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(by_id(s, 1)))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=5, max_running=2)
    scheduler.add(spec(1, prompt_len=4))
    scheduler.add(spec(2, prompt_len=12))
    run_step(scheduler)
    scheduler.ledger.pool.take(1)  # somebody else's block: sequence 2 is short by one
    log_plan = scheduler.schedule(0.0)
    assert scheduler.take_record_parts().preempted[0].id == 1
    assert log_plan.ids.tolist() == [2], "sequence 1 would fit again, but it has just gone"
    assert scheduler.snapshot.preempted == (1,)


def test_a_row_given_up_is_not_reused_in_its_step() -> None:
    admission = ScriptedAdmission(lambda s: Admission(s.waiting, evict=True), evicts=True)
    preemption = ScriptedPreemption(
        lambda s, who, cause: Victims([r for r in s.running if r.priority > who.priority])
    )
    scheduler = scheduler_of(scripted_set(admission, preemption), max_running=1)
    scheduler.add(spec(1, priority=5))
    first = scheduler.schedule(0.0)
    scheduler.abandon(first)
    before = run_step(scheduler)
    assert before.plan is not None
    slot = int(before.plan.slots[0])
    scheduler.add(spec(2, priority=0))
    log = run_step(scheduler)
    assert log.preempted == [1]
    assert log.scheduled == {2: 8}
    assert log.plan is not None
    assert log.plan.slots.tolist() != [slot]


def test_who_came_in_this_step_is_not_put_out_for_another_newcomer() -> None:
    admission = ScriptedAdmission(lambda s: Admission(s.waiting, evict=True, skip=9), evicts=True)
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running)))
    scheduler = scheduler_of(scripted_set(admission, preemption), max_running=1)
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    log = run_step(scheduler)
    assert log.scheduled == {1: 8}
    assert log.preempted == []


def test_eviction_for_a_newcomer_is_all_or_nothing() -> None:
    admission = ScriptedAdmission(lambda s: Admission(s.waiting, evict=True), evicts=True)
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(by_id(s, 3)))
    scheduler = scheduler_of(scripted_set(admission, preemption), blocks=9)
    for id in (1, 2, 3):
        scheduler.add(spec(id, prompt_len=11))
    run_step(scheduler)
    scheduler.add(spec(4, prompt_len=16))
    log = run_step(scheduler)
    assert log.preempted == [], "one victim is not enough, so none goes"
    assert preemption.asked == [(4, 4, "admission")]
    scheduler.add(spec(5, prompt_len=12))
    scheduler.cancel([4])
    log = run_step(scheduler)
    assert log.scheduled.keys() == {1, 2, 5} or log.preempted == [3]


def test_requeueing_happens_when_the_phase_ends() -> None:
    seen: list[list[int]] = []

    def decide(s: Snapshot, who: RequestView, cause: str) -> Victims:
        seen.append([view.id for view in s.waiting])
        return Victims(reversed(s.running))

    preemption = ScriptedPreemption(decide)
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=8)
    for id in (1, 2, 3, 4):
        scheduler.add(spec(id, prompt_len=8))
    run_step(scheduler)
    scheduler.add(spec(9, prompt_len=12))
    log = run_step(scheduler)
    assert seen == [[9]]
    assert log.preempted == [4, 3]
    assert [row.id for row in scheduler.request_rows(9)] == [1, 2, 3, 4, 9], "in front, the older first"


def test_requeue_at_the_tail() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running), requeue="tail"))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=4)
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    run_step(scheduler)
    scheduler.add(spec(9))
    assert run_step(scheduler).preempted == [2]
    assert [row.id for row in scheduler.request_rows(9)] == [1, 9, 2]


def test_lookahead_blocks_must_be_there_but_are_not_taken() -> None:
    def run(lookahead: int) -> tuple[dict[int, int], int]:
        preemption = ScriptedPreemption(lookahead=lookahead)
        scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=4)
        scheduler.add(spec(1, prompt_len=7))
        scheduler.add(spec(2, prompt_len=7))
        run_step(scheduler)
        return run_step(scheduler).scheduled, scheduler.blocks_used

    assert run(1) == ({1: 1, 2: 1}, 4)
    assert run(2) == ({1: 1}, 2)


def test_lookahead_ends_with_the_sequence() -> None:
    preemption = ScriptedPreemption(lookahead=9)
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=4)
    scheduler.add(spec(1, prompt_len=7, max_new=2))
    scheduler.add(spec(2, prompt_len=7, max_new=2))
    run_step(scheduler)
    assert run_step(scheduler).scheduled == {1: 1, 2: 1}


def test_a_prompts_lookahead_ends_with_what_it_may_ever_hold() -> None:
    preemption = ScriptedPreemption(lookahead=5)
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=2, max_step_tokens=4)
    scheduler.add(spec(1, prompt_len=8, max_new=1))
    assert [log.scheduled for log in run_all(scheduler, most=5)] == [{1: 4}, {1: 4}]


def test_preempt_04_and_07_everything_ends_at_its_length_under_exhaustion() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running), self_ends=True))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=14, block_size=16, max_model_len=512)
    for id in range(1, 65):
        scheduler.add(spec(id, prompt_len=8, max_new=100))
    most: dict[int, int] = {}
    finished: dict[int, str] = {}
    for _ in range(20000):
        if not scheduler.has_work():
            break
        log = run_step(scheduler, check=False)
        finished |= dict(log.finished)
        for id in log.preempted:
            most[id] = most.get(id, 0) + 1
    assert finished == dict.fromkeys(range(1, 65), "length")
    assert most, "the pool was short"
    assert max(most.values()) <= 8
    assert scheduler.blocks_used == 0


# ---- progress whatever the policies do --------------------------------------------------------------------------


def test_alone_it_comes_in_if_it_physically_fits() -> None:
    """Without this rule `static` and SGLang stand still on a request that needs exactly the pool."""
    scheduler = scheduler_of(
        scripted_set(
            ScriptedAdmission(
                lambda s: Admission([(r, 4 * s.blocks * s.block_size) for r in s.waiting], keep=s.blocks)
            )
        )
    )
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    log = run_step(scheduler)
    assert log.scheduled == {1: 8}, "one comes in, the second waits as the policy wants"
    assert log.overrides == {"alone": 1}


def test_alone_it_gets_tokens_whatever_divide_says() -> None:
    prefill = ScriptedPrefill(share=lambda s, prompts, left: [0] * len(prompts))
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    log = run_step(scheduler)
    assert log.scheduled == {1: 8}
    assert log.overrides == {"alone": 1}


def test_two_steps_that_place_nothing_give_the_first_what_is_left() -> None:
    prefill = ScriptedPrefill()
    scheduler = scheduler_of(scripted_set(prefill=prefill), max_step_tokens=4)
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 4}
    prefill.share = lambda s, prompts, left: [0] * len(prompts)
    assert run_step(scheduler).scheduled == {}
    log = run_step(scheduler)
    assert log.scheduled == {1: 4}
    assert log.overrides == {"no-progress": 1}


def test_a_shape_without_decodes_cannot_stop_them() -> None:
    prefill = ScriptedPrefill(Shape(((PROMPT, ADMIT),)))
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    scheduler.add(spec(1, max_new=3))
    logs = run_all(scheduler, most=20)
    assert logs[-1].finished == [(1, "length")]


def test_if_nobody_can_grow_and_no_victim_is_named_the_newest_goes() -> None:
    step = pressed(ScriptedPreemption(lambda s, who, cause: Victims(())), count=3)
    assert step() == {1: 1, 2: 1}


def test_the_core_takes_the_newest_until_somebody_can_grow_and_counts_it() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(()))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=4)
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    run_step(scheduler)
    log = run_step(scheduler)
    assert log.preempted == [2]
    assert log.scheduled == {1: 1}
    assert log.overrides == {"no-victim": 1}


def test_victims_in_a_cycle_end_all_the_same() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims([r for r in s.running if r.id != who.id]))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=9, block_size=4)
    for id in range(1, 6):
        scheduler.add(spec(id, prompt_len=8, max_new=20))
    finished = {id for log in run_all(scheduler) for id, _ in log.finished}
    assert finished == {1, 2, 3, 4, 5}


# ---- order -----------------------------------------------------------------------------------------------------


class Counting(ScriptedAdmission):
    """By priority, counting how often the key is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = 0

    def key(self, r: RequestView) -> OrderKey:
        self.keys += 1
        return (r.priority,)


def test_the_key_is_evaluated_on_arrival_and_requeue_never_per_step() -> None:
    admission = Counting()
    scheduler = scheduler_of(scripted_set(admission), blocks=4, max_running=2)
    for id, priority in ((1, 2), (2, 1), (3, 0), (4, 1)):
        scheduler.add(spec(id, priority=priority))
    assert run_step(scheduler).scheduled.keys() == {3, 2}
    assert admission.keys == 4
    log = run_step(scheduler)
    assert log.preempted == [2]
    assert admission.keys == 5
    assert [row.id for row in scheduler.request_rows(9)] == [3, 2, 4, 1], "a key overrules front and tail"
    for _ in range(3):
        run_step(scheduler)
    assert admission.keys == 5


@pytest.mark.parametrize("admission", [Counting, ScriptedAdmission], ids=["by key", "in line"])
def test_preempt_06_a_preempted_one_comes_before_later_ones_of_its_priority(
    admission: Callable[[], ScriptedAdmission],
) -> None:
    scheduler = scheduler_of(scripted_set(admission()), blocks=4, max_running=2)
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    run_step(scheduler)
    scheduler.add(spec(3))
    assert run_step(scheduler).preempted == [2]
    assert [row.id for row in scheduler.request_rows(9)] == [1, 2, 3]


def test_decisions_are_plain_before_any_is_applied() -> None:
    """A lazy list that fails on its way must not have let anybody in."""

    def lazily(s: Snapshot) -> Iterator[RequestView]:
        yield next(iter(s.waiting))
        raise RuntimeError("half-way")

    scheduler = scheduler_of(scripted_set(ScriptedAdmission(lambda s: Admission(lazily(s)))))
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    log = run_step(scheduler)
    assert log.scheduled == {1: 8, 2: 8}, "the built-in decided in the same step"
    assert [exit_.code for exit_ in scheduler.take_exits()] == ["raised"]


def test_running_is_a_phase_of_its_own() -> None:
    scheduler = scheduler_of(scripted_set(prefill=ScriptedPrefill(Shape(((ADMIT, RUNNING),)))))
    scheduler.add(spec(1))
    assert run_step(scheduler).scheduled == {1: 8}
    scheduler.add(spec(2))
    assert list(run_step(scheduler).scheduled.items()) == [(2, 8), (1, 1)]
