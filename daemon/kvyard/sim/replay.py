"""Replay of a decision trace: the core is given the same requests and compared with the trace in every step.

A trace is a JSON object: `config` (limits of the scheduler), `requests`, and `steps`, each with what was
scheduled in order, what was sampled, prefix hits at first admission, and who was preempted and finished. A step
of the trace is a step of the core; `step_seconds` of `config` (default 1) is what each takes, for policies that
look at the clock, or `step_cost` with `base`, `decode`, `prompt` and `copy` in seconds. `order` and
`long_prefill_threshold` go to the policies that have such parameters, and so do `params` of `config`, by kind.
A request makes `output_len` tokens, or stops after `stop_after`. `discipline` is the one whose decisions these are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvyard.core.guard import Guard
from kvyard.core.plan import Limits, Plan, SequenceSpec
from kvyard.core.scheduler import NeverFits, Scheduler
from kvyard.policy.base import KINDS, Kind
from kvyard.policy.params import Value
from kvyard.sim import disciplines
from kvyard.sim.cost import StepCost, copied_blocks
from kvyard.sim.disciplines import Changes

TOKEN = 7
OFFERED = {"order": "order", "long_prefill_threshold": "long_prefill"}
"""Settings of a trace, and the parameters of policies that they stand for."""


class TraceError(ValueError):
    """A decision trace cannot be replayed; the text says why."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far the decisions equal the trace's."""

    steps: int
    equal: int
    first_difference: dict[str, Any] | None
    """The step, its field, and what was expected and found."""


