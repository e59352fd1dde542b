"""What happened to each request of a simulation, in columns indexed by request number (1 is the first)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvyard.core.journal import RecordParts
from kvyard.core.plan import IntArray, Plan
from kvyard.sim.arrivals import Arrival

FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True)
class Load:
    """Sums over virtual time, for means."""

    seconds: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    blocks: float = 0.0
    most_waiting: int = 0


class Observer:
    """Takes in what every step did. Times in seconds of virtual time; NaN where it did not happen."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        rows = len(arrivals) + 1
        self.arrived: FloatArray = np.array([np.nan, *(arrival.at for arrival in arrivals)])
        self.admitted, self.first, self.last, self.finished = (np.full(rows, np.nan) for _ in range(4))
        self.worst_gap: FloatArray = np.zeros(rows)
        """Longest time from one output token to the next."""
        self.tokens, self.preemptions, self.recomputed, self.cached = (np.zeros(rows, np.int64) for _ in range(4))
        self.furthest: IntArray = np.zeros(rows, np.int64)
        """Most tokens whose KV was ever there."""
        self.swaps = 0
        self.ended = 0
        self.load_sums = Load()
        self.refusals: dict[int, str] = {}
        self._gaps: list[FloatArray] = []
        self._gap_ids: list[IntArray] = []

    def rejected(self, id: int, text: str) -> None:
        """A request was ended without an answer."""
        self.refusals[id] = text
        self.ended += 1

    def moved(self, plan: Plan, parts: RecordParts, now: float) -> None:
        """Admissions and preemptions of a step that starts at `now`."""
        for entry in plan.admitted:
            if np.isnan(self.admitted[entry.id]):
                self.admitted[entry.id] = now
                self.cached[entry.id] = entry.cached
        for preemption in parts.preempted:
            self.preemptions[preemption.id] += 1
            self.swaps += preemption.how == "swap"

    def computed(self, plan: Plan) -> None:
        """What the step computes, and what of it had been computed before."""
        upto = plan.computed + plan.granted
        furthest = self.furthest[plan.ids]
        self.recomputed[plan.ids] += np.maximum(0, np.minimum(furthest, upto) - plan.computed)
        self.furthest[plan.ids] = np.maximum(furthest, upto)

    def sampled(self, ids: IntArray, finished: list[int], now: float) -> None:
        """Output tokens that came at `now`."""
        before = self.last[ids]
        gaps = now - before
        later = ~np.isnan(before)
        self.first[ids[~later]] = now
        self._gaps.append(gaps[later])
        self._gap_ids.append(ids[later])
        self.worst_gap[ids[later]] = np.maximum(self.worst_gap[ids[later]], gaps[later])
        self.last[ids] = now
        self.tokens[ids] += 1
        self.finished[finished] = now
        self.ended += len(finished)

    def load(self, started: float, spent: float, running: int, waiting: int, blocks: int) -> None:
        """How much there was during a step."""
        sums = self.load_sums
        sums.seconds += spent
        sums.running += running * spent
        sums.waiting += waiting * spent
        sums.blocks += blocks * spent
        sums.most_waiting = max(sums.most_waiting, waiting)

    def gaps(self, most_id: int | None = None) -> FloatArray:
        """Times from one output token to the next, of all requests or of those up to `most_id`."""
        if not self._gaps:
            return np.zeros(0)
        gaps = np.concatenate(self._gaps)
        return gaps if most_id is None else gaps[np.concatenate(self._gap_ids) <= most_id]
