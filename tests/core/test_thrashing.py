"""Who makes requests give way again and again, so that they get nowhere, is put out; a full pool puts nobody out."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from kvyard.core import conduct
from kvyard.core.conduct import ConductLimits
from kvyard.core.plan import Limits
from kvyard.core.policy_set import PolicySet
from kvyard.core.scheduler import NeverFits, Scheduler
from kvyard.link.record import Preemption
from kvyard.policy import Admission, AdmissionPolicy, Cause, PreemptionPolicy, RequestView, Snapshot, Victims
from kvyard.policy.registry import load
from kvyard.sim import disciplines

from tests.core.harness import Clock, limits, run_step, spec
from tests.core.scripted import ScriptedAdmission, ScriptedPreemption

LOOKAHEAD = 64
"""A preemption policy that wants so many steps' blocks to be there is asked in almost every step."""
SMALL = {"blocks": 8, "block_size": 16, "max_running": 8, "max_step_tokens": 64, "max_model_len": 128}
UNWATCHED = ConductLimits(thrashes=10**9, override_share=2.0)


def oldest_first(s: Snapshot, who: RequestView, cause: Cause) -> Victims:
    return Victims(sorted(s.running, key=lambda r: r.arrival))


def newest_first(s: Snapshot, who: RequestView, cause: Cause) -> Victims:
    return Victims(sorted(s.running, key=lambda r: -r.arrival))


def in_turn() -> Callable[[Snapshot, RequestView, Cause], Victims]:
    turn = 0

    def decide(s: Snapshot, who: RequestView, cause: Cause) -> Victims:
        nonlocal turn
        turn += 1
        first = turn % len(s.running)
        return Victims([*s.running[first:], *s.running[:first]])

    return decide


def last_admitted(s: Snapshot, who: RequestView, cause: Cause) -> Victims:
    """Whatever the cause: it lets anybody evict."""
    return Victims(reversed(s.running))


def everybody() -> ScriptedAdmission:
    return ScriptedAdmission(lambda s: Admission([(r, 1) for r in s.waiting], skip=1000, evict=True), evicts=True)


def crowd(
    admission: AdmissionPolicy | None = None,
    preemption: PreemptionPolicy | None = None,
    outputs: int = 100,
    watched: ConductLimits | None = None,
    count: int = 28,
    **changes: int,
) -> Scheduler:
    """`count` sequences that all come at once, and a pool in which two of them fit to their ends."""
    vllm = disciplines.make("vllm")
    policies = PolicySet(admission or vllm.admission, preemption or vllm.preemption, vllm.prefill)
    scheduler = Scheduler(limits(**{**SMALL, **changes}), policies, clock_ns=Clock(), conduct=watched)
    random = Random(1)
    for id in range(1, count + 1):
        scheduler.add(spec(id, prompt_len=random.randint(8, 12), max_new=outputs))
    return scheduler


def run(scheduler: Scheduler, most: int = 4000) -> bool:
    """Step until all have ended; False when that takes too long."""
    for step in range(most):
        if not scheduler.has_work():
            return True
        run_step(scheduler, now=step * 0.02, check=not step % 50)
    return False


def blamed(scheduler: Scheduler) -> list[tuple[str, str]]:
    return [(exit_.kind, exit_.code) for exit_ in scheduler.take_exits()]


# ---- who is put out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decide", [oldest_first, in_turn()], ids=["always the same", "in a circle"])
def test_victims_that_get_nowhere(decide: Callable[[Snapshot, RequestView, Cause], Victims]) -> None:
    preemption = ScriptedPreemption(decide, lookahead=240)
    scheduler = crowd(preemption=preemption, outputs=240, blocks=16, max_model_len=256)
    run(scheduler, most=1000)
    (exit_,) = scheduler.take_exits()
    assert (exit_.kind, exit_.name, exit_.code) == ("preemption", "scripted", "thrashing")
    assert "gave way to later ones 33 times" in exit_.message
    assert exit_.decisions[-1]["call"] == "victims"
    assert scheduler.ledger.count.finished > 0, "the built-in serves them"


def test_an_admission_that_evicts_for_everybody() -> None:
    scheduler = crowd(everybody(), ScriptedPreemption(last_admitted), outputs=60)
    assert run(scheduler)
    assert blamed(scheduler) == [("admission", "thrashing")]
    unwatched = crowd(everybody(), ScriptedPreemption(last_admitted), outputs=60, watched=UNWATCHED)
    assert not run(unwatched, most=1000)
    assert unwatched.ledger.count.preempted > 1000
    assert unwatched.ledger.count.finished == 0, "nobody gets anywhere: this is the harm"


def test_the_same_admission_does_no_harm_where_nobody_lets_it_evict() -> None:
    scheduler = crowd(everybody())
    assert run(scheduler)
    assert blamed(scheduler) == []