def read_trace(path: Path) -> dict[str, Any]:
    """A decision trace from a file. Raises TraceError."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TraceError(f"{path} is no JSON: {error}") from error
    if not isinstance(trace, dict) or not all(part in trace for part in ("config", "requests", "steps")):
        raise TraceError(f"{path} is no decision trace: an object with config, requests and steps is expected")
    return trace


def discipline_of(trace: Mapping[str, Any]) -> str:
    """The discipline that a trace says it is of; `vllm` where it says nothing, as recordings of vLLM do."""
    named = trace.get("discipline", "vllm")
    if not isinstance(named, str):
        raise TraceError(f"the trace's discipline is a name, not {named!r}")
    return named


def replay(
    trace: Mapping[str, Any],
    discipline: str,
    changes: Changes | None = None,
    progress: Callable[[int, int], None] | None = None,
    parts: Mapping[Kind, str] | None = None,
) -> Replayed:
    """Replay a trace with a discipline. Raises TraceError, RegistryError, ParamError."""
    try:
        scheduler = _scheduler(trace["config"], discipline, changes, parts)
        # They come when the trace says, but whoever orders them otherwise breaks ties by their place in the file.
        arrivals = [_spec(number, request, trace["config"]) for number, request in enumerate(trace["requests"])]
        arrivals.sort(key=lambda arrival: arrival[0])
    except (KeyError, TypeError) as error:
        raise TraceError(f"the trace lacks or misstates {error}") from error
    player = _Player(trace, scheduler)
    equal, first = 0, None
    for number, expected in enumerate(trace["steps"]):
        while arrivals and arrivals[0][0] <= number:
            player.add(arrivals.pop(0)[1])
        difference = _difference(expected, player.step())
        equal += difference is None
        if difference is not None and first is None:
            first = {"step": number, **difference}
        if progress is not None and number % 64 == 0:
            progress(number, len(trace["steps"]))
    return Replayed(len(trace["steps"]), equal, first)


def _scheduler(
    config: Mapping[str, Any], discipline: str, changes: Changes | None, parts: Mapping[Kind, str] | None
) -> Scheduler:
    limits = Limits(
        blocks=config["usable_blocks"],
        block_size=config["block_size"],
        max_running=config["max_running"],
        max_step_tokens=config["step_tokens"],
        max_model_len=config["max_model_len"],
        prefix_cache=config.get("prefix_cache", False),
        swap_blocks=config.get("swap_blocks", 0),
    )
    common: dict[str, Value] = {ours: config[theirs] for theirs, ours in OFFERED.items() if theirs in config}
    own = config.get("params", {})
    offered: Changes = {kind: {**common, **own.get(kind, {})} for kind in KINDS}
    policies = disciplines.make(discipline, changes, parts, offered)
    return Scheduler(limits, policies, clock_ns=lambda: 0, guard=Guard(clock_ns=lambda: 0), salt=b"replay")


def _spec(number: int, request: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, SequenceSpec]:
    tokens = request.get("prompt_token_ids")
    at = int(request["arrival_step"])
    spec = SequenceSpec(
        id=number + 1,
        request=number + 1,
        arrival=number,
        arrived=at * float(config.get("step_seconds", 1.0)),
        prompt_len=request["prompt_len"],
        max_new=request["output_len"],
        prompt=None if tokens is None else np.asarray(tokens, np.int32),
        priority=request.get("priority", 0),
        tenant=request.get("tenant", ""),
        deadline=request.get("deadline"),
    )
    return at, spec


class _Player:
    """Drives the core step by step, in the trace's terms."""

    def __init__(self, trace: Mapping[str, Any], scheduler: Scheduler) -> None:
        config, requests = trace["config"], trace["requests"]
        self._scheduler = scheduler
        self._names = [str(request["id"]) for request in requests]
        lengths = [request.get("stop_after", request["output_len"]) for request in requests]
        self._outputs = np.array([0, *lengths], np.int64)
        constant = {"base": float(config.get("step_seconds", 1.0)), "decode": 0.0, "prompt": 0.0}
        self._cost = StepCost(**{"context": 0.0, **config.get("step_cost", constant)})
        self._now = 0.0

    def add(self, spec: SequenceSpec) -> None:
        try:
            self._scheduler.add(spec)
        except NeverFits as error:
            raise TraceError(f"request {self._names[spec.id - 1]} can never be served: it {error}") from error

    def step(self) -> dict[str, Any]:
        scheduler, names = self._scheduler, self._names
        plan = scheduler.schedule(self._now)
        ids = plan.ids[plan.samples]
        stop = scheduler.generated(plan.slots[plan.samples]) + 1 >= self._outputs[ids]
        committed = scheduler.commit(plan, np.full(len(ids), TOKEN, np.int32), stop)
        parts = scheduler.take_record_parts()
        spent = self._cost.seconds(plan, parts.decode_tokens, parts.prompt_tokens)
        self._now += spent
        if not plan.idle:
            scheduler.observe(parts.decode_tokens, parts.prompt_tokens, spent, copied_blocks(plan))
        return {
            "scheduled": [(names[id - 1], n) for id, n in zip(plan.ids.tolist(), plan.granted.tolist(), strict=True)],
            "sampled": [names[id - 1] for id in committed.ids.tolist()],
            "cached": {names[entry.id - 1]: entry.cached for entry in plan.admitted if not entry.resumed},
            "resumed": _resumed(plan, names),
            "preempted": sorted(names[entry.id - 1] for entry in parts.preempted),
            "finished": sorted(names[id - 1] for id, _ in committed.finished),
        }


def _resumed(plan: Plan, names: list[str]) -> dict[str, int]:
    computed = dict(zip(plan.ids.tolist(), plan.computed.tolist(), strict=True))
    return {names[entry.id - 1]: computed.get(entry.id, 0) for entry in plan.admitted if entry.resumed}


def _difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first field in which a step differs; a field that the trace does not state is not compared."""
    for field, ours in found.items():
        if field not in expected:
            continue
        theirs = expected[field]
        if field == "scheduled":
            theirs = list(theirs.items())
        elif field in ("preempted", "finished"):
            theirs = sorted(theirs)
        if theirs != ours:
            return {
                "field": field,
                "expected": expected[field],
                "found": dict(ours) if field == "scheduled" else ours,
            }
    return None
