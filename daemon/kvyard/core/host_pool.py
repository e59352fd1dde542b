"""Blocks of the host pool, where preemption by swap keeps KV.

A step copies everything that goes out before anything that comes in, so a host block that is read in a
step must not be handed out in it: `release` takes effect with `settle`, at the end of the step.
"""

from __future__ import annotations


class HostPool:
    """`blocks` host blocks numbered from 0."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._leaving: list[int] = []

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that hold somebody's KV, those released in this step included."""
        return self.blocks - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None when there are not as many."""
        if count > len(self._free):
            return None
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        return taken

    def release(self, blocks: list[int]) -> None:
        """Give blocks back at the end of the step."""
        self._leaving += blocks

    def settle(self) -> None:
        """The step's copies are done, or there is no step under way."""
        self._free += self._leaving
        self._leaving.clear()
