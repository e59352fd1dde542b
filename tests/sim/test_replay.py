"""Replay: `vllm` equals every step of vLLM's recorded decisions, every other discipline its golden file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from kvyard.sim import disciplines
from kvyard.sim.replay import TraceError, read_trace, replay

from tests.sim.loads import GOLDEN, TRACES

OTHERS = sorted(set(disciplines.names()) - {"vllm", "vllm-priority"})


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_vllm_equals_every_step(path: Path) -> None:
    trace = read_trace(path)
    result = replay(trace, "vllm")
    assert result.first_difference is None
    assert result.steps == result.equal == len(trace["steps"])


def test_every_other_discipline_has_a_golden_file() -> None:
    assert [path.stem for path in GOLDEN] == OTHERS


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_each_discipline_equals_its_golden_file(path: Path) -> None:
    trace = read_trace(path)
    result = replay(trace, trace["discipline"])
    assert result.first_difference is None
    assert 10 <= result.steps == result.equal <= 20
    assert trace["discipline"] == path.stem
    assert trace["rules"] and all(step["why"] for step in trace["steps"]), "the derivation is part of the file"


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_no_golden_file_fits_another_discipline(path: Path) -> None:
    trace = read_trace(path)
    bare = {**trace, "config": {key: value for key, value in trace["config"].items() if key != "params"}}
    alike = {name for name in disciplines.names() if replay(bare, name).first_difference is None}
    # Until costs are measured these two choose alike; the golden file of the second tells them apart.
    assert alike - {path.stem} <= ({"recompute-or-swap"} if path.stem == "least-recompute" else set())


def small() -> dict[str, Any]:
    return copy.deepcopy(read_trace(next(path for path in GOLDEN if path.stem == "orca")))


@pytest.mark.parametrize(
    ("field", "change", "expected"),
    [
        ("scheduled", lambda step: step["scheduled"].update(B=7), {"A": 6, "B": 7}),
        ("sampled", lambda step: step["sampled"].reverse(), ["B", "A"]),
        ("finished", lambda step: step["finished"].append("A"), ["A"]),
        ("preempted", lambda step: step["preempted"].append("B"), ["B"]),
    ],
)
def test_one_changed_decision_is_found(field: str, change: Any, expected: Any) -> None:  # noqa: ANN401
    trace = small()
    change(trace["steps"][0])
    result = replay(trace, "orca")
    assert result.equal == result.steps - 1
    assert result.first_difference is not None
    assert (result.first_difference["step"], result.first_difference["field"]) == (0, field)
    assert result.first_difference["expected"] == expected


def test_the_order_of_scheduling_counts() -> None:
    trace = small()
    trace["steps"][0]["scheduled"] = {"B": 8, "A": 6}
    result = replay(trace, "orca")
    assert result.first_difference is not None and result.first_difference["field"] == "scheduled"


def test_what_a_trace_does_not_state_is_not_compared() -> None:
    trace = small()
    trace["steps"] = [{"scheduled": step["scheduled"]} for step in trace["steps"]]
    assert replay(trace, "orca").first_difference is None


def test_settings_of_the_trace_reach_the_policies_and_changes_win() -> None:
    trace = read_trace(next(path for path in TRACES if path.stem == "priority_pressure"))
    assert replay(trace, "vllm-priority").first_difference is None, "the trace's order is the discipline's"
    assert replay(trace, "vllm", {"admission": {"order": "fcfs"}}).first_difference is not None


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    trace = read_trace(next(path for path in TRACES if path.stem == "fcfs_pressure"))
    replay(trace, "vllm", progress=lambda done, total: told.append((done, total)))
    assert told[0] == (0, 343) and len(told) == 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "no decision trace"),
        ('{"config": {}}', "no decision trace"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_errors_within_a_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.json")
    trace = small()
    del trace["config"]["block_size"]
    with pytest.raises(TraceError, match="block_size"):
        replay(trace, "orca")
    trace = small()
    trace["requests"][0]["prompt_len"] = 100
    with pytest.raises(TraceError, match="request A can never be served"):
        replay(trace, "orca")


def test_golden_files_are_readable_json_with_one_step_a_line() -> None:
    for path in GOLDEN:
        lines = [line for line in path.read_text().splitlines() if line.startswith('  {"scheduled"')]
        assert len(lines) == len(json.loads(path.read_text())["steps"])


def trace_of(requests: list[dict[str, Any]], steps: list[dict[str, Any]]) -> dict[str, Any]:
    config = {"block_size": 4, "usable_blocks": 20, "max_running": 4, "step_tokens": 64, "max_model_len": 256}
    numbered = [{"step": number, "preempted": [], "finished": [], **step} for number, step in enumerate(steps)]
    return {"config": {**config, "prefix_cache": True}, "requests": requests, "steps": numbered}


def test_a_block_that_a_decode_fills_is_shared_within_the_same_step() -> None:
    """vLLM names a block when its tokens are granted, those of decodes too; 7 is the token that replays sample."""
    requests = [
        {"id": "A", "arrival_step": 0, "prompt_len": 6, "output_len": 4, "prompt_token_ids": [1, 2, 3, 4, 5, 6]},
        {"id": "B", "arrival_step": 2, "prompt_len": 9, "output_len": 1, "prompt_token_ids": [*range(1, 7), 7, 7, 9]},
    ]
    steps: list[dict[str, Any]] = [
        {"scheduled": {"A": 6}, "cached": {"A": 0}},
        {"scheduled": {"A": 1}, "cached": {}},
        {"scheduled": {"A": 1, "B": 1}, "cached": {"B": 8}, "finished": ["B"]},
        {"scheduled": {"A": 1}, "cached": {}, "finished": ["A"]},
    ]
    assert replay(trace_of(requests, steps), "vllm").first_difference is None


def test_requests_come_in_the_order_of_their_arrival_whatever_the_order_of_the_file() -> None:
    requests = [
        {"id": "late", "arrival_step": 1, "prompt_len": 40, "output_len": 1},
        {"id": "early", "arrival_step": 0, "prompt_len": 80, "output_len": 1},
        {"id": "next", "arrival_step": 0, "prompt_len": 30, "output_len": 1},
    ]
    steps: list[dict[str, Any]] = [
        {"scheduled": {"early": 64}},
        {"scheduled": {"early": 16, "next": 30, "late": 18}, "finished": ["early", "next"]},
        {"scheduled": {"late": 22}, "finished": ["late"]},
    ]
    trace = trace_of(requests, steps)
    trace["config"] = {**trace["config"], "prefix_cache": False, "usable_blocks": 60}
    assert replay(trace, "vllm").first_difference is None


def test_equal_priorities_are_told_apart_by_their_places_in_the_file() -> None:
    requests = [
        {"id": "later", "arrival_step": 1, "prompt_len": 40, "output_len": 1, "priority": 1},
        {"id": "urgent", "arrival_step": 0, "prompt_len": 128, "output_len": 1, "priority": 0},
        {"id": "sooner", "arrival_step": 0, "prompt_len": 60, "output_len": 1, "priority": 1},
    ]
    steps: list[dict[str, Any]] = [
        {"scheduled": {"urgent": 64}},
        {"scheduled": {"urgent": 64}, "finished": ["urgent"]},
        {"scheduled": {"later": 40, "sooner": 24}, "finished": ["later"]},
        {"scheduled": {"sooner": 36}, "finished": ["sooner"]},
    ]
    trace = trace_of(requests, steps)
    trace["config"] = {**trace["config"], "prefix_cache": False, "usable_blocks": 60, "order": "priority"}
    assert replay(trace, "vllm").first_difference is None
