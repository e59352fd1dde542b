"""Most decisions are valid here; taken together they do harm, or would if the core did not dispose."""

from collections.abc import Sequence

from kvyard.policy import (
    Admission,
    Cause,
    Discipline,
    PreemptionPolicy,
    PrefillPolicy,
    RequestView,
    Snapshot,
    Victims,
)

from kvyard_faulty.trigger import FaultyAdmission


class OverCommits(FaultyAdmission):
    """Promises each request a thousand times the room that there is."""

    def fault(self, s: Snapshot) -> Admission:
        return Admission([(r, 1000 * s.blocks * s.block_size) for r in s.waiting])


class Nobody(FaultyAdmission):
    """Admits nobody any more, and declares no wake-up."""

    met = False

    def admit(self, s: Snapshot) -> Admission:
        self.met = self.met or (len(s.running) >= self.params.running and len(s.waiting) >= self.params.waiting)
        return Admission() if self.met else Admission(s.waiting)


class Everybody(FaultyAdmission):
    """Admits everybody, whatever is free, and takes the room from those that run, if their policy lets it."""

    def admit(self, s: Snapshot) -> Admission:
        return Admission([(r, 1) for r in s.waiting], skip=1000, evict=True)


class Starves(FaultyAdmission):
    """Passes one request over for ever."""

    victim: int | None = None

    def admit(self, s: Snapshot) -> Admission:
        if self.victim is None and len(s.waiting) >= self.params.waiting:
            self.victim = next(iter(s.waiting)).id
        return Admission([r for r in s.waiting if r.id != self.victim])


class Obliging(PreemptionPolicy):
    """Lets whoever waits put out the last that came in. No fault by itself: who may evict is for admission to say."""

    api = (1, 0)

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        return Victims(reversed(s.running))


class SameVictim(PreemptionPolicy):
    """Puts out the first that came, always, and finds blocks short in almost every step."""

    api = (1, 0)
    lookahead = 64

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        return Victims(sorted(s.running, key=lambda r: r.arrival))


class Cycle(PreemptionPolicy):
    """Puts out the two that came first in turn, each for the other and both for the rest."""

    api = (1, 0)
    lookahead = 64
    turn = 0

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        self.turn += 1
        first, *others = sorted(s.running, key=lambda r: r.arrival)
        return Victims([first, *others] if self.turn % 2 else [*others, first])


class OverBudget(PrefillPolicy):
    """Grants each prompt a thousand times the budget."""

    api = (1, 0)

    def divide(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> list[int]:
        return [1000 * s.budget] * len(prompts)


class FaultyDiscipline(Discipline):
    """A faulty part takes its whole discipline with it."""

    api = (1, 0)
    doc = "A faulty admission among good parts"
    parts = {"admission": ("faulty-raises", {}), "preemption": ("vllm", {}), "prefill": ("vllm", {})}