def test_what_comes_with_kvyard_is_not_blamed_for_the_policy_beside_it() -> None:
    """`next-step` lets sequences in without room for all they have, which alone would speak against it."""
    admission = load("admission", "next-step").policy
    assert isinstance(admission, AdmissionPolicy)
    scheduler = crowd(admission, ScriptedPreemption(oldest_first, LOOKAHEAD))
    assert run(scheduler)
    assert blamed(scheduler) == [("preemption", "thrashing")]


def test_letting_in_without_room_is_the_admissions_fault() -> None:
    cramped = ScriptedAdmission(lambda s: Admission([(r, 1) for r in s.waiting]))
    scheduler = crowd(cramped, ScriptedPreemption(oldest_first, LOOKAHEAD))
    assert run(scheduler)
    assert blamed(scheduler)[0] == ("admission", "thrashing")


# ---- who is not ------------------------------------------------------------------------------------------------


def test_giving_way_to_those_that_came_before_is_no_thrashing() -> None:
    """Nor is it when the admission lets them in over and over without room: the last to come waits either way."""
    cramped = ScriptedAdmission(lambda s: Admission([(r, 1) for r in s.waiting]))
    scheduler = crowd(cramped, ScriptedPreemption(newest_first, LOOKAHEAD))
    assert run(scheduler, most=10_000)
    assert blamed(scheduler) == []
    assert scheduler.ledger.count.preempted > 28 * 16


def test_giving_way_to_the_more_urgent_is_no_thrashing() -> None:
    """The first to come is the least urgent by its client's own number."""
    scheduler = crowd(preemption=ScriptedPreemption(oldest_first, LOOKAHEAD), outputs=1)
    assert run(scheduler)
    scheduler.add(spec(100, prompt_len=30, max_new=90, priority=1))
    for id in range(101, 160):
        scheduler.add(spec(id, prompt_len=12, max_new=60))
    assert run(scheduler, most=20_000)
    assert ("preemption", "thrashing") not in [
        (exit_.kind, exit_.code) for exit_ in scheduler.take_exits() if "sequence 100 " in exit_.message
    ]


def test_who_wins_enough_in_between_gets_there() -> None:
    scheduler = crowd(preemption=ScriptedPreemption(oldest_first), outputs=30)
    assert run(scheduler)
    assert blamed(scheduler) == []
    assert scheduler.ledger.count.preempted > 20


def test_who_keeps_what_it_computed_and_computes_on_gets_there() -> None:
    """Swapped out in the middle of its prompt, it goes on where it was: this pays without a token."""

    def first(s: Snapshot, who: RequestView, cause: Cause) -> Victims:
        return Victims(sorted(s.running, key=lambda r: r.arrival), how="swap")

    kept = crowd(preemption=ScriptedPreemption(first, LOOKAHEAD), outputs=20, max_step_tokens=16, swap_blocks=1000)
    kept.add(spec(0, prompt_len=100, max_new=2, arrived=0.0))
    assert run(kept)
    assert blamed(kept) == []


def alternating() -> Callable[[Snapshot, RequestView, Cause], Victims]:
    """Always the same victim, swapped out and thrown away in turns."""
    times: dict[int, int] = {}

    def decide(s: Snapshot, who: RequestView, cause: Cause) -> Victims:
        order = sorted(s.running, key=lambda r: r.arrival)
        times[order[0].id] = times.get(order[0].id, 0) + 1
        return Victims(order, how="swap" if times[order[0].id] % 2 else "recompute")

    return decide


@pytest.mark.parametrize(("lookahead", "outputs", "blocks"), [(240, 240, 16), (LOOKAHEAD, 100, 8)])
def test_what_is_kept_and_then_thrown_away_pays_nothing(lookahead: int, outputs: int, blocks: int) -> None:
    """Nor does the token that it wins each time before it is swapped out."""
    preemption = ScriptedPreemption(alternating(), lookahead=lookahead)
    scheduler = crowd(
        preemption=preemption, outputs=outputs, blocks=blocks, max_model_len=16 * blocks, swap_blocks=1000
    )
    run(scheduler, most=1000)
    assert blamed(scheduler) == [("preemption", "thrashing")]


def test_giving_way_before_it_had_anything_costs_nothing_and_pays_nothing() -> None:
    """Let in without tokens and put out in the same step, it lost nothing; the count of its losses stands."""
    scheduler = crowd(outputs=20)
    run_step(scheduler)
    watch = scheduler._conduct
    seq, by = scheduler.ledger.sequences[1], scheduler.ledger.sequences[9]
    for times in range(1, ConductLimits().thrashes):
        watch._weigh(seq, by, Preemption(1, 9, "growth", "recompute", 8))
        for how in ("recompute", "swap", "recompute"):
            watch._weigh(seq, by, Preemption(1, 9, "growth", how, 0))
        losses = watch._losses[1]
        assert (losses.times, losses.admissions, losses.free) == (times, 0, 3 * times)


