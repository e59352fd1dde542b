"""Who was passed over for too long: for orders in which something can always come before somebody.

A debt or a deadline that others are always ahead of is no reason to wait for ever. The oldest that waits is looked
for now and then, since a long queue is walked for it: whoever it is comes next once enough others came in since, so
that with n older ones waiting nobody sees more than n + 1 times so many come in.
"""

from __future__ import annotations

from itertools import islice
from operator import attrgetter

from kvyard.policy import RequestView, Snapshot

PASSES = 256
"""Admissions of others while it is the oldest that waits."""
LONGEST = 120.0
"""Seconds for which it is the oldest that waits while any other comes in."""
LOOK_EVERY = 32
"""Admissions between two looks; or a quarter of the longest wait."""
LOOKED_AT = 10_000
"""Waiting requests that are walked: about a millisecond."""


class PassedOver:
    """Keeps count of what comes in before the oldest that waits."""

    def __init__(self) -> None:
        self._stint = (-1, 0)
        """Arrival number and preemptions of the oldest, at the last look."""
        self._since = (0, 0.0)
        """Admissions and time when it was first seen as the oldest."""
        self._looked = (-LOOK_EVERY, 0.0)
        """Admissions and time at the last look."""
        self._due = False

    def due(self, s: Snapshot) -> RequestView | None:
        """Who comes next whatever the order says, until it has come in; mostly nobody. Asked once in a step."""
        admitted, now = s.count.admitted, s.now
        if not self._due and admitted - self._looked[0] < LOOK_EVERY and now - self._looked[1] < LONGEST / 4:
            return None
        self._looked = (admitted, now)
        oldest = min(islice(s.waiting, LOOKED_AT), key=attrgetter("arrival"), default=None)
        if oldest is None:
            self._due = False
            return None
        if (oldest.arrival, oldest.preemptions) != self._stint:
            self._stint, self._since = (oldest.arrival, oldest.preemptions), (admitted, now)
        passed = admitted - self._since[0]
        self._due = passed >= PASSES or (passed > 0 and now - self._since[1] >= LONGEST)
        return oldest if self._due else None
