"""The waiting queue: in the order of arrival, or in the order of the admission policy's key.

The order of arrival is that of the sequences' places: numbers that count upwards at its end, and downwards in front
for those that are put there. Keys are evaluated when a sequence joins, never per step. A new order over a long queue
is built beside the old one in slices (`Reorder`) and put in its place when it is complete: no step pays for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Any

from kvyard.core.guard import Fault
from kvyard.core.sequence import SequenceState
from kvyard.policy.base import OrderKey

Key = OrderKey | float
"""What the policy's method returned, or the sum that it declares; never both in one queue."""
KeysOf = Callable[[Sequence[SequenceState]], Sequence[Key]]
"""Asks for many at once: a call through the guard costs more than a key."""
Rank = Key
"""What orders the queue: the key, or without one the place."""
AT_ONCE = 64
"""Keys asked for in one call, so that no call takes long."""
BUCKET = 512
"""Sequences of a bucket before it is split: small enough to shift, large enough to have few buckets."""


_LAST = itemgetter(-1)
_PLACE = attrgetter("place")
_ARRIVAL = attrgetter("arrival")


def _last_arrival(bucket: list[SequenceState]) -> int:
    return bucket[-1].arrival


class SortedEntries:
    """Sequences by rank, those of one rank by arrival, in buckets: joining and leaving cost the same at any length.

    Ranks and sequences stand in lists of their own: a pair for each would be one more object to wait, and cold
    when its turn comes.
    """

    def __init__(self) -> None:
        self._ranks: list[list[Any]] = []  # of one type in one queue, which the type of a list cannot say
        self._seqs: list[list[SequenceState]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[SequenceState]:
        return chain.from_iterable(self._seqs)

    def _bucket(self, rank: Any, arrival: int) -> int:  # noqa: ANN401 - see `_ranks`
        """Index of the first bucket that ends with this entry or a later one; the last one if none does."""
        ranks, last = self._ranks, len(self._ranks) - 1
        at = bisect_left(ranks, rank, hi=last, key=_LAST)
        if at < last and ranks[at][-1] == rank:
            equal = bisect_right(ranks, rank, lo=at, hi=last, key=_LAST)
            at = bisect_left(self._seqs, arrival, lo=at, hi=equal, key=_last_arrival)
        return at

    def _index(self, at: int, rank: Any, arrival: int) -> int:  # noqa: ANN401 - see `_ranks`
        """Where in that bucket the entry stands or would stand."""
        ranks = self._ranks[at]
        index = bisect_left(ranks, rank)
        if index < len(ranks) and ranks[index] == rank:
            index = bisect_left(self._seqs[at], arrival, lo=index, hi=bisect_right(ranks, rank), key=_ARRIVAL)
        return index

    def add(self, rank: Rank, seq: SequenceState) -> None:
        """Insert in order; rank and arrival number together are unique."""
        self._size += 1
        if not self._ranks:
            self._ranks.append([rank])
            self._seqs.append([seq])
            return
        at, arrival = len(self._ranks) - 1, seq.arrival
        ranks, seqs = self._ranks[at], self._seqs[at]
        last = ranks[-1]
        if rank > last or (rank == last and arrival > seqs[-1].arrival):  # who comes last mostly stands last
            ranks.append(rank)
            seqs.append(seq)
        else:
            at = self._bucket(rank, arrival)
            ranks, seqs = self._ranks[at], self._seqs[at]
            index = self._index(at, rank, arrival)
            ranks.insert(index, rank)
            seqs.insert(index, seq)
        if len(ranks) > BUCKET:
            half = BUCKET // 2
            self._ranks[at : at + 1] = [ranks[:half], ranks[half:]]
            self._seqs[at : at + 1] = [seqs[:half], seqs[half:]]

    def remove(self, rank: Rank, seq: SequenceState) -> None:
        """Raises KeyError when it is not there."""
        if not self._seqs:
            raise KeyError(seq.id)
        at = index = 0
        if self._seqs[0][0] is not seq:  # who leaves mostly stood first
            at = self._bucket(rank, seq.arrival)
            index = self._index(at, rank, seq.arrival)
            if index == len(self._seqs[at]) or self._seqs[at][index] is not seq:
                raise KeyError(seq.id)
        del self._ranks[at][index], self._seqs[at][index]
        self._size -= 1
        if not self._seqs[at]:
            del self._ranks[at], self._seqs[at]


class WaitingQueue:
    """Who waits, in which order."""

    def __init__(self, keys_of: KeysOf | None = None) -> None:
        self._keys_of = keys_of
        self._entries = SortedEntries()
        self._fresh: dict[SequenceState, None] = {}
        """Arrived since the last `settle`, their keys not yet asked for."""
        self._reorder: Reorder | None = None
        self._first = self._last = 0
        """Places in the order of arrival given so far, at both ends: who is put in front has one below 0."""

    def __len__(self) -> int:
        return len(self._entries) + len(self._fresh)

    def __iter__(self) -> Iterator[SequenceState]:
        """In order; those that came since the last `settle` stand at the end."""
        return chain(self._entries, self._fresh) if self._fresh else iter(self._entries)

    @property
    def keyed(self) -> bool:
        """A key decides, not the order of arrival."""
        return self._keys_of is not None

    def arrive(self, seq: SequenceState) -> None:
        """A new sequence; its key is asked for at the next `settle`, where policy code may run."""
        # One object for all three, and the arrival's own while nobody was put at the end again: of a hundred thousand
        # that wait, each object counts in the processor's caches.
        place = seq.number = seq.lined_up = seq.place = self._last = max(seq.arrival, self._last + 1)
        if self._keys_of is None and self._reorder is None:
            self._entries.add(place, seq)
        else:
            self._fresh[seq] = None

    @property
    def unsettled(self) -> int:
        """Sequences whose keys are not yet asked for."""
        return len(self._fresh)

    def settle(self) -> None:
        """Put those that arrived in their places. Whatever the key raises passes through, nothing lost."""
        fresh = self._fresh
        while fresh:
            seqs = list(islice(fresh, AT_ONCE))
            self._join(seqs)
            if len(seqs) == len(fresh):
                fresh.clear()
            else:
                for seq in seqs:
                    del fresh[seq]

    def requeue(self, seq: SequenceState, *, front: bool) -> None:
        """A sequence that ran waits again; a key overrules `front`."""
        if front:
            seq.place = self._first = self._first - 1
        else:
            seq.lined_up = seq.place = self._last = self._last + 1
        self._join([seq])

    def _join(self, seqs: list[SequenceState]) -> None:
        add = self._entries.add
        if self._keys_of is None:
            for seq in seqs:
                add(seq.place, seq)
        else:
            for seq, key in zip(seqs, self._keys_of(seqs), strict=True):
                seq.key = key
                add(key, seq)
        if self._reorder is not None:
            self._reorder.add(seqs)

    def remove(self, seq: SequenceState) -> None:
        """Take a sequence out: it was admitted or it ended. Raises KeyError when it does not wait."""
        fresh = self._fresh
        if fresh and seq in fresh:
            del fresh[seq]
            return
        try:
            self._entries.remove(seq.place if self._keys_of is None else seq.key, seq)
        except TypeError:  # one that does not wait has no key
            raise KeyError(seq.id) from None
        seq.key = ()  # now, while it is at hand
        if self._reorder is not None:
            self._reorder.discard(seq)

    def reorder(self, keys_of: KeysOf | None) -> Reorder:
        """Begin a new order beside the present one; `adopt` puts it in place."""
        waiting = list(self._entries)
        if self._keys_of is not None:
            # Keys are asked for in the order of arrival: those of a policy with state depend on who was asked before.
            # Others are placed in half of the time, since who arrived later mostly stands behind.
            waiting.sort(key=_PLACE)
        self._reorder = Reorder(keys_of, waiting)
        return self._reorder

    def abandon_reorder(self) -> None:
        """The change was called off; the present order stands."""
        self._reorder = None

    @property
    def reordering(self) -> Reorder | None:
        """The new order in the making."""
        return self._reorder

    def adopt(self, built: Reorder) -> None:
        """Put a complete new order in place."""
        if not built.complete:
            raise RuntimeError("the new order is not complete")
        self._reorder = None
        self._keys_of = built.keys_of
        self._entries = built.entries
        for seq, rank in built.placed.items():
            seq.key = () if built.keys_of is None else rank


class Reorder:
    """A new order of the queue in the making."""

    def __init__(self, keys_of: KeysOf | None, waiting: list[SequenceState]) -> None:
        """`waiting` are those that are in the queue now, in the order of arrival."""
        self.keys_of = keys_of
        self.fault: Fault | None = None
        """The candidate's key failed: the order cannot be completed, and nobody else is harmed."""
        self.placed: dict[SequenceState, Rank] = {}
        self.entries = SortedEntries()
        self._waiting = waiting
        self._seen = 0
        """Of `waiting`, how many had their turn."""
        self._left: set[SequenceState] = set()
        """Those that left the queue in the meantime; whoever of them came back was placed then."""

    @property
    def complete(self) -> bool:
        """Every waiting sequence has its place."""
        return self._seen == len(self._waiting) and self.fault is None

    def advance(self, count: int) -> None:
        """Place up to `count` more; see `fault`."""
        while count > 0 and self._seen < len(self._waiting) and self.fault is None:
            seqs = self._waiting[self._seen : self._seen + min(count, AT_ONCE)]
            self.add([seq for seq in seqs if seq not in self._left])
            self._seen += len(seqs)
            count -= len(seqs)

    def add(self, seqs: list[SequenceState]) -> None:
        """Place sequences: those of the queue, or ones that joined in the meantime."""
        if self.fault is not None:
            return
        if self.keys_of is None:
            ranks: Sequence[Rank] = [seq.place for seq in seqs]
        else:
            try:
                ranks = self.keys_of(seqs)
            except Fault as fault:
                self.fault = fault
                return
        for seq, rank in zip(seqs, ranks, strict=True):
            self.placed[seq] = rank
            self.entries.add(rank, seq)

    def discard(self, seq: SequenceState) -> None:
        """A sequence left the queue in the meantime."""
        self._left.add(seq)
        rank = self.placed.pop(seq, None)
        if rank is not None:
            self.entries.remove(rank, seq)
