"""Drives a scheduler with the model replaced by a fixed token, and checks what must hold after every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvyard.core.journal import RecordParts
from kvyard.core.plan import Committed, Limits, Plan, SequenceSpec
from kvyard.core.scheduler import PolicySet, Scheduler

TOKEN = 7


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def limits(**changes: Any) -> Limits:  # noqa: ANN401 - any field of Limits
    """Small limits with some replaced."""
    values: dict[str, Any] = {
        "blocks": 64,
        "block_size": 4,
        "max_running": 8,
        "max_step_tokens": 64,
        "max_model_len": 256,
    }
    return Limits(**{**values, **changes})


def spec(id: int, prompt_len: int = 8, max_new: int = 8, **changes: Any) -> SequenceSpec:  # noqa: ANN401
    """A sequence whose arrival number is its id; `tokens=True` gives it a prompt with contents."""
    tokens = changes.pop("tokens", None)
    prompt = None
    if tokens is True:
        prompt = (np.arange(prompt_len, dtype=np.int32) * 31 + id * 1009) % 50021
    elif tokens is not None:
        prompt = np.asarray(tokens, np.int32)
        prompt_len = len(prompt)
    values: dict[str, Any] = {"request": id, "arrival": id, "arrived": float(id), **changes}
    return SequenceSpec(id=id, prompt_len=prompt_len, max_new=max_new, prompt=prompt, **values)


def commit(scheduler: Scheduler, plan: Plan, token: int = TOKEN, stop: Iterable[int] = ()) -> Committed:
    """Commit a plan with the fixed token; sequences in `stop` stop if they sample."""
    sampled = plan.ids[plan.samples]
    stops = np.isin(sampled, list(stop)) if len(sampled) else np.zeros(0, np.bool_)
    return scheduler.commit(plan, np.full(len(sampled), token, np.int32), stops)


@dataclass
class StepLog:
    """What one step did, in ids."""

    scheduled: dict[int, int]
    sampled: list[int]
    cached: dict[int, int]
    resumed: dict[int, int]
    """Tokens in KV when it came in again."""
    preempted: list[int]
    finished: list[tuple[int, str]]
    overrides: dict[str, int] = field(default_factory=dict)
    plan: Plan | None = None


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    """What must hold for every plan, whatever the policies did."""
    ledger = scheduler.ledger
    assert plan.granted.sum() <= ledger.max_step_tokens
    assert scheduler.running <= max(ledger.max_running, 0)
    assert len(set(plan.ids.tolist())) == len(plan.ids), "nothing is scheduled twice"
    assert len(set(plan.slots.tolist())) == len(plan.slots)
    assert (plan.granted > 0).all()
    cols = ledger.cols
    for slot, computed, granted, id in zip(plan.slots, plan.computed, plan.granted, plan.ids, strict=True):
        assert cols.owner_of(int(slot)).id == id
        assert computed + granted <= cols.total[slot]
        assert computed + granted <= cols.capacity[slot], "there are blocks for all that is computed"
    assert set(plan.ids.tolist()) <= set(ledger.sequences)


def run_step(
    scheduler: Scheduler, now: float = 0.0, stop: Iterable[int] = (), check: bool = True, token: int = TOKEN
) -> StepLog:
    """One step, committed with the fixed token; sequences in `stop` stop if they sample."""
    plan = scheduler.schedule(now)
    if check:
        check_plan(scheduler, plan)
    scheduled = dict(zip(plan.ids.tolist(), plan.granted.tolist(), strict=True))
    committed = commit(scheduler, plan, token, stop)
    parts = scheduler.take_record_parts()
    overrides: dict[str, int] = {}
    for cost in parts.policies:
        for cause, count in cost.overrides.items():
            overrides[cause] = overrides.get(cause, 0) + count
    if check:
        assert scheduler.ledger.audit() == []
        assert parts.prompt_tokens + parts.decode_tokens == sum(scheduled.values())
    return StepLog(
        scheduled=scheduled,
        sampled=committed.ids.tolist(),
        cached={entry.id: entry.cached for entry in plan.admitted if not entry.resumed},
        resumed={
            entry.id: int(plan.computed[plan.slots == entry.slot][0]) if entry.id in scheduled else -1
            for entry in plan.admitted
            if entry.resumed
        },
        preempted=[entry.id for entry in parts.preempted],
        finished=committed.finished,
        overrides=overrides,
        plan=plan,
    )


def step_parts(scheduler: Scheduler, now: float = 0.0) -> RecordParts:
    """One committed step, and the core's part of its record."""
    commit(scheduler, scheduler.schedule(now))
    return scheduler.take_record_parts()


def run_all(scheduler: Scheduler, most: int = 2000, check: bool = True) -> list[StepLog]:
    """Steps until nothing is left."""
    steps: list[StepLog] = []
    while scheduler.has_work():
        assert len(steps) < most, f"no end after {most} steps: {scheduler.dump()}"
        steps.append(run_step(scheduler, now=float(len(steps)), check=check))
    return steps


def scheduler_of(policies: PolicySet, /, *, clock: Clock | None = None, **changes: Any) -> Scheduler:  # noqa: ANN401
    """A scheduler with small limits."""
    return Scheduler(limits(**changes), policies, clock_ns=clock or Clock(), salt=b"test")
