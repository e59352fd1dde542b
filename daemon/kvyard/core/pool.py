"""The block pool: which KV blocks are free, held, or free with content that can be reused.

The free blocks are handed out in a fixed order (vLLM's): first a stack of bare blocks, the last one freed
first, then the cached ones nobody holds, least recently used first. Of a sequence that leaves, the tail is
reused before the head, because the head is what others are likely to share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvyard.core.prefix import PrefixIndex


class BlockPool:
    """`blocks` KV blocks numbered from 0. Without an index nothing is shared and no reference is counted."""

    def __init__(self, blocks: int, index: PrefixIndex | None = None) -> None:
        self.blocks = blocks
        self.index = index
        self.refs = [0] * blocks if index is not None else []
        self._bare = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that can be taken now, cached ones that nobody holds included."""
        return len(self._bare) + len(self._idle)

    @property
    def free_cached(self) -> int:
        """How many of `free` hold reusable content."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return self.blocks - self.free

    def take(self, count: int) -> list[int]:
        """`count` blocks for one holder each; the caller has checked `free`."""
        bare = self._bare
        if count <= len(bare):
            taken = bare[: -count - 1 : -1]
            del bare[len(bare) - count :]
        else:
            taken = bare[::-1]
            bare.clear()
            taken += self._reclaim(count - len(taken))
        if self.index is not None:
            for block in taken:
                self.refs[block] = 1
        return taken

    def _reclaim(self, count: int) -> list[int]:
        """Cached blocks, the least recently used first; their content is forgotten."""
        if count > len(self._idle):
            raise RuntimeError(f"{count} blocks asked of a pool that has {len(self._idle)}")
        assert self.index is not None
        taken = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.index.forget(block)
        return taken

    def idle(self, hits: Iterable[int]) -> int:
        """How many of these cached blocks nobody holds: sharing them takes them out of `free`."""
        refs = self.refs
        return sum(not refs[block] for block in hits)

    def share(self, hits: Iterable[int]) -> None:
        """One more holder for each of these cached blocks."""
        refs = self.refs
        for block in hits:
            if not refs[block]:
                del self._idle[block]
            refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder less for each; `blocks` are in the order of the sequence's table."""
        if self.index is None:
            self._bare += blocks
            return
        refs, digests, bare = self.refs, self.index.digests, []
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block]:
                continue
            if digests[block] is None:
                bare.append(block)
            else:
                self._idle[block] = None
        self._bare += reversed(bare)

    def exclusive(self, blocks: list[int]) -> int:
        """How many of these blocks come free when their holder lets go of all of them."""
        if self.index is None:
            return len(blocks)
        refs = self.refs
        return sum(refs[block] == 1 for block in blocks)

    def audit(self, tables: Iterable[list[int]]) -> list[str]:
        """Every broken invariant in words, given the tables of all holders; empty when all is well."""
        held: dict[int, int] = {}
        for table in tables:
            for block in table:
                held[block] = held.get(block, 0) + 1
        free = [*self._bare, *self._idle]
        faults = []
        if len(set(free)) != len(free):
            faults.append("a block is free twice")
        if held.keys() & set(free):
            faults.append(f"blocks both held and free: {sorted(held.keys() & set(free))}")
        if len(free) + len(held) != self.blocks:
            faults.append(f"{self.blocks - len(free) - len(held)} blocks are neither held nor free")
        return faults + self._audit_references(held)

    def _audit_references(self, held: dict[int, int]) -> list[str]:
        if self.index is None:
            return ["a block has two holders"] if any(count > 1 for count in held.values()) else []
        faults = [
            f"block {block} counts {count} holders and has {held.get(block, 0)}"
            for block, count in enumerate(self.refs)
            if count != held.get(block, 0)
        ]
        if any(self.index.digests[block] is not None for block in self._bare):
            faults.append("a bare block has content")
        if any(self.index.digests[block] is None for block in self._idle):
            faults.append("a cached block has no content")
        return faults + self.index.audit()
