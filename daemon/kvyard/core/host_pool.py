"""Blocks of the host pool, where preemption by swap keeps KV.

A step copies everything that goes out before anything that comes in, so a host block that is read in a
step must not be handed out in it: the scheduler gives such blocks back when the step is committed.
"""

from __future__ import annotations

from collections.abc import Sequence


class HostPool:
    """`blocks` host blocks numbered from 0."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that hold somebody's KV."""
        return self.blocks - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None when there are not as many."""
        if count > len(self._free):
            return None
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back; nobody reads them any more."""
        self._free += blocks
