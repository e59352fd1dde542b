"""Policies that decide at random, but legally: whatever they do, the core must keep its promises."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvyard.core.advice import PolicySet
from kvyard.policy import (
    ADMIT,
    DECODE,
    PROMPT,
    RUNNING,
    Admission,
    AdmissionPolicy,
    Cause,
    OrderKey,
    PreemptionPolicy,
    PrefillPolicy,
    RequestView,
    Shape,
    Snapshot,
    Victims,
    nobody,
)

GROUPS = (
    ((RUNNING, ADMIT),),
    ((DECODE, PROMPT, ADMIT),),
    ((PROMPT, ADMIT), (DECODE,)),
    ((DECODE, ADMIT, PROMPT),),
    ((ADMIT, RUNNING),),
    ((ADMIT,), (RUNNING,)),
    ((ADMIT, PROMPT), (DECODE, ADMIT)),
    ((RUNNING,),),
)


class RandomAdmission(AdmissionPolicy):
    """Anybody, in any order, under any conditions."""

    name = "random"
    evicts = True

    def __init__(self, random: Random, keyed: bool) -> None:
        super().__init__()
        self.random = random
        if keyed:
            self.key = self.order

    def order(self, r: RequestView) -> OrderKey:
        return (r.priority, float(r.total % 7))

    def admit(self, s: Snapshot) -> Admission:
        random = self.random
        if random.random() < 0.1:
            return nobody("not now", wake=s.step + 1)
        entries: object = s.waiting
        if random.random() < 0.5:
            chosen = [r for r in s.waiting if random.random() < 0.7]
            random.shuffle(chosen)
            entries = (r if random.random() < 0.5 else (r, random.randrange(2 * r.kv_max)) for r in chosen)
        return Admission(
            entries,  # type: ignore[arg-type]  # one of two kinds of iterable
            keep=random.choice((0, 0, 1, s.blocks)),
            hold=random.random() < 0.3,
            skip=random.choice((0, 1, 5)),
            evict=random.random() < 0.4,
        )


class RandomPreemption(PreemptionPolicy):
    """Any victims, any way."""

    name = "random"

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.lookahead = random.choice((1, 1, 2, 9))  # type: ignore[misc]  # fixed for this object's life

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        random = self.random
        order = [r for r in s.running if random.random() < 0.8]
        random.shuffle(order)
        return Victims(
            iter(order),
            how=random.choice(("recompute", "swap")),
            requeue=random.choice(("front", "tail")),
            self_ends=random.random() < 0.5,
        )


class RandomPrefill(PrefillPolicy):
    """Any shape, any shares."""

    name = "random"

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random

    def shape(self, s: Snapshot) -> Shape:
        return Shape(self.random.choice(GROUPS), prompts=self.random.choice((None, None, 0, 3, s.budget * 2)))

    def divide(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> Sequence[int]:
        return [self.random.choice((0, 1, left, s.budget + left)) for _ in prompts]


def random_set(random: Random) -> PolicySet:
    """One random policy of each kind."""
    return PolicySet(RandomAdmission(random, random.random() < 0.5), RandomPreemption(random), RandomPrefill(random))
