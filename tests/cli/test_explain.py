"""The sentences of `kvyard explain`."""

from __future__ import annotations

from typing import Any

import pytest
from kvyard.cli.explain import lines


def answer(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of an answer
    """A waiting sequence's answer."""
    plain = {
        "sequence": 7, "request_id": "req-7", "state": "waiting", "age_s": 9.0, "waiting_for": None, "preempted": [],
        "made_way_for_it": [], "overtaken_by": {"count": 0, "requests": []}, "history": [], "after_s": {},
    }  # fmt: skip
    return {**plain, **changes}


def preempted(by: int, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a happening
    plain = {
        "step": 5, "ago_s": 2.0, "what": "preempted", "by": by, "by_request": f"req-{by}", "how": "recompute",
        "cause": "growth", "tokens": 48, "rule": "newest",
    }  # fmt: skip
    return {**plain, **changes}


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("blocks", "  waits for blocks for 7.6 s (9 s in all)"),
        ("slots", "  waits for slots for 7.6 s (9 s in all)"),
        ("after a preemption", "  waits for 7.6 s (9 s in all): after a preemption"),
        ("queued", "  waits for 7.6 s (9 s in all): queued"),
    ],
)
def test_why_and_how_long(reason: str, said: str) -> None:
    waiting = {"reason": reason, "since_s": 7.6, "waiting_s": 9.0, "rule": "fair", "wakes": "later"}
    assert lines(answer(waiting_for=waiting))[1:] == [said, "    rule:  fair", "    wakes: later"]


def test_who_gave_way_to_whom() -> None:
    cost = "for its growth 2 s ago in step 5: 48 tokens to compute again (rule: newest)"
    told = lines(answer(state="preempted", preempted=[preempted(9), preempted(7)]))
    assert told[1:] == [f"  gave way to req-9 {cost}", f"  gave way to itself {cost}"]


def test_a_swap_costs_bytes() -> None:
    swapped = {**preempted(9), "how": "swap", "bytes": 3 << 20}
    told = lines(answer(state="swapped", preempted=[swapped]))
    assert (
        told[1] == "  gave way to req-9 for its growth 2 s ago in step 5: 3.0 MiB to copy (48 tokens) (rule: newest)"
    )


def test_a_lost_engine_is_told_between_the_moments() -> None:
    history = [
        {"what": "admitted", "step": 57, "ago_s": 9.0, "cached_tokens": 0},
        {"what": "engine-lost", "step": 60, "ago_s": 8.0, "how": "died of SIGSEGV"},
        {"what": "admitted", "step": 1, "ago_s": 7.0, "cached_tokens": 16},
    ]
    assert lines(answer(state="running", history=history))[1:] == [
        "  admitted with 0 cached tokens in step 57, 9 s ago",
        "  the engine died of SIGSEGV in step 60, 8 s ago; a new one goes on with it and counts its steps from 1",
        "  admitted with 16 cached tokens in step 1, 7 s ago",
    ]


@pytest.mark.parametrize(("count", "said"), [(1, "1 later arrival: r1"), (2, "2 later arrivals: r1, r2")])
def test_overtakers_are_counted_in_words(count: int, said: str) -> None:
    rows = [{"request_id": f"r{number}"} for number in range(1, count + 1)]
    assert lines(answer(overtaken_by={"count": count, "requests": rows}))[1:] == [f"  overtaken by {said}"]
