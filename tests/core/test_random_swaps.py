"""Installed disciplines swapped at random under a random load: nobody is lost, nobody reads foreign KV."""

from __future__ import annotations

from random import Random

import pytest
from kvyard.core.plan import Limits
from kvyard.policy import KINDS, Kind, Policy
from kvyard.policy.registry import list_policies, load, load_discipline

from tests.core.harness import run_step, scheduler_of, spec
from tests.core.scripted import scripted_set
from tests.core.test_planner_properties import World

OWN = [item for item in list_policies().policies if item.distribution == "kvyard"]
DISCIPLINES = [item.name for item in OWN if item.kind == "discipline"]


class Changing(World):
    """A world whose policies are those that come with kvyard, changed at random."""

    met_swapped: int = 0
    """Changes while somebody's KV was in the host pool."""

    def candidate(self) -> dict[Kind, Policy]:
        if self.random.random() < 0.5:
            parts = load_discipline(self.random.choice(DISCIPLINES)).parts
            return {kind: load(kind, *parts[kind]).policy for kind in KINDS}
        kind = self.random.choice(KINDS)
        name = self.random.choice([item.name for item in OWN if item.kind == kind])
        if kind == "preemption" and self.random.random() < 0.5:  # the only one that swaps victims out when asked to
            return {kind: load(kind, "fewest-computed", {"how": "swap"}).policy}
        return {kind: load(kind, name).policy}

    def swap(self) -> None:
        before = {row.id for row in self.scheduler.request_rows(10_000)}
        self.met_swapped += self.scheduler.swapped > 0
        ticket = self.scheduler.swap(self.candidate())
        assert ticket.ok, ticket.error
        assert before == {row.id for row in self.scheduler.request_rows(10_000)}


def random_changes(count: int, seed: int) -> Changing:
    random = Random(seed)
    limits = Limits(
        blocks=24,
        block_size=4,
        max_running=6,
        max_step_tokens=24,
        max_model_len=60,
        prefix_cache=True,
        swap_blocks=20,
    )
    world = Changing(limits, random)
    for _ in range(count):
        world.swap()
        for _ in range(random.randrange(4)):
            if len(world.alive) < 20:
                world.arrive()
            if random.random() < 0.02:
                world.cancel()
            world.step()
    world.drain()
    exits = {(exit_.name, exit_.code) for exit_ in world.scheduler.take_exits()}
    assert all(name == "random" for name, _ in exits), f"what comes with kvyard was put out: {exits}"
    return world


@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_random_changes(seed: int) -> None:
    random_changes(100, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_thousand_random_changes(seed: int) -> None:
    assert random_changes(1000, seed).met_swapped


def test_with_ten_thousand_waiting() -> None:
    """No boundary pays for the whole queue, and the new order is complete when the change is done."""
    clock_ns = 0

    def clock() -> int:
        nonlocal clock_ns
        clock_ns += 1000  # a microsecond for every look at the clock
        return clock_ns

    scheduler = scheduler_of(scripted_set(), blocks=64, max_running=8)
    scheduler._swapper._clock_ns = clock
    for id in range(1, 10_001):
        scheduler.add(spec(id, prompt_len=4, max_new=3, priority=id % 7))
    run_step(scheduler, check=False)
    ticket = scheduler.swap({"admission": load("admission", "vllm", {"order": "priority"}).policy})
    boundaries = 0
    while not ticket.over:
        run_step(scheduler, check=False)
        boundaries += 1
        assert boundaries < 10_000
    assert ticket.ok
    waiting = [(view.priority, view.arrival) for view in scheduler.snapshot.waiting]
    assert waiting == sorted(waiting)
    assert len(waiting) + scheduler.running + scheduler.ledger.count.finished == 10_000


def test_a_group_of_several_continuations_is_changed_as_one() -> None:
    """Sequences of one request are sequences like all others: each ends once, whatever was changed between."""
    scheduler = scheduler_of(scripted_set(), blocks=12, swap_blocks=12)
    for id in range(1, 5):
        scheduler.add(spec(id, prompt_len=9, max_new=7, request=1, tokens=True))
    ended: list[int] = []
    for name in DISCIPLINES * 3:
        parts = load_discipline(name).parts
        assert scheduler.swap({kind: load(kind, *parts[kind]).policy for kind in KINDS}).ok
        ended += [id for id, _ in run_step(scheduler, now=float(scheduler.step)).finished]
    assert sorted(ended) == [1, 2, 3, 4]
    assert scheduler.blocks_used == 0
