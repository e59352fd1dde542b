"""The decision log: each wait has a reason, a rule and an end; victims and overtakers are named; memory is bound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.decisions import EVENT_BYTES, WAKES, DecisionLog
from kvyard.front.metrics import WAIT_REASONS
from kvyard.link.record import PolicyCost, Preemption, Wait

from tests.front.test_journal import record

RULES = [PolicyCost("admission", "fair", 1, 5), PolicyCost("preemption", "newest", 1, 5)]


def log(retention_s: float = 600.0, events: int = 10_000) -> DecisionLog:
    return DecisionLog(retention_s, events * EVENT_BYTES, lambda sequence_id: f"gone-{sequence_id}")


def only(answers: list[dict[str, Any]]) -> dict[str, Any]:
    (answer,) = answers
    return answer


def test_a_wait_has_a_reason_a_rule_and_what_ends_it() -> None:
    decisions = log()
    decisions.arrived(1, "a", at=10.0)
    decisions.step(record(step=5, at=12.0, policies=RULES, waits=[Wait(1, "blocks")]))
    answer = only(decisions.explain("a", now=15.0))
    assert answer["state"] == "waiting"
    assert answer["waiting_for"] == {
        "reason": "blocks",
        "since_s": 3.0,
        "waiting_s": 5.0,
        "rule": "fair",
        "wakes": WAKES["blocks"],
    }


def test_without_a_reason_of_its_own_the_queues_counts() -> None:
    decisions = log()
    decisions.step(record(step=1, at=1.0, policies=RULES, waits=[Wait(0, "too few for a batch", wake=40)]))
    decisions.arrived(1, "a", at=2.0)
    waiting = only(decisions.explain("a", now=3.0))["waiting_for"]
    assert waiting["reason"] == "too few for a batch"
    assert waiting["wakes"] == "step 40, when fair wants to be asked again"
    assert waiting["since_s"] == 1.0


def test_every_reason_of_the_core_says_what_ends_it() -> None:
    assert set(WAIT_REASONS) - {"policy"} == set(WAKES)


def test_who_gave_way_for_whom_at_what_cost() -> None:
    decisions = log()
    for number, name in ((1, "victim"), (2, "winner")):
        decisions.arrived(number, name, at=0.0)
    decisions.step(record(step=1, at=1.0, policies=RULES, admitted=[(1, 0), (2, 16)]))
    decisions.step(record(step=2, at=2.0, policies=RULES, preempted=[Preemption(1, 2, "growth", "recompute", 48)]))
    victim, winner = only(decisions.explain("victim", 3.0)), only(decisions.explain("winner", 3.0))
    assert victim["state"] == "preempted"
    told = {"step": 2, "ago_s": 1.0, "cause": "growth", "how": "recompute", "tokens": 48, "rule": "newest"}
    assert victim["preempted"] == [{**told, "what": "preempted", "by": 2, "by_request": "winner"}]
    assert winner["made_way_for_it"] == [{**told, "what": "made-way", "victim": 1, "victim_request": "victim"}]
    assert winner["state"] == "running"


def test_a_swap_costs_the_bytes_of_whole_blocks() -> None:
    decisions = log()
    decisions.pool(16, 1000)
    decisions.arrived(1, "victim", at=0.0)
    decisions.step(record(step=2, at=2.0, policies=RULES, preempted=[Preemption(1, 1, "growth", "swap", 49)]))
    (told,) = only(decisions.explain("victim", 3.0))["preempted"]
    assert (told["how"], told["tokens"], told["bytes"]) == ("swap", 49, 4000)


def test_overtakers_are_later_arrivals_that_came_in_meanwhile() -> None:
    decisions = log()
    for number in range(1, 6):
        decisions.arrived(number, f"r{number}", at=0.0)
    decisions.step(record(step=1, at=1.0, admitted=[(1, 0), (4, 0)]))
    decisions.step(record(step=2, at=2.0, admitted=[(3, 0), (5, 0)]))
    overtaken = only(decisions.explain("r3", 3.0))["overtaken_by"]
    assert overtaken["count"] == 1
    assert [row["request_id"] for row in overtaken["requests"]] == ["r4"], "r5 came in behind it"
    assert only(decisions.explain("r2", 3.0))["overtaken_by"]["count"] == 3
    assert only(decisions.explain("r1", 3.0))["overtaken_by"]["count"] == 0


def test_who_comes_in_with_it_overtakes_only_from_before_it() -> None:
    decisions = log()
    for number in range(1, 6):
        decisions.arrived(number, f"r{number}", at=float(number))
    decisions.step(record(step=1, at=9.0, admitted=[(4, 0), (1, 0), (2, 0), (3, 0)]))
    names = {
        number: [row["request_id"] for row in only(decisions.explain(f"r{number}", 10.0))["overtaken_by"]["requests"]]
        for number in range(1, 6)
    }
    assert names == {1: ["r4"], 2: ["r4"], 3: ["r4"], 4: [], 5: []}
    decisions.step(record(step=2, at=11.0, preempted=[Preemption(1, 2, "growth", "recompute", 48)]))
    decisions.step(record(step=3, at=12.0, admitted=[(1, 0), (5, 0)]))
    assert only(decisions.explain("r1", 13.0))["overtaken_by"]["count"] == 1, "those of the second wait count, too"


def test_a_request_that_outlives_the_engine_tells_so() -> None:
    decisions = log()
    for number in (1, 2, 3):
        decisions.arrived(number, f"r{number}", at=1.0)
    decisions.step(record(step=50, at=2.0, policies=RULES, admitted=[(1, 0), (3, 0)], waits=[Wait(2, "blocks")]))
    decisions.step(record(step=51, at=3.0, finished=[(3, "stop")]))
    decisions.engine_lost(4.0, 57, "died of SIGSEGV")
    ran, waited, ended = (only(decisions.explain(f"r{number}", 5.0)) for number in (1, 2, 3))
    assert [ran["state"], waited["state"], ended["state"]] == ["waiting", "waiting", "finished (stop)"]
    assert [ran["waiting_for"]["reason"], ran["waiting_for"]["waiting_s"]] == ["recovering", 1.0]
    assert [waited["waiting_for"]["reason"], waited["waiting_for"]["waiting_s"]] == ["recovering", 4.0]
    lost = {"step": 57, "ago_s": 1.0, "what": "engine-lost", "how": "died of SIGSEGV"}
    assert ran["history"][-1] == waited["history"][-1] == lost
    assert lost not in ended["history"]
    decisions.engine_up()
    decisions.step(record(step=1, at=5.0, policies=RULES, admitted=[(2, 0), (1, 0)]))
    again = only(decisions.explain("r1", 6.0))
    assert [again["state"], again["overtaken_by"]["count"]] == ["running", 1]
    assert [h["what"] for h in again["history"]] == ["admitted", "engine-lost", "admitted"]


def test_a_finished_request_answers_within_retention() -> None:
    decisions = log(retention_s=10.0)
    decisions.arrived(1, "a", at=0.0)
    decisions.step(record(step=1, at=1.0, admitted=[(1, 0)]))
    decisions.step(record(step=2, at=2.0, finished=[(1, "length")]))
    answer = only(decisions.explain("a", 5.0))
    assert answer["state"] == "finished (length)"
    assert answer["waiting_for"] is None
    assert [h["what"] for h in answer["history"]] == ["admitted", "finished"]
    decisions.step(record(step=3, at=13.0))
    assert decisions.explain("a", 14.0) == []


def test_an_end_on_the_fronts_side_is_told_once() -> None:
    decisions = log()
    decisions.arrived(1, "a", at=0.0)
    decisions.ended(1, 1.0, "queue_timeout")
    decisions.ended(1, 2.0, "cancelled")
    decisions.step(record(step=9, at=3.0, finished=[(1, "cancelled")], waits=[Wait(1, "blocks")]))
    assert [h["reason"] for h in only(decisions.explain("a", 4.0))["history"]] == ["queue_timeout"]


def test_continuations_answer_together() -> None:
    decisions = log()
    decisions.arrived(1, "a", at=0.0)
    decisions.arrived(2, "a", at=0.0)
    assert [answer["sequence"] for answer in decisions.explain("a", 1.0)] == [1, 2]
    assert decisions.explain("b", 1.0) == []


@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["arrive", "admit", "preempt", "finish"])), max_size=300)
)
def test_memory_is_bounded_whatever_happens(happenings: list[tuple[int, str]]) -> None:
    decisions = log(events=40)
    unfinished: set[int] = set()
    known: set[int] = set()
    for step, (number, what) in enumerate(happenings):
        if what == "arrive" and number not in known:  # ids never come again
            decisions.arrived(number, f"r{number}", float(step))
            unfinished.add(number)
            known.add(number)
        elif what == "admit":
            decisions.step(record(step=step, at=float(step), admitted=[(number, 0)]))
        elif what == "preempt":
            preempted = [Preemption(number, number, "growth", "swap", 1)]
            decisions.step(record(step=step, at=float(step), preempted=preempted))
        elif what == "finish":
            decisions.step(record(step=step, at=float(step), finished=[(number, "stop")]))
            unfinished.discard(number)
        for name in (f"r{number}", "nobody"):
            decisions.explain(name, float(step))
        kept = sum(1 + len(t.happenings) for t in decisions._timelines.values()) + len(decisions._admissions)
        assert decisions.size == kept
        live = sum(1 + len(t.happenings) for t in decisions._timelines.values() if t.ended is None)
        assert kept <= 40 + live + 2


def test_a_sequence_that_gives_way_for_ever_keeps_its_first_and_last_moments() -> None:
    decisions = log()
    decisions.arrived(1, "a", at=0.0)
    for step in range(2000):
        decisions.step(record(step=step, at=1.0, preempted=[Preemption(1, 1, "growth", "swap", 1)]))
    steps = [happening["step"] for happening in only(decisions.explain("a", 2.0))["history"]]
    assert len(steps) == 400
    assert (steps[0], steps[-1]) == (0, 1999)
    assert decisions.size == 401


@pytest.mark.parametrize("count", [5_000])
def test_an_answer_is_quick_in_a_long_log(count: int) -> None:
    import time

    decisions = log(events=10 * count)
    for number in range(1, count + 1):
        at = number / 100
        decisions.arrived(number, f"r{number}", at)
        decisions.step(record(step=number, at=at, admitted=[(number, 0)] if number > 1 else []))
    began = time.perf_counter()
    assert only(decisions.explain("r1", count / 100))["overtaken_by"]["count"] == count - 1
    assert time.perf_counter() - began < 0.5


def test_the_reason_and_rule_of_a_policy_that_went_are_told_no_longer() -> None:
    decisions = log()
    decisions.arrived(1, "a", at=0.0)
    decisions.step(record(step=1, at=1.0, policies=RULES, waits=[Wait(1, "blocks")]))
    decisions.in_charge({"admission": "aging", "preemption": "youngest"})
    decisions.step(record(step=2, at=2.0, waits=[Wait(1, "")]))
    waiting = only(decisions.explain("a", now=3.0))["waiting_for"]
    assert (waiting["reason"], waiting["rule"], waiting["since_s"]) == ("queued", "aging", 3.0)
    decisions.step(record(step=3, at=3.0, waits=[Wait(0, "slots")]))
    waiting = only(decisions.explain("a", now=4.0))["waiting_for"]
    assert (waiting["reason"], waiting["rule"], waiting["since_s"]) == ("slots", "aging", 1.0)


def test_siblings_of_the_same_request_did_not_overtake_it() -> None:
    decisions = log()
    for number in (1, 2, 3):
        decisions.arrived(number, "many", at=0.0)
    decisions.arrived(4, "other", at=0.5)
    decisions.arrived(5, "many", at=0.6)
    decisions.step(record(step=1, at=1.0, admitted=[(2, 0), (3, 0), (4, 0), (5, 0)]))
    overtaken = decisions.explain("many", 2.0)[0]["overtaken_by"]
    assert [row["request_id"] for row in overtaken["requests"]] == ["other", "many"], "another request of that id"
