"""What holds of thrashing for any victims and any ways to put them out, not only for those that a test thought of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvyard.core.conduct import PAYS, ConductLimits
from kvyard.core.guard import Fault
from kvyard.core.policy_set import PolicySet
from kvyard.core.scheduler import Scheduler
from kvyard.link.record import Preemption
from kvyard.policy import Cause, RequestView, Snapshot, Victims
from kvyard.sim import disciplines

from tests.core.harness import Clock, limits, run_step, spec, step_parts
from tests.core.scripted import ScriptedPreemption
from tests.core.test_thrashing import FAR_BELOW, SMALL, UNWATCHED, blamed, crowd, serve

TIMES = ConductLimits().thrashes + 1

# ---- one sequence that always gives way to later ones -----------------------------------------------------------


class Victim:
    """A sequence of one preemption after the other, and what is thrown away of its KV."""

    def __init__(self, prompt: int, outputs: int) -> None:
        scheduler = crowd(outputs=20)
        run_step(scheduler)
        self.watch = scheduler._conduct
        self.seq, self.by = scheduler.ledger.sequences[1], scheduler.ledger.sequences[9]
        self.seq.prompt_len = self.seq.total = self.prompt = prompt
        self.end = prompt + outputs
        self.computed = self.lost = 0

    def compute(self, tokens: int) -> None:
        """So many in KV, each of which beyond the last known samples the next."""
        self.computed = min(self.computed + tokens, self.end)
        self.seq.total = max(self.seq.total, min(self.computed + 1, self.end))

    def give_way(self, swapped: bool) -> None:
        """Raises Fault when it was too often."""
        if not swapped:
            self.lost += self.computed
        how = "swap" if swapped else "recompute"
        self.watch._weigh(self.seq, self.by, Preemption(1, 9, "growth", how, self.computed))
        if not swapped:
            self.computed = 0


STINTS = st.tuples(
    st.sampled_from(("tokens", "share", "beyond")), st.floats(0, 1.3), st.integers(1, 8), st.booleans()
)
"""How far it comes before it gives way: some tokens, a share of what it has, or that many beyond it; and the way."""


def stint(victim: Victim, kind: str, share: float, few: int) -> None:
    if kind == "tokens":
        victim.compute(few)
    elif kind == "share":
        victim.compute(max(1, int(victim.seq.total * share) - victim.computed))
    else:
        victim.compute(max(0, victim.seq.total - 1 - victim.computed) + few)


@settings(max_examples=60, deadline=None)
@example([("beyond", 0, 1, True), ("beyond", 0, 1, False)], 10, 4000)
@example([("beyond", 0, 1, True), ("tokens", 0, 1, False), ("beyond", 0, 1, False)], 10, 4000)
@example([("share", 0.5, 1, False)] * 30 + [("share", 0.6, 1, True)], 2000, 100)
@given(st.lists(STINTS, min_size=1, max_size=40), st.integers(1, 2000), st.integers(1, 4000))
def test_what_one_sequence_loses_is_bounded_by_what_it_wins(
    pattern: Sequence[tuple[str, float, int, bool]], prompt: int, outputs: int
) -> None:
    """However ways and moments are mixed: it ends, or its tormentor does, before the loss is beyond all measure.

    Between two preemptions that pay at most `TIMES` do not. None of those loses more than `PAYS` times what is won
    with the one that pays; or, while a prompt is kept by swaps, each such stretch ends a `PAYS`th further than the
    one before it, so that their losses are a geometric series.
    """
    victim = Victim(prompt, outputs)
    bound = TIMES * (PAYS * outputs + (PAYS + 2) * victim.end)
    try:
        for round_ in range(4000):
            kind, share, few, swapped = pattern[round_ % len(pattern)]
            stint(victim, kind, share, few)
            if victim.computed >= victim.end:
                break
            victim.give_way(swapped)
            assert victim.lost <= bound
    except Fault as fault:
        assert fault.code == "thrashing"
    assert victim.lost <= bound


# ---- hostile mixtures on pressured loads ------------------------------------------------------------------------

HARM = 10
"""Times the work that is needed at least. Unwatched, the worst of the ways below take more than 25 times that."""


def long_outputs(ways: Sequence[bool], spare: int, lookahead: int, watched: ConductLimits | None) -> Scheduler:
    """Eight of 600 tokens where little more than one fits; the first to come gives way, and as `ways` say."""
    times: dict[int, int] = {}

    def decide(s: Snapshot, who: RequestView, cause: Cause) -> Victims:
        order = sorted(s.running, key=lambda r: r.arrival)
        times[order[0].id] = turn = times.get(order[0].id, -1) + 1
        return Victims(order, how="swap" if ways[turn % len(ways)] else "recompute")

    return crowd(
        preemption=ScriptedPreemption(decide, lookahead=lookahead),
        outputs=580,
        count=8,
        watched=watched,
        blocks=38 + spare,
        max_model_len=600,
        max_step_tokens=600,
        swap_blocks=1000,
    )


def work(scheduler: Scheduler, most: float) -> float:
    """Tokens computed until all are through, as so many times the least that it takes; or more than `most`."""
    least = sum(seq.prompt_len + seq.max_new for seq in scheduler.ledger.sequences.values())
    computed = step = 0
    while scheduler.has_work() and computed <= most * least:
        computed += sum(run_step(scheduler, now=step * 0.02, check=False).scheduled.values())
        step += 1
        assert step <= most * least, "steps without tokens"
    return computed / least


@settings(max_examples=6, deadline=None)
@example([True, False], 12, 128)
@example([False, True, True, True, False, True], 30, 64)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.sampled_from((0, 12, 30)), st.sampled_from((64, 128)))
def test_whatever_the_ways_the_same_victim_over_and_over_costs_a_bounded_amount_of_work(
    ways: list[bool], spare: int, lookahead: int
) -> None:
    assert work(long_outputs(ways, spare, lookahead, None), HARM) <= HARM


@pytest.mark.parametrize("ways", [[False], [False, False, True, False]], ids=["thrown away", "now and then swapped"])
def test_unwatched_it_costs_more(ways: list[bool]) -> None:
    assert work(long_outputs(ways, 30, 128, UNWATCHED), HARM) > HARM


SHAPES = ((8, 100), (8, 60), (9, 100), (12, 108), (16, 236))
"""Blocks of 16 in the pool, and tokens that each of 28 generates: two or less of them fit to their ends."""


def hostile(seed: int) -> ScriptedPreemption:
    """Victims in several orders, at random or mostly one of them, now swapped out and now thrown away."""
    random = Random(seed)
    orders = (
        lambda s, who: sorted(s.running, key=lambda r: r.arrival),
        lambda s, who: sorted(s.running, key=lambda r: -r.total),
        lambda s, who: sorted(s.running, key=lambda r: r.total),
        lambda s, who: sorted(s.running, key=lambda r: r.id != who.id),
        lambda s, who: random.sample(list(s.running), len(s.running)),
    )
    others = random.choice((0, 0, 1, 5))  # the oldest first, and nothing else, is the worst
    weights = [random.choice((1, 5, 50)), *(random.randint(0, others) for _ in orders[1:])]
    turns, share, tail = random.random() < 0.4, random.choice((0.0, 0.1, 0.5, 0.9)), random.random()
    times: dict[int, int] = {}

    def decide(s: Snapshot, who: RequestView, cause: Cause) -> Victims:
        order: list[RequestView] = random.choices(orders, weights)[0](s, who)
        times[order[0].id] = turn = times.get(order[0].id, 0) + 1
        swap = turn % 2 if turns else random.random() < share
        return Victims(
            order, how="swap" if swap else "recompute", requeue="tail" if random.random() < tail else "front"
        )

    return ScriptedPreemption(decide, lookahead=random.choice((1, 16, 64, 128)))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(SHAPES), st.sampled_from((0, 20, 1000)))
def test_hostile_victims_are_put_out_or_cost_a_bounded_amount_of_work(
    seed: int, shape: tuple[int, int], swap_blocks: int
) -> None:
    blocks, outputs = shape
    scheduler = crowd(
        preemption=hostile(seed),
        outputs=outputs,
        blocks=blocks,
        max_model_len=max(128, outputs + 20),
        swap_blocks=swap_blocks,
    )
    assert work(scheduler, TIMES) <= TIMES
    assert scheduler.ledger.count.finished == 28


# ---- what comes with kvyard -------------------------------------------------------------------------------------


def any_way(discipline: str, seed: int) -> PolicySet:
    """A discipline whose victims are swapped out or thrown away at random, or in turns."""
    policies, random = disciplines.make(discipline), Random(seed)
    victims, share, calls = policies.preemption.victims, random.choice((0.2, 0.5, 0.8, 1.0)), count()
    turns = random.random() < 0.3

    def decide(s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        swap = next(calls) % 2 if turns else random.random() < share
        return victims(s, short, who, cause)._replace(how="swap" if swap else "recompute")

    policies.preemption.victims = decide  # type: ignore[method-assign]  # the policy stays the one that is installed
    return policies


@pytest.mark.parametrize("discipline", disciplines.names())
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_no_mixture_of_ways_brings_a_discipline_near_the_limit(discipline: str, seed: int) -> None:
    scheduler = serve(any_way(discipline, seed), seed, FAR_BELOW)
    assert blamed(scheduler) == []


@pytest.mark.parametrize("discipline", ["least-recompute", "recompute-or-swap", "vllm"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_nor_do_long_prompts_in_small_chunks(discipline: str, seed: int) -> None:
    """Where who has the least in KV gives way, a long prompt gives way often before it is through."""
    random = Random(seed)
    size, longest = random.choice((1, 4, 16)), random.choice((128, 256))
    made = limits(
        blocks=-(-longest // size) * random.choice((1, 2, 3)) + random.choice((0, 1, 3)),
        block_size=size,
        max_running=random.choice((4, 8, 32)),
        max_step_tokens=random.choice((4, 8, 16, 64)),
        max_model_len=longest,
        swap_blocks=random.choice((0, 8, 50, 200)),
    )
    scheduler = Scheduler(made, any_way(discipline, seed), clock_ns=Clock(), conduct=FAR_BELOW)
    gap = random.choice((0.0, 0.02, 0.1))
    for id in range(1, 25):
        prompt = random.randint(longest // 2, longest - 20)
        scheduler.add(spec(id, prompt, random.randint(2, 18), arrived=gap * id))
    for step in range(400):
        if not scheduler.has_work():
            break
        run_step(scheduler, now=step * 0.02, check=False)
    assert blamed(scheduler) == []


def test_ways_are_mixed_in_those_pools() -> None:
    """The tests above are worth something only if many give way in them, either way."""
    ways = Counter[str]()
    for seed in range(20):
        made = limits(**SMALL, swap_blocks=20)
        scheduler = Scheduler(made, any_way("vllm", seed), clock_ns=Clock())
        for id in range(1, 15):
            scheduler.add(spec(id, prompt_len=20, max_new=60))
        for step in range(150):
            parts = step_parts(scheduler, now=step * 0.02)
            ways.update(preemption.how for preemption in parts.preempted)
    assert min(ways["swap"], ways["recompute"]) > 50
