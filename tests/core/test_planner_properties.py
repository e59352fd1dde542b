"""Random load, cancels, failed steps, preemptions and policy swaps: what must hold always does.

Blocks are conserved, the budget is kept, nothing is scheduled twice, nobody is lost, and no sequence ever
reads KV that was not computed for its own prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvyard.core.advice import PolicySet
from kvyard.core.conduct import ConductLimits
from kvyard.core.plan import Limits, Plan, SequenceSpec, token_array
from kvyard.core.scheduler import NeverFits, Scheduler
from kvyard.policy import KINDS
from kvyard_policies.vllm import VllmAdmission, VllmPreemption, VllmPrefill

from tests.core.harness import Clock, check_plan
from tests.core.kv_model import KvModel
from tests.core.random_policies import random_set

LIMITS = st.builds(
    Limits,
    blocks=st.integers(4, 30),
    block_size=st.sampled_from((1, 2, 4, 16)),
    max_running=st.integers(1, 7),
    max_step_tokens=st.sampled_from((1, 3, 8, 40)),
    max_model_len=st.sampled_from((16, 60)),
    prefix_cache=st.booleans(),
    swap_blocks=st.sampled_from((0, 3, 40)),
)
ANYTHING_GOES = ConductLimits(
    stall_s=1e9,
    asleep_s=1e9,
    overtakes=10**9,
    age_s=1e9,
    idle_steps=10**9,
    idle_s=1e9,
    thrashes=10**9,
    override_share=2.0,
)
"""Random decisions are bad conduct by any measure; here each of them must be survived."""


def plain_set() -> PolicySet:
    return PolicySet(VllmAdmission(), VllmPreemption(), VllmPrefill())


@dataclass
class World:
    """A scheduler under a random load, with a model of its KV."""

    limits: Limits
    random: Random
    scheduler: Scheduler = field(init=False)
    kv: KvModel = field(init=False)
    clock: Clock = field(default_factory=Clock)
    next_id: int = 1
    alive: dict[int, SequenceSpec] = field(default_factory=dict)
    made: dict[int, list[int]] = field(default_factory=dict)
    """Output tokens of each sequence as they were committed."""
    ended: dict[int, str] = field(default_factory=dict)
    now: float = 0.0
    forked: int = 0
    """Copies from one sequence of a request to another in the last step."""

    def __post_init__(self) -> None:
        policies = random_set(self.random)
        self.scheduler = Scheduler(self.limits, policies, clock_ns=self.clock, salt=b"s", conduct=ANYTHING_GOES)
        self.kv = KvModel(self.limits)

    def arrive(self) -> None:
        """A request, now and then of several sequences; some may have sent tokens to their clients before."""
        random, size = self.random, self.limits.block_size
        template = Random(random.randrange(3))
        shared = [template.randrange(9) for _ in range(size * random.randrange(4))]
        prompt = (shared + [random.randrange(9) for _ in range(random.randrange(1, 12))])[: self.limits.max_model_len]
        request, tenant, priority = self.next_id, random.choice(("", "a")), random.randrange(3)
        n = random.choice((1, 1, 2, 4))
        for _ in range(n):
            emitted = [random.randrange(9) for _ in range(random.choice((0, 0, 0, 2)))]
            spec = SequenceSpec(
                id=self.next_id,
                request=request,
                arrival=self.next_id,
                arrived=self.now,
                prompt_len=len(prompt),
                max_new=random.randrange(1, 14) + len(emitted),
                prompt=np.array(prompt, np.int32),
                emitted=np.array(emitted, np.int32),
                priority=priority,
                tenant=tenant,
                siblings=n > 1,
                scored=random.random() < 0.2 and not emitted,
            )
            self.next_id += 1
            try:
                self.scheduler.add(spec)
            except NeverFits:
                continue
            self.alive[spec.id] = spec
            self.made[spec.id] = emitted

    def cancel(self) -> None:
        ids = [id for id in self.alive if self.random.random() < 0.3]
        assert self.scheduler.cancel([*ids, 10**9]) == ids
        for id in ids:
            self.end(id, "cancelled")

    def end(self, id: int, reason: str) -> None:
        assert id not in self.ended
        del self.alive[id]
        self.ended[id] = reason

    def swap(self) -> None:
        kinds = [kind for kind in KINDS if self.random.random() < 0.5]
        fresh = random_set(self.random) if self.random.random() < 0.7 else plain_set()
        before = [row.id for row in self.scheduler.request_rows(10_000)]
        ticket = self.scheduler.swap({kind: fresh.get(kind) for kind in kinds})
        assert ticket.ok
        assert sorted(before) == sorted(row.id for row in self.scheduler.request_rows(10_000))

    def step(self) -> None:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        check_plan(self.scheduler, plan)
        self.check_rows(plan)
        self.forked = sum(copy.direction == "copy" for copy in plan.copies)
        if not plan.idle and self.random.random() < 0.1:
            self.kv.fail(plan, self.random)
            self.scheduler.abandon(plan)
            if len(plan) and self.random.random() < 0.5:
                guilty = int(plan.ids[0])
                assert self.scheduler.finish(guilty, "error")
                self.end(guilty, "error")
        else:
            self.kv.run(self.scheduler, plan)
            self.commit(plan)
        assert self.scheduler.ledger.audit() == []
        assert set(self.scheduler.ledger.sequences) == set(self.alive), "nobody is lost"

    def check_rows(self, plan: Plan) -> None:
        """The tokens that the engine reads are the sequence's own."""
        for slot, id in zip(plan.slots.tolist(), plan.ids.tolist(), strict=True):
            spec = self.alive[id]
            assert spec.prompt is not None
            expected = [*token_array(spec.prompt).tolist(), *self.made[id]]
            assert plan.tokens[slot, : len(expected)].tolist() == expected
            assert int(self.scheduler.ledger.cols.total[slot]) == len(expected)

    def commit(self, plan: Plan) -> None:
        ids = plan.ids[plan.samples].tolist()
        tokens = [self.random.randrange(9) for _ in ids]
        stops = [self.random.random() < 0.02 for _ in ids]
        committed = self.scheduler.commit(plan, np.array(tokens, np.int32), np.array(stops, np.bool_))
        assert committed.ids.tolist() == ids
        finished = dict(committed.finished)
        for id, token, stop in zip(ids, tokens, stops, strict=True):
            self.made[id].append(token)
            full = len(self.made[id]) == self.alive[id].max_new
            assert finished.get(id) == ("stop" if stop else "length" if full else None)
        for id, reason in committed.finished:
            self.end(id, reason)

    def drain(self) -> None:
        """Under plain policies everything ends in bounded time, and all blocks come back."""
        plain = plain_set()
        assert self.scheduler.swap({kind: plain.get(kind) for kind in KINDS}).ok
        left = sum(spec.prompt_len + 2 * spec.max_new for spec in self.alive.values())
        for _ in range(60 * left + 20):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.alive
        assert self.scheduler.blocks_used == 0
        assert self.scheduler.ledger.host.used == 0
        assert len(self.ended) == len(self.made)


