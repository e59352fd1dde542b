"""A model of the KV cache that knows what every place must hold, and checks each plan against it.

Every place of a block holds a number that stands for the tenant, the salt and all tokens up to that place. A
plan is executed as the engine does it: copies out, copies in, then all writes, then all reads. If a sequence
ever reads a place that was not written for exactly its own prefix, the check fails. This covers the prefix
cache, swap, preemption, undone steps and reused rows alike.
"""

from __future__ import annotations

from random import Random

import numpy as np
from kvyard.core.plan import Limits, Plan
from kvyard.core.scheduler import Scheduler

MODULUS = (1 << 61) - 1


class KvModel:
    """Device and host pools with known contents."""

    def __init__(self, limits: Limits) -> None:
        self.size = limits.block_size
        self.device = np.zeros((limits.blocks, self.size), np.int64)
        self.host = np.zeros((limits.swap_blocks, self.size), np.int64)

    def run(self, scheduler: Scheduler, plan: Plan) -> None:
        """Execute a plan and check everything that it reads."""
        self.copy(plan)
        owners = [scheduler.ledger.cols.owner_of(slot) for slot in plan.slots.tolist()]
        marks = []
        for row, seq in enumerate(owners):
            upto = int(plan.computed[row] + plan.granted[row])
            marks.append(self.marks(seq.tenant, plan.tokens[plan.slots[row], :upto]))
        for row, mark in enumerate(marks):
            for place in range(int(plan.computed[row]), len(mark)):
                self.device[self.place(plan, row, place)] = mark[place]
        for row, (seq, mark) in enumerate(zip(owners, marks, strict=True)):
            for place, value in enumerate(mark):
                assert self.device[self.place(plan, row, place)] == value, f"sequence {seq.id} reads foreign KV"

    def fail(self, plan: Plan, random: Random) -> None:
        """A step that fails somewhere: perhaps some copies were made, perhaps garbage was written."""
        if random.random() < 0.5:
            self.copy(plan)
        if random.random() < 0.5:
            for row in range(len(plan)):
                for place in range(int(plan.computed[row]), int(plan.computed[row] + plan.granted[row])):
                    self.device[self.place(plan, row, place)] = -1

    def copy(self, plan: Plan) -> None:
        """The copies of a plan, in its order: all that goes out, then copies within, then all that comes in."""
        ends = {"out": (self.device, self.host), "copy": (self.device, self.device), "in": (self.host, self.device)}
        assert [copy.direction for copy in plan.copies] == sorted(
            (copy.direction for copy in plan.copies), key=list(ends).index
        )
        for copy in plan.copies:
            source, target = ends[copy.direction]
            target[copy.target] = source[copy.source]

    def place(self, plan: Plan, row: int, position: int) -> tuple[int, int]:
        return int(plan.tables[plan.slots[row], position // self.size]), position % self.size

    @staticmethod
    def marks(tenant: str, tokens: np.typing.NDArray[np.int32]) -> list[int]:
        mark, out = sum(tenant.encode()) + 1, []
        for token in tokens.tolist():
            mark = (mark * 1_000_003 + token + 1) % MODULUS
            out.append(mark)
        return out
