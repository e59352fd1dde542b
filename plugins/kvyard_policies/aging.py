"""Priority that ages: urgent requests go first, and nobody waits for ever.

The order is `priority + aging * time of arrival`, lower first. A waiting request so gains `aging` priority
levels a second on those that come later, and the order among two requests never changes, so the queue needs
no sorting. The bound: a request of priority p can be overtaken only by requests of priority q < p that arrive
within `(p - q) / aging` seconds after it.
"""

from __future__ import annotations

import numpy as np
from kvyard.policy import (
    Admission,
    AdmissionPolicy,
    Cause,
    LinearKey,
    PolicyParams,
    PreemptionPolicy,
    RequestView,
    Snapshot,
    Victims,
    live,
    nobody,
)

AGING = 0.1


class AgingAdmission(AdmissionPolicy):
    """By priority with linear aging; the head of the queue is a barrier; urgent requests may take places."""

    name = "aging"
    evicts = True

    class Params(PolicyParams):
        """Aging, reserve and whether urgent requests may take a place."""

        aging: float = live(
            AGING,
            ge=0,
            le=1000,
            unit="priority levels per second",
            doc="0 is strict priority: the lowest may starve.",
        )
        watermark: float = live(0.01, ge=0, le=0.5, unit="of all blocks", doc="Blocks kept free while anything runs.")
        make_way: bool = live(
            True, doc="The head of the queue may preempt running requests that have a larger priority number."
        )

    params: Params

    @property
    def key(self) -> LinearKey:  # type: ignore[override]  # a constant is allowed in the place of the method
        """Priority, a level later for each `1 / aging` seconds of a later arrival."""
        return LinearKey(priority=1.0, arrived=self.params.aging)

    def admit(self, s: Snapshot) -> Admission:
        if s.preempted:
            return nobody("after a preemption")
        slots = s.slots
        keep = int(self.params.watermark * s.blocks) if slots < s.max_running else 0
        evict = self.params.make_way and self._head_must_push(s, slots, keep)
        if slots <= 0 and not evict:
            return nobody("slots")
        return Admission(s.waiting, keep, evict=evict)

    @staticmethod
    def _head_must_push(s: Snapshot, slots: int, keep: int) -> bool:
        """Whether the head of the queue finds no place or no blocks, and something runs that it could put out."""
        head = next(iter(s.waiting), None)
        if head is None or (slots > 0 and s.blocks_for(head.total) + keep <= s.free):
            return False
        return bool((s.cols.priority > head.priority).any())


class AgingPreemption(PreemptionPolicy):
    """The last in the order of priority with aging goes first, and computes again."""

    name = "aging"

    class Params(PolicyParams):
        """Aging; the same value as the admission policy's keeps one order for both."""

        aging: float = live(
            AGING,
            ge=0,
            le=1000,
            unit="priority levels per second",
            doc="As the admission policy's `aging`: with the same value both go by one order.",
        )

    params: Params

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        running, cols, aging = s.running, s.cols, self.params.aging
        key = cols.priority + aging * cols.arrived
        order = np.lexsort((cols.arrival, key))[::-1]
        if cause == "admission":
            # Only who is less urgent by its number and by its age: nobody is put out for an equal.
            mine = who.priority + aging * who.arrived
            order = order[((cols.priority > who.priority) & (key > mine))[order]]
        return Victims([running[i] for i in order.tolist()], self_ends=True)
