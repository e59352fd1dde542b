"""The waiting queue: in the order of arrival, or in the order of the admission policy's key.

Keys are evaluated when a sequence joins, never per step. A new order over a long queue is built beside the
old one in slices (`Reorder`) and put in its place when it is complete, so that no step pays for it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter

from kvyard.core.guard import Fault
from kvyard.core.sequence import SequenceState
from kvyard.policy.base import OrderKey

KeysOf = Callable[[Sequence[SequenceState]], list[OrderKey]]
"""Asks for many at once: a call through the guard costs more than a key."""
Entry = tuple[OrderKey, int, SequenceState]
AT_ONCE = 64
"""Keys asked for in one call, so that no call takes long."""
BUCKET = 512
"""Entries of a bucket before it is split: small enough to shift, large enough to have few buckets."""


_LAST = itemgetter(-1)
_SEQUENCE: Callable[[Entry], SequenceState] = itemgetter(2)


class SortedEntries:
    """Sorted entries in buckets, so that joining and leaving cost the same at any length."""

    def __init__(self) -> None:
        self._buckets: list[list[Entry]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[SequenceState]:
        return map(_SEQUENCE, chain.from_iterable(self._buckets))

    def _place(self, entry: Entry) -> int:
        """Index of the bucket for `entry`."""
        return bisect_left(self._buckets, entry, hi=len(self._buckets) - 1, key=_LAST)

    def add(self, entry: Entry) -> None:
        """Insert in order; keys and arrival numbers together are unique."""
        self._size += 1
        buckets = self._buckets
        if not buckets:
            buckets.append([entry])
            return
        bucket, at = buckets[-1], len(buckets) - 1
        if entry > bucket[-1]:  # who comes last mostly stands last
            bucket.append(entry)
        else:
            at = self._place(entry)
            bucket = buckets[at]
            insort(bucket, entry)
        if len(bucket) > BUCKET:
            self._buckets[at : at + 1] = [bucket[: BUCKET // 2], bucket[BUCKET // 2 :]]

    def remove(self, entry: Entry) -> None:
        """Raises KeyError when it is not there."""
        if not self._buckets:
            raise KeyError(entry[2].id)
        bucket, at, index = self._buckets[0], 0, 0
        if bucket[0][2] is not entry[2]:  # who leaves mostly stood first
            at = self._place(entry)
            bucket = self._buckets[at]
            index = bisect_left(bucket, entry)
            if index == len(bucket) or bucket[index][2] is not entry[2]:
                raise KeyError(entry[2].id)
        del bucket[index]
        self._size -= 1
        if not bucket:
            del self._buckets[at]


class WaitingQueue:
    """Who waits, in which order."""

    def __init__(self, keys_of: KeysOf | None = None) -> None:
        self._keys_of = keys_of
        self._line: OrderedDict[SequenceState, None] = OrderedDict()
        """The order of arrival, requeued ones at either end; without a key this is the queue."""
        self._sorted: SortedEntries | None = SortedEntries() if keys_of else None
        self._fresh: dict[SequenceState, None] = {}
        """Arrived since the last `settle`, their keys not yet asked for."""
        self._reorder: Reorder | None = None

    def __len__(self) -> int:
        return len(self._line) + len(self._fresh)

    def __iter__(self) -> Iterator[SequenceState]:
        """In order; those that came since the last `settle` stand at the end."""
        settled: Iterator[SequenceState] = iter(self._line) if self._sorted is None else iter(self._sorted)
        return chain(settled, self._fresh) if self._fresh else settled

    @property
    def keyed(self) -> bool:
        """A key decides, not the order of arrival."""
        return self._sorted is not None

    def arrive(self, seq: SequenceState) -> None:
        """A new sequence; its key is asked for at the next `settle`, where policy code may run."""
        if self._sorted is None and self._reorder is None:
            self._line[seq] = None
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
        self._join([seq])
        if front:
            self._line.move_to_end(seq, last=False)

    def _join(self, seqs: list[SequenceState]) -> None:
        if self._sorted is not None and self._keys_of is not None:
            for seq, key in zip(seqs, self._keys_of(seqs), strict=True):
                seq.key = key
                self._sorted.add((key, seq.arrival, seq))
        for seq in seqs:
            self._line[seq] = None
        if self._reorder is not None:
            self._reorder.add(seqs)

    def remove(self, seq: SequenceState) -> None:
        """Take a sequence out: it was admitted or it ended. Raises KeyError when it does not wait."""
        if seq in self._fresh:
            del self._fresh[seq]
            return
        del self._line[seq]
        if self._sorted is not None:
            self._sorted.remove((seq.key, seq.arrival, seq))
        if self._reorder is not None:
            self._reorder.discard(seq)

    def reorder(self, keys_of: KeysOf | None) -> Reorder:
        """Begin a new order beside the present one; `adopt` puts it in place."""
        self._reorder = Reorder(keys_of, self._line)
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
        self._sorted = None
        if built.keys_of is not None:
            self._sorted = built.entries
            for seq, key in built.keys.items():
                seq.key = key


class Reorder:
    """A new order of the queue in the making."""

    def __init__(self, keys_of: KeysOf | None, line: OrderedDict[SequenceState, None]) -> None:
        self.keys_of = keys_of
        self.fault: Fault | None = None
        """The candidate's key failed: the order cannot be completed, and nobody else is harmed."""
        self.keys: dict[SequenceState, OrderKey] = {}
        self.entries = SortedEntries()
        self._todo: OrderedDict[SequenceState, None] = OrderedDict() if keys_of is None else OrderedDict(line)

    @property
    def complete(self) -> bool:
        """Every waiting sequence has its place."""
        return not self._todo and self.fault is None

    def advance(self, count: int) -> None:
        """Place up to `count` more; see `fault`."""
        while count > 0 and self._todo and self.fault is None:
            seqs = list(islice(self._todo, min(count, AT_ONCE)))
            self.add(seqs)
            count -= len(seqs)

    def add(self, seqs: list[SequenceState]) -> None:
        """Place sequences: those of the queue, or ones that joined in the meantime."""
        if self.keys_of is not None and self.fault is None:
            try:
                keys = self.keys_of(seqs)
            except Fault as fault:
                self.fault = fault
                return
            for seq, key in zip(seqs, keys, strict=True):
                self.keys[seq] = key
                self.entries.add((key, seq.arrival, seq))
        for seq in seqs:
            self._todo.pop(seq, None)

    def discard(self, seq: SequenceState) -> None:
        """A sequence left the queue in the meantime."""
        self._todo.pop(seq, None)
        key = self.keys.pop(seq, None)
        if key is not None:
            self.entries.remove((key, seq.arrival, seq))