def live_through(limits: Limits, seed: int, steps: int) -> World:
    world = World(limits, Random(seed))
    for _ in range(steps):
        for action, chance in ((world.arrive, 0.5), (world.arrive, 0.3), (world.cancel, 0.05), (world.swap, 0.05)):
            if world.random.random() < chance:
                action()
        world.step()
    assert world.scheduler.take_exits() == [], "legal policies are never put out"
    world.drain()
    assert world.scheduler.take_exits() == []
    return world


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits=LIMITS, seed=st.integers(0, 2**32))
def test_whatever_the_policies_do_the_core_keeps_its_promises(limits: Limits, seed: int) -> None:
    live_through(limits, seed, steps=60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits=LIMITS, seed=st.integers(0, 2**32))
def test_the_same_for_long(limits: Limits, seed: int) -> None:
    live_through(limits, seed, steps=120)


def test_the_load_reaches_the_corners() -> None:
    """The property test above is worth something only if these things happen in it."""
    reasons: set[str] = set()
    swapped_in = preempted = shared = waited = 0
    forks = {True: 0, False: 0}
    for seed in range(16):
        cached = bool(seed % 2)
        limits = Limits(18, 2, 5, 24, 40, prefix_cache=cached, swap_blocks=12)
        world = World(limits, Random(seed))
        for _ in range(80):
            world.arrive()
            world.step()
            parts = world.scheduler.take_record_parts()
            preempted += len(parts.preempted)
            shared += any(cached for _, cached in parts.admitted)
            waited += any(wait.reason == "sibling" for wait in parts.waits)
            forks[cached] += world.forked
            swapped_in += sum(entry.how == "swap" for entry in parts.preempted)
        world.cancel()
        reasons |= set(world.ended.values())
    assert reasons == {"stop", "length", "cancelled", "error"}
    assert preempted > 100
    assert swapped_in > 10
    assert shared > 10
    assert waited > 10
    assert min(forks.values()) > 10
