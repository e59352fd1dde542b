"""The step under way: what is left, what was placed, who came, who had to go, and why others wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvyard.core.plan import Admitted, BlockCopy, IntArray
from kvyard.core.sequence import SequenceState
from kvyard.link.record import Preemption


class StepState:
    """Reset at the start of a step; the snapshot shows `left`, `placed` and `preempted`."""

    def __init__(self, rows: int) -> None:
        self.rows: IntArray = np.zeros(rows, np.int64)
        """The plan's rows, of which the first `picks` are there."""
        self.picks = 0
        self.open(0)

    def open(self, budget: int) -> None:
        """A new step with `budget` tokens."""
        self.left = budget
        self.left_prompts = budget
        self.placed = 0
        """Sequences placed."""
        self.decodes = 0
        """Decodes placed."""
        self.stalled = 0
        """Sequences that could not grow and for whom nobody gave way."""
        self.picks = 0
        self.preempted: list[int] = []
        self.preemptions: list[Preemption] = []
        self.requeue: list[tuple[SequenceState, bool]] = []
        self.admitted: dict[SequenceState, Admitted] = {}
        self.withdrawals: dict[SequenceState, Sequence[int]] = {}
        """Admitted in this step, and the host blocks that each was read from."""
        self.copies_out: dict[SequenceState, BlockCopy] = {}
        self.copies_in: dict[SequenceState, BlockCopy] = {}
        self.forks: dict[SequenceState, BlockCopy] = {}
        self.fresh: dict[SequenceState, int] = {}
        """Who published blocks in this step, and how many it had published before."""
        self.refused: list[SequenceState] = []
        self.queue_reason = ""
        self.wake = -1

    def pick(self, row: int) -> None:
        """One more row of the plan."""
        self.rows[self.picks] = row
        self.picks += 1

    def pick_all(self, rows: IntArray) -> None:
        """More rows of the plan, in order."""
        end = self.picks + len(rows)
        self.rows[self.picks : end] = rows
        self.picks = end

    def picked(self) -> IntArray:
        """Rows in the order of scheduling; victims placed before are still among them."""
        return self.rows[: self.picks].copy()
