"""The facade: what the engine calls, in the order in which it calls it, and what it reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvyard.core.guard import Fault
from kvyard.core.plan import Limits, SequenceSpec
from kvyard.core.policy_set import PolicySet
from kvyard.core.scheduler import Scheduler
from kvyard.policy import ADMIT, DECODE, PROMPT, Admission, LinearKey, Shape, Victims, nobody
from kvyard.policy.decisions import How, Requeue
from kvyard_policies.aging import AgingAdmission

from tests.core.harness import Clock, commit, limits, run_all, run_step, scheduler_of, spec
from tests.core.scripted import ScriptedAdmission, ScriptedPreemption, ScriptedPrefill, scripted_set


def test_nothing_to_do() -> None:
    scheduler = scheduler_of(scripted_set())
    assert not scheduler.has_work()
    plan = scheduler.schedule(0.0)
    assert plan.idle
    assert len(plan) == 0
    assert commit(scheduler, plan).finished == []
    assert scheduler.step == 1


@pytest.mark.parametrize("name", ["blocks", "block_size", "max_running", "max_step_tokens", "max_model_len"])
def test_limits_are_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Scheduler(limits(**{name: 0}), scripted_set(), clock_ns=Clock())
    with pytest.raises(ValueError, match="swap_blocks"):
        Scheduler(limits(swap_blocks=-1), scripted_set(), clock_ns=Clock())


def test_the_plan_has_all_that_the_model_needs() -> None:
    scheduler = scheduler_of(scripted_set(), max_step_tokens=10)
    scheduler.add(spec(7, prompt_len=9, max_new=3, tokens=True))
    scheduler.add(spec(8, prompt_len=6, tokens=True))
    plan = scheduler.schedule(0.5)
    assert plan.ids.tolist() == [7, 8]
    assert plan.granted.tolist() == [9, 1]
    assert plan.computed.tolist() == [0, 0]
    assert plan.samples.tolist() == [True, False]
    assert [(entry.id, entry.slot, entry.cached, entry.resumed) for entry in plan.admitted] == [
        (7, int(plan.slots[0]), 0, False),
        (8, int(plan.slots[1]), 0, False),
    ]
    assert plan.tokens[plan.slots[0], :9].tolist() == spec(7, 9, tokens=True).prompt.tolist()  # type: ignore[union-attr]
    assert len(set(plan.tables[plan.slots[0], :3].tolist() + plan.tables[plan.slots[1], :1].tolist())) == 4
    committed = scheduler.commit(plan, np.array([42], np.int32), np.array([False]))
    assert committed.ids.tolist() == [7]
    nxt = scheduler.schedule(0.6)
    assert nxt.tokens[nxt.slots[0], 9] == 42
    assert nxt.computed.tolist() == [9, 1]
    assert nxt.step == 1


@pytest.mark.parametrize(
    ("tokens", "flags"), [((0,), (1,)), ((2,), (1,)), ((1,), (0,)), ((2,), (2,)), ((1, 0), (1,)), ((1,), (1, 2))]
)
def test_output_of_another_shape_is_refused(tokens: tuple[int, ...], flags: tuple[int, ...]) -> None:
    scheduler = scheduler_of(scripted_set(), max_step_tokens=10)
    scheduler.add(spec(7, prompt_len=9, max_new=3, tokens=True))
    scheduler.add(spec(8, prompt_len=6, tokens=True))
    plan = scheduler.schedule(0.5)
    with pytest.raises(ValueError, match="1 rows of step 0 sample, with tokens of shape"):
        scheduler.commit(plan, np.zeros(tokens, np.int32), np.zeros(flags, np.bool_))
    assert scheduler.commit(plan, np.array([4], np.int32), np.array([False])).ids.tolist() == [7]


def test_emitted_tokens_count_as_generated_and_are_computed_again() -> None:
    scheduler = scheduler_of(scripted_set())
    scheduler.add(spec(1, prompt_len=3, max_new=4, tokens=True, emitted=np.array([5, 6], np.int32)))
    (row,) = scheduler.request_rows(9)
    assert (row.generated, row.max_new) == (2, 4)
    plan = scheduler.schedule(0.0)
    assert plan.granted.tolist() == [5]
    assert plan.tokens[plan.slots[0], 3:5].tolist() == [5, 6]
    assert not plan.admitted[0].resumed, "its sampler starts anew, in a new engine"
    assert scheduler.generated(plan.slots).tolist() == [2]
    commit(scheduler, plan)
    scheduler.take_record_parts()
    assert run_all(scheduler)[-1].finished == [(1, "length")]


def test_a_prompt_of_the_wrong_length_is_refused() -> None:
    scheduler = scheduler_of(scripted_set())
    wrong = spec(1, tokens=True)
    wrong.prompt_len = 9
    with pytest.raises(ValueError, match="8 tokens, not 9"):
        scheduler.add(wrong)


def test_a_plan_without_rows_may_still_have_to_be_executed() -> None:
    """Who came in without tokens must be known to the engine before it gets some."""
    prefill = ScriptedPrefill(Shape(((DECODE, ADMIT, PROMPT),)), share=lambda s, prompts, left: [0] * len(prompts))
    scheduler = scheduler_of(scripted_set(prefill=prefill))
    scheduler.add(spec(1))
    plan = scheduler.schedule(0.0)
    assert len(plan) == 0
    assert [entry.id for entry in plan.admitted] == [1]
    assert not plan.idle
    commit(scheduler, plan)
    assert run_step(scheduler).overrides == {"no-progress": 1}


def test_stop_beats_length_and_both_free_the_blocks_at_once() -> None:
    scheduler = scheduler_of(scripted_set())
    for id, new in ((1, 1), (2, 1), (3, 5)):
        scheduler.add(spec(id, max_new=new))
    log = run_step(scheduler, stop=[1])
    assert log.finished == [(1, "stop"), (2, "length")]
    assert scheduler.running == 1
    assert scheduler.blocks_used == 2


# ---- ways out --------------------------------------------------------------------------------------------------


def test_leak_01_a_queued_request_can_be_cancelled() -> None:
    scheduler = scheduler_of(scripted_set(), max_running=1)
    scheduler.add(spec(1, max_new=20))
    run_step(scheduler)
    scheduler.add(spec(2))
    assert scheduler.cancel([2]) == [2]
    logs = run_all(scheduler)
    assert sum(len(log.sampled) for log in logs) == 19
    assert scheduler.blocks_used == 0


def test_leak_07_unknown_and_finished_ids_are_no_ones_problem() -> None:
    scheduler = scheduler_of(scripted_set())
    scheduler.add(spec(1, max_new=1))
    run_all(scheduler)
    assert scheduler.cancel([1, 1, 99]) == []
    assert not scheduler.finish(1, "error")
    scheduler.add(spec(2, max_new=1))
    assert run_all(scheduler)[-1].finished == [(2, "length")]


@pytest.mark.parametrize("moment", ["queued", "mid-chunk", "decoding", "preempted"])
def test_every_way_out_gives_back_all_blocks_once(moment: str) -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running)))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=4, max_step_tokens=12)
    scheduler.add(spec(1, max_new=9))
    scheduler.add(spec(2, max_new=9))
    steps = {"queued": 0, "mid-chunk": 1, "decoding": 2, "preempted": 3}[moment]
    for _ in range(steps):
        run_step(scheduler)
    states = {row.id: row.state for row in scheduler.request_rows(9)}
    if moment == "preempted":
        assert states[2] == "preempted"
    assert scheduler.cancel([2]) == [2]
    assert scheduler.ledger.audit() == []
    assert scheduler.cancel([1]) == [1]
    assert scheduler.blocks_used == 0
    assert scheduler.take_record_parts().finished == [(2, "cancelled"), (1, "cancelled")]


def test_leak_10_a_failed_step_hurts_the_guilty_one_alone() -> None:
    scheduler = scheduler_of(scripted_set())
    for id in range(1, 5):
        scheduler.add(spec(id, max_new=3, tokens=True))
    run_step(scheduler)
    plan = scheduler.schedule(1.0)
    scheduler.abandon(plan)
    assert scheduler.finish(3, "error")
    assert scheduler.ledger.audit() == []
    parts = scheduler.take_record_parts()
    assert parts.finished == [(3, "error")]
    assert (parts.prompt_tokens, parts.decode_tokens) == (0, 0), "nothing was computed"
    finished = {id for log in run_all(scheduler) for id, _ in log.finished}
    assert finished == {1, 2, 4}
    assert scheduler.blocks_used == 0


def test_a_failed_step_leaves_newcomers_at_their_old_place() -> None:
    scheduler = scheduler_of(scripted_set())
    for id in range(1, 4):
        scheduler.add(spec(id, tokens=True))
    plan = scheduler.schedule(0.0)
    scheduler.abandon(plan)
    assert [(row.id, row.state, row.preemptions) for row in scheduler.request_rows(9)] == [
        (1, "waiting", 0),
        (2, "waiting", 0),
        (3, "waiting", 0),
    ]
    assert scheduler.ledger.count.admitted == 0
    assert scheduler.blocks_used == 0
    assert scheduler.step == 1
    parts = scheduler.take_record_parts()
    assert (parts.admitted, parts.prompt_tokens) == ([], 0)
    log = run_step(scheduler)
    assert log.scheduled == {1: 8, 2: 8, 3: 8}
    assert log.resumed == {}


def test_calls_out_of_order_are_told() -> None:
    scheduler = scheduler_of(scripted_set())
    scheduler.add(spec(1))
    plan = scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="neither committed nor abandoned"):
        scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="neither committed nor abandoned"):
        scheduler.cancel([1])
    commit(scheduler, plan)
    with pytest.raises(RuntimeError, match="not the one under way"):
        commit(scheduler, plan)
    with pytest.raises(RuntimeError, match="not the one under way"):
        scheduler.abandon(plan)


def test_pause_places_nothing_and_loses_nothing() -> None:
    scheduler = scheduler_of(scripted_set())
    scheduler.add(spec(1))
    run_step(scheduler)
    scheduler.pause()
    scheduler.add(spec(2))
    assert scheduler.paused
    for _ in range(3):
        assert run_step(scheduler).scheduled == {}
    assert scheduler.wait_reason() == ("paused", None)
    assert scheduler.running == 1
    scheduler.resume()
    assert run_step(scheduler).scheduled == {1: 1, 2: 8}
    assert scheduler.wait_reason()[0] == ""


# ---- what is read ----------------------------------------------------------------------------------------------


def test_the_parts_of_a_record() -> None:
    preemption = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running)))
    scheduler = scheduler_of(scripted_set(preemption=preemption), blocks=4)
    scheduler.add(spec(1))
    scheduler.add(spec(2))
    scheduler.add(spec(3))
    plan = scheduler.schedule(0.0)
    parts = scheduler.take_record_parts()
    assert parts.admitted == [(1, 0), (2, 0)]
    assert (parts.prompt_tokens, parts.decode_tokens) == (16, 0)
    assert [(wait.id, wait.reason) for wait in parts.waits] == [(3, "blocks")]
    assert {cost.kind for cost in parts.policies} == {"admission", "prefill"}
    commit(scheduler, plan)
    plan = scheduler.schedule(1.0)
    parts = scheduler.take_record_parts()
    (entry,) = parts.preempted
    assert (entry.id, entry.by, entry.cause, entry.how, entry.tokens) == (2, 1, "growth", "recompute", 8)
    assert (parts.prompt_tokens, parts.decode_tokens) == (0, 1)
    assert [cost.name for cost in parts.policies if cost.kind == "preemption"] == ["scripted"]
    commit(scheduler, plan)
    scheduler.cancel([1, 2])
    assert scheduler.take_record_parts().finished == [(1, "cancelled"), (2, "cancelled")]
    scheduler.schedule(2.0)
    parts = scheduler.take_record_parts()
    assert parts.admitted == [(3, 0)]
    assert [(wait.id, wait.reason) for wait in parts.waits] == [(3, "")], "it waits no longer"


def test_the_pools_three_numbers_add_up() -> None:
    scheduler = Scheduler(limits(prefix_cache=True), scripted_set(), clock_ns=Clock(), salt=b"s")
    for id in range(1, 6):
        scheduler.add(spec(id, tokens=True, max_new=4))
    for _ in range(12):
        run_step(scheduler)
        assert scheduler.blocks_used + scheduler.blocks_cached + scheduler.blocks_free == 64
    assert scheduler.blocks_used == 0
    assert scheduler.blocks_cached > 0


def test_rows_of_the_operators_list() -> None:
    scheduler = scheduler_of(scripted_set(ScriptedAdmission(lambda s: Admission(s.waiting))), max_running=1)
    scheduler.add(spec(1, priority=3, tenant="t"))
    scheduler.add(spec(2))
    scheduler.add(spec(3))
    run_step(scheduler)
    first, second = scheduler.request_rows(2)
    assert (first.id, first.state, first.reason, first.priority, first.tenant) == (1, "running", "", 3, "t")
    assert (first.computed, first.generated, first.blocks) == (8, 1, 2)
    assert (second.id, second.state, second.reason) == (2, "waiting", "slots")
    assert len(scheduler.request_rows(99)) == 3


def test_a_policys_own_reason_is_shown() -> None:
    scheduler = scheduler_of(scripted_set(ScriptedAdmission(lambda s: nobody("quiet hours"))))
    scheduler.add(spec(1))
    run_step(scheduler)
    assert scheduler.request_rows(1)[0].reason == "quiet hours"


def test_the_dump_is_plain_and_whole() -> None:
    import json

    scheduler = scheduler_of(scripted_set())
    for id in (1, 2):
        scheduler.add(spec(id, tokens=True))
    run_step(scheduler)
    dump = json.loads(json.dumps(scheduler.dump()))
    assert dump["running"] == 2
    assert dump["faults"] == []
    assert dump["policies"]["admission"]["name"] == "scripted"
    assert [row["id"] for row in dump["sequences"]] == [1, 2]
    plan = scheduler.schedule(1.0)
    assert scheduler.dump()["step"] == plan.step, "it may be asked for within a step"


@pytest.mark.parametrize("emitted", [None, [5, 6]])
def test_a_prompt_may_come_as_bytes(emitted: list[int] | None) -> None:
    prompt, sent = np.arange(100, 140, dtype=np.int32), None if emitted is None else np.array(emitted, np.int32)
    seen: list[tuple[object, ...]] = []
    for tokens in (prompt, prompt.tobytes()):
        scheduler = scheduler_of(scripted_set(), block_size=16, prefix_cache=True)
        for id in (1, 2):
            scheduler.add(SequenceSpec(id, 1, id, 0.0, 40, 8, prompt=tokens, emitted=sent, siblings=True))
        with pytest.raises(ValueError, match="has 40 tokens, not 41"):
            scheduler.add(SequenceSpec(3, 3, 3, 0.0, 41, 8, prompt=tokens))
        log = run_step(scheduler)
        assert log.plan is not None
        seen.append((log.scheduled, log.cached, log.plan.tokens[log.plan.slots, :43].tolist(), scheduler.blocks_used))
        run_all(scheduler)
        scheduler.add(SequenceSpec(4, 4, 4, 0.0, 40, 8, prompt=tokens))
        seen[-1] += (run_step(scheduler).cached,)
    assert seen[0] == seen[1]
    assert seen[0][-1] == {4: 32}


def test_what_is_really_in_force() -> None:
    scheduler = scheduler_of(scripted_set(ScriptedAdmission(lambda s: Admission(s.waiting, keep=3, skip=2))))
    force = scheduler.advice.in_force()
    assert force["victims_way"] is None, "not yet asked"
    scheduler.add(spec(1))
    run_step(scheduler)
    force = scheduler.advice.in_force()
    assert force["phases"] == [["running", "admit"]]
    assert (force["reserve_blocks"], force["may_skip"], force["queue_order"]) == (3, 2, "arrival")


@pytest.mark.parametrize(("how", "requeue"), [("swap", "front"), ("recompute", "tail")])
def test_the_way_of_the_last_victims_is_in_force(how: How, requeue: Requeue) -> None:
    victims = ScriptedPreemption(lambda s, who, cause: Victims(reversed(s.running), how=how, requeue=requeue))
    scheduler = scheduler_of(scripted_set(preemption=victims), blocks=5, swap_blocks=8)
    for id in (1, 2):
        scheduler.add(spec(id, prompt_len=8, max_new=9))
    while not run_step(scheduler).preempted:
        assert scheduler.advice.in_force()["victims_way"] is None
    force = scheduler.advice.in_force()
    assert (force["victims_way"], force["victims_requeue"]) == (how, requeue)


@pytest.mark.parametrize(
    ("key", "shown", "order"),
    [
        (LinearKey(priority=1), "1 * priority", [3, 1, 2]),
        (LinearKey(priority=1, arrived=0.25), "1 * priority + 0.25 * arrived", [1, 3, 2]),
        (LinearKey(prompt_len=2), "2 * prompt_len", [2, 3, 1]),
        (LinearKey(prompt_len=-1), "-1 * prompt_len", [1, 3, 2]),
        (LinearKey(max_new=1), "1 * max_new", [3, 2, 1]),
        (LinearKey(), "arrival", [1, 2, 3]),
        (lambda r: (-r.arrival,), "key", [3, 2, 1]),
        (None, "arrival", [1, 2, 3]),
    ],
)
def test_an_order_that_is_declared(key: Any, shown: str, order: list[int]) -> None:  # noqa: ANN401 - as a policy may have it
    admission = ScriptedAdmission()
    admission.key = key
    scheduler = scheduler_of(scripted_set(admission), max_running=1)
    for id, (priority, prompt_len, max_new) in enumerate(((1, 7, 3), (2, 5, 2), (0, 6, 1)), start=1):
        scheduler.add(spec(id, priority=priority, prompt_len=prompt_len, max_new=max_new, arrived=4.0 * id))
    assert scheduler.advice.in_force()["queue_order"] == shown
    came: list[int] = []
    while scheduler.has_work():
        came += run_step(scheduler).cached
    assert came == order


@pytest.mark.parametrize(
    "key",
    [
        LinearKey(float("nan")),
        LinearKey(arrived=float("inf")),
        LinearKey(max_new=-1e101),
        LinearKey("1"),  # type: ignore[arg-type]
        LinearKey(1, True),
    ],
)
def test_a_declared_order_is_of_numbers_that_can_be_compared(key: LinearKey) -> None:
    admission = ScriptedAdmission()
    admission.key = key
    with pytest.raises(Fault, match="the weights of a LinearKey are numbers up to") as fault:
        scheduler_of(scripted_set(admission))
    assert fault.value.code == "nonsense"


def test_a_declared_order_asks_nobody_and_is_read_anew_with_the_parameters() -> None:
    scheduler = scheduler_of(
        PolicySet(AgingAdmission(aging=0.0), ScriptedPreemption(), ScriptedPrefill()), max_running=1
    )
    for id, priority in ((1, 0), (2, 2), (3, 1)):
        scheduler.add(spec(id, priority=priority, arrived=10.0 * id))
    assert next(iter(run_step(scheduler).scheduled)) == 1
    assert [row.id for row in scheduler.request_rows(9)] == [1, 3, 2]
    assert scheduler.guard.calls["admission"] == 2, "what it declares, and who comes in"
    scheduler.set_params("admission", {"aging": 1.0})
    assert scheduler.advice.in_force()["queue_order"] == "1 * priority + 1 * arrived"
    assert [row.id for row in scheduler.request_rows(9)] == [1, 2, 3]


def test_the_step_time_model_learns_what_steps_cost() -> None:
    scheduler = scheduler_of(scripted_set())
    model = scheduler.snapshot.step_time
    assert model.seconds(4, 100) == 0.0
    random = np.random.default_rng(0)
    for _ in range(200):
        decodes, prompt = int(random.integers(0, 64)), int(random.integers(0, 512))
        scheduler.observe(decodes, prompt, 0.005 + decodes * 0.0002 + prompt * 0.0003)
    assert model.seconds(32, 256) == pytest.approx(0.005 + 32 * 0.0002 + 256 * 0.0003, rel=0.02)
    for _ in range(2000):
        scheduler.observe(8, 0, 0.01)
    assert model.seconds(8, 0) == pytest.approx(0.01, rel=0.02), "it follows the load"


def test_rows_are_reused_over_a_long_life() -> None:
    scheduler = Scheduler(Limits(64, 4, 4, 64, 64), scripted_set(), clock_ns=Clock())
    for id in range(1, 200):
        scheduler.add(spec(id, prompt_len=5, max_new=2, tokens=True))
        run_step(scheduler)
    run_all(scheduler)
    assert scheduler.ledger.cols.vacant + len(scheduler.ledger.cols._given_up) == 8
    assert scheduler.ledger.sequences == {}
    assert len(scheduler.ledger.queue) == 0