def test_a_successor_starts_with_a_clean_slate() -> None:
    scheduler = crowd(preemption=ScriptedPreemption(oldest_first, LOOKAHEAD))
    worst = 0
    for step in range(4000):
        if not scheduler.has_work():
            break
        if not step % 20:  # none of them is in charge for so long that it could be blamed
            assert scheduler.swap({"preemption": ScriptedPreemption(oldest_first, LOOKAHEAD)}).ok
        run_step(scheduler, now=step * 0.02, check=False)
        worst = max([worst, *(row.preemptions for row in scheduler.request_rows(99))])
    assert worst > 2 * ConductLimits().thrashes
    assert blamed(scheduler) == []


def test_what_is_remembered_of_sequences_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "LOOK_EVERY", 4)
    met: set[int] = set()
    scheduler = crowd(preemption=ScriptedPreemption(oldest_first, 4), outputs=20)
    for round_ in range(1, 26):
        for id in range(1, 29):
            scheduler.add(spec(100 * round_ + id, prompt_len=10, max_new=20))
        assert run(scheduler)
        met |= set(scheduler._conduct._losses)
    assert len(met) > 100
    assert 0 < len(scheduler._conduct._losses) <= 2 * (28 + 4) + SMALL["max_running"]


# ---- full pools under what comes with kvyard -------------------------------------------------------------------

FAR_BELOW = ConductLimits(thrashes=ConductLimits().thrashes // 4, override_share=2.0, stall_s=1e9)
"""A quarter of the limit: what is expected of innocents stays far from it."""


def full_pool(seed: int) -> tuple[Limits, list[tuple[float, int, int, int]]]:
    """A pool of one to three of the longest sequences, and a load: time, prompt, output and priority of each."""
    random = Random(seed)
    size, longest = random.choice((1, 4, 16)), random.choice((32, 64, 128))
    blocks = -(-longest // size) * random.choice((1, 1, 2, 3)) + random.choice((0, 1, 3))
    made = limits(
        blocks=blocks,
        block_size=size,
        max_running=random.choice((4, 8, 32)),
        max_step_tokens=random.choice((3, 8, 16, 64)),
        max_model_len=longest,
        swap_blocks=random.choice((0, 8, 200)),
    )
    prompts = random.choice(((1, 8), (1, longest - 8), (longest // 2, longest - 8)))
    outputs = random.choice(((1, 8), (longest // 4, longest // 2), (longest // 2, longest)))
    gap, priorities = random.choice((0.0, 0.02, 0.2)), random.choice(((0,), (0, 1, 2)))
    load_ = [
        (gap * number, random.randint(*prompts), random.randint(*outputs), random.choice(priorities))
        for number in range(random.choice((10, 28)))
    ]
    return made, load_


def serve(discipline: str | PolicySet, seed: int, watched: ConductLimits) -> Scheduler:
    """Under `discipline`, with tenants and deadlines, for 400 steps at most."""
    made, load_ = full_pool(seed)
    policies = disciplines.make(discipline) if isinstance(discipline, str) else discipline
    scheduler = Scheduler(made, policies, clock_ns=Clock(), conduct=watched)
    random, now = Random(seed), 0.0
    for id, (at, prompt, output, priority) in enumerate(load_, 1):
        deadline = random.choice((None, at + 20 * random.random()))
        sequence = spec(
            id, prompt, output, priority=priority, arrived=at, tenant=random.choice("ab"), deadline=deadline
        )
        try:
            scheduler.add(sequence)
        except NeverFits:
            continue
    for _ in range(400):
        if not scheduler.has_work():
            break
        now += 0.02
        run_step(scheduler, now=now, check=False)
    return scheduler


@pytest.mark.parametrize("discipline", disciplines.names())
def test_a_full_pool_brings_no_discipline_near_the_limit(discipline: str) -> None:
    for seed in range(10):
        assert blamed(serve(discipline, seed, FAR_BELOW)) == [], f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("discipline", disciplines.names())
def test_no_full_pool_does(discipline: str) -> None:
    for seed in range(100, 300):
        assert blamed(serve(discipline, seed, FAR_BELOW)) == [], f"seed {seed}"


def test_those_pools_are_full() -> None:
    """The tests above are worth something only if many give way in them."""
    for discipline, least in (("vllm", 5), ("trtllm-max-utilization", 30)):
        assert sum(serve(discipline, seed, FAR_BELOW).ledger.count.preempted for seed in range(10)) > least
