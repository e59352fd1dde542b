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
    """`blocks` KV blocks numbered from 0. Without an index no block keeps content."""

    def __init__(self, blocks: int, index: PrefixIndex | None = None) -> None:
        self.blocks = blocks
        self.index = index
        self._shared: dict[int, int] = {}
        """Holders of the blocks that have several; few have, so taking and releasing need not count."""
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
        return taken

    def _reclaim(self, count: int) -> list[int]:
        """Cached blocks, the least recently used first; their content is forgotten."""
        if count > len(self._idle):
            raise RuntimeError(f"{count} blocks asked of a pool that has {len(self._idle)}")
        assert self.index is not None
        pop = self._idle.popitem
        taken = [pop(last=False)[0] for _ in range(count)]
        self.index.forget_all(taken)
        return taken

    def idle(self, hits: Iterable[int]) -> int:
        """How many of these cached blocks nobody holds: sharing them takes them out of `free`."""
        idle = self._idle
        return sum(block in idle for block in hits)

    def share(self, hits: Iterable[int]) -> None:
        """One more holder for each of these blocks: cached ones, or ones that somebody holds."""
        idle, shared = self._idle, self._shared
        for block in hits:
            if block in idle:
                del idle[block]
            else:
                shared[block] = shared.get(block, 1) + 1

    def release(self, blocks: list[int]) -> None:
        """One holder less for each; `blocks` are in the order of the sequence's table."""
        if self._shared and not self._shared.keys().isdisjoint(blocks):
            blocks = [block for block in blocks if self._let_go(block)]
        if self.index is None:
            self._bare += blocks
            return
        digests = self.index.digests
        bare = [block for block in blocks if digests[block] is None]
        if bare:
            blocks = [block for block in blocks if digests[block] is not None]
            self._bare += bare
        self._idle.update(dict.fromkeys(reversed(blocks)))

    def _let_go(self, block: int) -> bool:
        """One holder less for `block`; True when that was the last one."""
        count = self._shared.get(block)
        if count is None:
            return True
        if count == 2:
            del self._shared[block]
        else:
            self._shared[block] = count - 1
        return False

    def exclusive(self, blocks: list[int]) -> int:
        """How many of these blocks come free when their holder lets go of all of them."""
        shared = self._shared
        return len(blocks) - sum(block in shared for block in blocks) if shared else len(blocks)

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
        shared = {block: count for block, count in held.items() if count > 1}
        faults = [
            f"block {block} counts {self._shared.get(block, 1)} holders and has {held.get(block, 0)}"
            for block in sorted(shared.keys() | self._shared.keys())
            if shared.get(block) != self._shared.get(block)
        ]
        if self.index is None:
            return faults
        if any(self.index.digests[block] is not None for block in self._bare):
            faults.append("a bare block has content")
        if any(self.index.digests[block] is None for block in self._idle):
            faults.append("a cached block has no content")
        return faults + self.index.audit()
