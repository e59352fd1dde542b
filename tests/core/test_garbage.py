"""What has ended is gone at once: the collector is off while anything runs, and a cycle would stay as long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from kvyard.core.policy_set import PolicySet
from kvyard.core.scheduler import Scheduler
from kvyard_policies.vllm import VllmAdmission, VllmPreemption, VllmPrefill

from tests.core.harness import Clock, commit, limits, spec


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def scheduler_for(**changes: Any) -> Scheduler:  # noqa: ANN401 - any field of Limits
    policies = PolicySet(VllmAdmission(), VllmPreemption(), VllmPrefill())
    return Scheduler(limits(**changes), policies, clock_ns=Clock(), salt=b"salt")


def run(scheduler: Scheduler, first: int, count: int, *, cancel_every: int = 0, group: int = 1) -> None:
    """Sequences of a few tokens each to their ends, some of them cancelled while they run or wait."""
    for id in range(first, first + count):
        scheduler.add(spec(id, tokens=True, request=id // group))
    step = 0
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        commit(scheduler, plan)
        scheduler.take_record_parts()
        step += 1
        if cancel_every and step % cancel_every == 0:
            scheduler.cancel([min(scheduler.ledger.sequences, default=0), max(scheduler.ledger.sequences, default=0)])


@pytest.mark.parametrize("changes", [{}, {"prefix_cache": True}, {"blocks": 10}], ids=["plain", "cached", "pressed"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("cancel_every", [0, 3])
def test_ended_sequences_leave_no_cycles(
    no_collector: None, changes: dict[str, Any], group: int, cancel_every: int
) -> None:
    scheduler = scheduler_for(**changes)
    run(scheduler, 1, 10)
    gc.collect()
    run(scheduler, 100, 300, group=group, cancel_every=cancel_every)
    assert gc.collect() == 0, "objects that only the collector could free"
