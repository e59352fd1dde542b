"""What policies that learn are told: everything once, whatever is preempted, cancelled or forgotten."""

from __future__ import annotations

from collections import Counter
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.core.advice import builtin_set
from kvyard.core.scheduler import Scheduler
from kvyard.policy import (
    Admission,
    AdmissionPolicy,
    Ends,
    Lengths,
    Overtaken,
    RequestView,
    Served,
    Snapshot,
    learning,
)

from tests.core.harness import run_all, run_step, scheduler_of, spec

_IDS = count(10_000)


class Watching(AdmissionPolicy):
    """Lets everybody in, and adds up what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.served = Ends(), Served()
        self.ended: list[int] = []
        self.looks = True
        self.prompts: Counter[str] = Counter()
        self.outputs: Counter[str] = Counter()

    def admit(self, s: Snapshot) -> Admission:
        if self.looks:
            self._look(s)
        return Admission(s.waiting)

    def _look(self, s: Snapshot) -> None:
        self.ended += [e.id for e in reversed(self.ends.since(s))]
        for tenant, prompt, output in self.served.since(s):
            assert prompt or output, "nothing is told of those that were given nothing"
            self.prompts[tenant] += prompt
            self.outputs[tenant] += output


def watched(**limits: Any) -> tuple[Scheduler, Watching]:  # noqa: ANN401 - any field of Limits
    policy = Watching()
    return scheduler_of(builtin_set().replaced({"admission": policy}, {}, None), **limits), policy


def look(scheduler: Scheduler) -> None:
    """A policy is asked when somebody waits."""
    scheduler.add(spec(next(_IDS), 1, 1, tenant="last"))
    run_all(scheduler)
    assert scheduler.take_exits() == [], "it was put out"


@pytest.mark.parametrize("seed", range(5))
def test_everything_is_told_once_whoever_is_preempted(seed: int) -> None:
    random = Random(seed)
    scheduler, policy = watched(blocks=12, max_running=4)
    prompts, outputs = Counter[str](), Counter[str]()
    for id in range(1, 60):
        prompt, output, tenant = random.randint(1, 12), random.randint(1, 12), random.choice("abc")
        scheduler.add(spec(id, prompt, output, tenant=tenant))
        prompts[tenant] += prompt
        outputs[tenant] += output
    logs = run_all(scheduler)
    assert any(log.preempted for log in logs), "the pool was meant to be too small"
    look(scheduler)
    assert (policy.prompts, policy.outputs) == (prompts, outputs)
    assert sorted(policy.ended) == list(range(1, 60))
    assert len(policy.served) == 0


def test_what_was_cancelled_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LOOKED_AT", 16)
    scheduler, policy = watched(max_running=2)
    for id in range(1, 400):
        scheduler.add(spec(id, 2, 5, tenant=f"tenant {id}"))
    most = 0
    for number in range(390):
        scheduler.cancel(sorted(run_step(scheduler, now=float(number)).scheduled)[:1])
        most = max(most, len(policy.served))
    assert 16 < most <= 4 * 2 + 16 + 2
    assert policy.ended == []


def test_ends_that_the_snapshot_forgot_are_passed_over() -> None:
    scheduler, policy = watched(blocks=400, max_running=64, max_step_tokens=4096)
    policy.looks = False
    for id in range(1, 600):
        scheduler.add(spec(id, 1, 1))
    run_all(scheduler)
    policy.looks = True
    look(scheduler)
    assert policy.ended == list(range(600 - 256, 600))
    look(scheduler)
    assert len(policy.ended) == 257, "who made it look before"


def test_who_saw_others_come_in_is_known_until_it_comes_in_itself() -> None:
    scheduler, policy = watched(max_running=1)
    overtaken = Overtaken()
    late: list[set[int]] = []

    def newest_first(s: Snapshot) -> Admission:
        late.append(overtaken.by(s, 3))
        order: list[RequestView] = sorted(s.waiting, key=lambda r: (r.id not in late[-1], -r.id))
        return Admission(order)

    policy.admit = newest_first  # type: ignore[method-assign]
    order: list[int] = []
    scheduler.add(spec(1, 1, 1))
    scheduler.add(spec(2, 1, 1))
    for id in range(3, 9):
        order += run_step(scheduler).scheduled
        scheduler.add(spec(id, 1, 1))
    assert order == [2, 3, 4, 1, 6, 7]
    assert late == [set(), set(), set(), {1}, set(), set()]
    assert len(overtaken._seen) == 2, "those that wait"


@given(
    seen=st.lists(st.integers(1, 50), max_size=40),
    so_far=st.integers(0, 60),
    share=st.floats(0, 1),
    memory=st.integers(1, 50),
)
def test_a_quantile_of_those_that_were_longer(seen: list[int], so_far: int, share: float, memory: int) -> None:
    lengths = Lengths(memory)
    lengths.learn(seen)
    assert lengths.seen == seen[-memory:]
    longer = sorted(length for length in lengths.seen if length > so_far)
    (found,) = lengths.beyond(share, np.array([so_far]), np.array([55])).tolist()
    if not longer:
        assert found == 55
    else:
        assert found in longer
        assert sum(length <= found for length in longer) >= share * len(longer) - 1e-9
        assert sum(length < found for length in longer) <= share * len(longer) + 1e-9


def test_no_length_is_more_than_the_most() -> None:
    lengths = Lengths(10)
    lengths.learn([5, 7, 300])
    assert lengths.beyond(1.0, np.array([0, 5, 7, 300]), np.array([100, 6, 400, 301])).tolist() == [100, 6, 300, 301]
