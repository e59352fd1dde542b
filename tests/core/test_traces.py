"""The decisions of vLLM 0.32.0's scheduler, step by step (tests/data/traces)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvyard.core.plan import Limits, SequenceSpec
from kvyard.core.scheduler import PolicySet, Scheduler
from kvyard_policies.vllm import VllmAdmission, VllmPreemption, VllmPrefill

from tests.core.harness import Clock, StepLog, run_step

TRACES = Path(__file__).parent.parent / "data" / "traces"
NAMES = sorted(path.stem for path in TRACES.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads((TRACES / f"{name}.json").read_text())
    return trace


def scheduler_for(config: dict[str, Any]) -> Scheduler:
    limits = Limits(
        blocks=config["usable_blocks"],
        block_size=config["block_size"],
        max_running=config["max_running"],
        max_step_tokens=config["step_tokens"],
        max_model_len=config["max_model_len"],
        prefix_cache=config["prefix_cache"],
    )
    policies = PolicySet(
        VllmAdmission(order=config["order"]),
        VllmPreemption(order=config["order"]),
        VllmPrefill(long_prefill=config["long_prefill_threshold"]),
    )
    return Scheduler(limits, policies, clock_ns=Clock(), salt=b"trace")


def specs_of(trace: dict[str, Any]) -> list[tuple[int, SequenceSpec]]:
    out = []
    for position, request in enumerate(trace["requests"]):
        tokens = request.get("prompt_token_ids")
        out.append(
            (
                request["arrival_step"],
                SequenceSpec(
                    id=position + 1,
                    request=position + 1,
                    arrival=position,
                    arrived=float(request["arrival_step"]),
                    prompt_len=request["prompt_len"],
                    max_new=request["output_len"],
                    prompt=None if tokens is None else np.asarray(tokens, np.int32),
                    priority=request["priority"],
                ),
            )
        )
    return out


def as_trace(log: StepLog, names: list[str]) -> dict[str, Any]:
    return {
        "scheduled": [(names[id - 1], count) for id, count in log.scheduled.items()],
        "sampled": [names[id - 1] for id in log.sampled],
        "cached": {names[id - 1]: count for id, count in log.cached.items()},
        "preempted": {names[id - 1] for id in log.preempted},
        "finished": {names[id - 1] for id, _ in log.finished},
    }


def expected(step: dict[str, Any]) -> dict[str, Any]:
    return {
        "scheduled": list(step["scheduled"].items()),
        "sampled": step["sampled"],
        "cached": step["cached"],
        "preempted": set(step["preempted"]),
        "finished": set(step["finished"]),
    }


def test_all_eleven_traces_are_here() -> None:
    assert len(NAMES) == 11


@pytest.mark.parametrize("name", NAMES)
def test_every_step_equals_the_trace(name: str) -> None:
    trace = load(name)
    scheduler = scheduler_for(trace["config"])
    arrivals = specs_of(trace)
    names = [request["id"] for request in trace["requests"]]
    for number, step in enumerate(trace["steps"]):
        while arrivals and arrivals[0][0] <= number:
            scheduler.add(arrivals.pop(0)[1])
        log = run_step(scheduler, now=float(number))
        assert as_trace(log, names) == expected(step), f"step {number}"
        if "resumed" in step:
            assert {names[id - 1]: count for id, count in log.resumed.items()} == step["resumed"], f"step {number}"
        assert log.overrides == {}, f"step {number}: nothing had to be overridden"
    assert not scheduler.has_work()
    assert scheduler.blocks_used == 0
