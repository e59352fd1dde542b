"""What a policy that learns has to keep: who ended, what was served, who was overtaken, how long outputs are.

Each is state of the policy that owns it, bounded, and fed by nothing but the snapshots that the policy is asked with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvyard.policy.snapshot import Ended, IntColumn, Snapshot

LOOKED_AT = 256
"""Waiting sequences, from the queue's head on, among which preempted ones are looked for."""


class Ends:
    """The sequences that ran to their end since the last look."""

    def __init__(self) -> None:
        self._last = -1

    def since(self, s: Snapshot) -> list[Ended]:
        """Newest first; of more than the snapshot remembers, those that it does."""
        news = list(takewhile(lambda ended: ended.id != self._last, reversed(s.ended)))
        self._last = s.ended[-1].id if s.ended else -1
        return news


class Progress(NamedTuple):
    """What a sequence was given since the last look; what is computed again after a preemption is not."""

    tenant: str
    prompt: int
    """Prompt tokens: all of them when it is seen for the first time, 0 afterwards."""
    output: int
    """Output tokens."""


class Served:
    """What each sequence was given since the last look: the ground of shares, quotas and bills."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, int]] = {}
        """Tenant and output tokens told so far of each sequence under way."""
        self._ends = Ends()

    def __len__(self) -> int:
        """Sequences that are remembered."""
        return len(self._known)

    def since(self, s: Snapshot) -> list[Progress]:
        """Of those that ended, then of those that run; nothing of those that were given nothing."""
        news = []
        for e in self._ends.since(s):
            news.append(self._told(e.id, e.tenant, e.prompt_len, e.generated))
            del self._known[e.id]
        for r, id, generated in zip(s.running, s.cols.id.tolist(), s.cols.generated.tolist(), strict=True):
            known = self._known.get(id)
            if known is None:
                news.append(self._told(id, r.tenant, r.prompt_len, generated))
            elif known[1] != generated:
                news.append(self._told(id, known[0], 0, generated))
        if len(self._known) > 4 * s.max_running + LOOKED_AT:  # cancelled ones never end
            there = {r.id for r in (*s.running, *islice(s.waiting, LOOKED_AT))}
            self._known = {id: known for id, known in self._known.items() if id in there}
        return news

    def _told(self, id: int, tenant: str, prompt: int, generated: int) -> Progress:
        known = self._known.get(id)
        self._known[id] = (tenant, generated)
        return Progress(tenant, prompt, generated) if known is None else Progress(tenant, 0, generated - known[1])


class Overtaken:
    """Who waits while others come in: for a policy that sorts the queue by what changes, so that nobody starves."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        """Admissions so far when each waiting sequence was first seen, by id."""

    def by(self, s: Snapshot, most: int) -> set[int]:
        """Ids of the waiting that saw `most` others or more come in since they were first seen. Walks all of them."""
        admitted = s.count.admitted
        self._seen = {r.id: self._seen.get(r.id, admitted) for r in s.waiting}
        return {id for id, then in self._seen.items() if admitted - then >= most}


class Lengths:
    """The distribution of the last `memory` lengths seen."""

    def __init__(self, memory: int) -> None:
        self._seen: deque[int] = deque(maxlen=memory)
        self._sorted: IntColumn = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def seen(self) -> list[int]:
        """Oldest first."""
        return list(self._seen)

    def learn(self, lengths: Iterable[int]) -> None:
        """See these, oldest first."""
        self._seen.extend(lengths)
        self._sorted = np.sort(np.array(self._seen, np.int64))

    def beyond(self, share: float, so_far: IntColumn, most: IntColumn) -> IntColumn:
        """The `share` quantile, 0 to 1, of the lengths above each of `so_far`, and at most `most`.

        `most` itself where nothing seen was as long: whatever it may still take.
        """
        if not len(self):
            return most
        known = self._sorted
        first = np.searchsorted(known, so_far, side="right")
        longer = len(known) - first
        rank: npt.NDArray[np.int64] = first + np.ceil(share * longer).astype(np.int64) - 1
        found = np.where(longer > 0, known[np.clip(rank, first, len(known) - 1)], most)
        return np.minimum(found, most)
