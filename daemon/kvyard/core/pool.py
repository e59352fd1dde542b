"""The block pool: which KV blocks are free, held, or free with content that can be reused.

The free blocks are handed out in a fixed order (vLLM's): first a stack of bare blocks, the last one freed
first, then the cached ones nobody holds, least recently used first. Of a sequence that leaves, the tail is
reused before the head, because the head is what others are likely to share.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvyard.core.loops import BARE, CACHED, DONE, NEWER, Blocks, release, release_rows, share, take
from kvyard.core.plan import IntArray, TokenArray
from kvyard.core.prefix import PrefixIndex


class BlockPool:
    """`blocks` KV blocks numbered from 0. Unless it caches, no block keeps content."""

    def __init__(self, blocks: int, *, cached: bool = False) -> None:
        self.blocks = blocks
        self.state = Blocks.of(blocks, cached=cached)
        """Changed here and by the compiled loops alone."""
        self.index = PrefixIndex(self.state) if cached else None
        """Which block holds which content."""
        # A memoryview gives an int in a third of the time that a numpy scalar takes.
        self._counts = memoryview(self.state.counts.data)

    @property
    def free(self) -> int:
        """Blocks that can be taken now, cached ones that nobody holds included."""
        return self._counts[BARE] + self._counts[CACHED]

    @property
    def free_cached(self) -> int:
        """How many of `free` hold reusable content."""
        return self._counts[CACHED]

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return self.blocks - self.free

    def take(self, count: int) -> list[int]:
        """`count` blocks for one holder each; the caller has checked `free`."""
        table = np.empty((1, count), np.int32)
        self.take_for(0, table, 0, count)
        taken: list[int] = table[0].tolist()
        return taken

    def take_for(self, row: int, tables: TokenArray, begin: int, end: int) -> None:
        """Put blocks for one holder each into a row of `tables` at these places; the caller has checked `free`."""
        if end - begin > self.free:
            raise RuntimeError(f"{end - begin} blocks asked of a pool that has {self.free}")
        take(self.state, tables, row, begin, end)

    def idle(self, hits: list[int]) -> int:
        """How many of these cached blocks nobody holds: sharing them takes them out of `free`."""
        return len(hits) - int(np.count_nonzero(self.state.holders[hits])) if hits else 0

    def share(self, hits: list[int]) -> None:
        """One more holder for each of these blocks: cached ones, or ones that somebody holds."""
        share(self.state, np.array(hits, np.int32))

    def release(self, blocks: list[int]) -> None:
        """One holder less for each; `blocks` are in the order of the sequence's table."""
        self._check(release(self.state, np.array(blocks, np.int32)))

    def release_rows(self, rows: IntArray, capacity: IntArray, tables: TokenArray, block_size: int) -> None:
        """`release` for the tables of these rows, which hold blocks for `capacity` tokens."""
        self._check(release_rows(self.state, rows, capacity, tables, block_size))

    @staticmethod
    def _check(fault: int) -> None:
        if fault != DONE:
            raise RuntimeError(f"block {fault} was given back although nobody holds it")

    def exclusive(self, blocks: list[int]) -> int:
        """How many of these blocks come free when their holder lets go of all of them."""
        return int(np.count_nonzero(self.state.holders[blocks] == 1)) if blocks else 0

    def _resting(self) -> list[int]:
        """The cached blocks that nobody holds, the oldest first."""
        newer = self.state.entries[:, NEWER].tolist()
        end, found = len(newer) - 1, list[int]()
        block = newer[end]
        while block != end and len(found) < end:
            found.append(block)
            block = newer[block]
        return found

    def audit(self, tables: Iterable[list[int]]) -> list[str]:
        """Every broken invariant in words, given the tables of all holders; empty when all is well."""
        held: dict[int, int] = {}
        for table in tables:
            for block in table:
                held[block] = held.get(block, 0) + 1
        bare, resting = self.state.stack[: self._counts[BARE]].tolist(), self._resting()
        free = {*bare, *resting}
        faults = []
        if len(free) != self.free:
            faults.append("a block is free twice")
        if held.keys() & free:
            faults.append(f"blocks both held and free: {sorted(held.keys() & free)}")
        if len(free) + len(held) != self.blocks:
            faults.append(f"{self.blocks - len(free) - len(held)} blocks are neither held nor free")
        counted = {block: count for block, count in enumerate(self.state.holders.tolist()) if count}
        faults += [
            f"block {block} counts {counted.get(block, 0)} holders and has {held.get(block, 0)}"
            for block in sorted(held.keys() | counted.keys())
            if held.get(block) != counted.get(block)
        ]
        return faults + self._audit_names(bare, resting)

    def _audit_names(self, bare: list[int], resting: list[int]) -> list[str]:
        if self.index is None:
            return ["a cached block without a cache"] if resting else []
        named, faults = self.state.named, []
        if named[bare].any():
            faults.append("a bare block has content")
        if not named[resting].all():
            faults.append("a cached block has no content")
        return faults + self.index.audit()
