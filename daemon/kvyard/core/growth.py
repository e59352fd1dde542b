"""The phases of running sequences: walk them in order, grow them, and preempt where blocks are short.

Decoding sequences are walked in segments: one comparison over an array finds the first that cannot grow,
and everything before it is placed at once. Prompts are walked one by one.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from kvyard.core.advice import Advice
from kvyard.core.checks import PlainVictims
from kvyard.core.moves import Moves
from kvyard.core.plan import BoolArray, IntArray
from kvyard.core.sequence import SequenceState
from kvyard.policy.decisions import Phase


class Outcome(Enum):
    """What became of a sequence that was short of blocks."""

    FITS = "fits"
    LEFT_OUT = "left out"
    """It became its own victim, or nobody gave way."""
    PHASE_ENDS = "phase ends"


class Pressure:
    """The preemption policy's answer for one phase: asked once, handed out one victim at a time."""

    def __init__(self, moves: Moves, advice: Advice) -> None:
        self._moves = moves
        self._advice = advice
        self._answer: PlainVictims | None = None
        self._next = 0

    def make_room(self, who: SequenceState, blocks: int) -> Outcome:
        """Preempt until `blocks` are free for `who`."""
        pool = self._moves.ledger.pool
        while blocks > pool.free:
            if self._answer is None:
                self._answer = self._advice.victims(blocks - pool.free, who, "growth")
            victim = self._next_victim(self._answer)
            if victim is None:
                self._moves.step.stalled += 1
                return Outcome.LEFT_OUT
            answer = self._answer
            self._moves.preempt(victim, who, "growth", answer.how, answer.requeue == "front")
            if victim is who:
                return Outcome.PHASE_ENDS if answer.self_ends else Outcome.LEFT_OUT
        return Outcome.FITS

    def _next_victim(self, answer: PlainVictims) -> SequenceState | None:
        while self._next < len(answer.order):
            seq = answer.order[self._next]
            self._next += 1
            if self._moves.may_preempt(seq):
                return seq
            if seq.row >= 0:
                self._advice.guard.override("preemption", "needed-by-newcomer", blame=False)
        return None


class Growth:
    """Walks running sequences. Every walk returns False when its phase is over."""

    def __init__(self, moves: Moves, advice: Advice) -> None:
        self._moves = moves
        self._advice = advice
        self._ledger = moves.ledger
        self._step = moves.step

    def walk(self, phase: Phase) -> None:
        """One phase: RUNNING, DECODE or PROMPT."""
        ledger = self._ledger
        order = ledger.cols.order
        if self._step.placed:
            order = order[ledger.cols.granted[order] == 0]
        if not len(order) or self._step.left <= 0:
            return
        pressure = Pressure(self._moves, self._advice)
        if not ledger.prompts:
            if phase is not Phase.PROMPT:
                self._decodes(order, pressure)
            return
        is_prompt = ledger.cols.prompt[order]
        if phase is Phase.DECODE:
            self._decodes(order[~is_prompt], pressure)
            return
        at = np.flatnonzero(is_prompt)
        shares = self._divide(order[at])
        if phase is Phase.PROMPT:
            self._prompts(order[at], shares, pressure)
        else:
            self._mixed(order, at, shares, pressure)

    def _divide(self, rows: IntArray) -> list[int]:
        """The prefill policy's shares for these running prompts."""
        if not len(rows):
            return []
        owner = self._ledger.cols.owner_of
        views = [self._ledger.view(owner(row)) for row in rows.tolist()]
        return self._advice.divide(views, min(self._step.left, self._step.left_prompts))

    def force(self, rows: IntArray) -> None:
        """Give these running rows what is left, whatever the policies say; they are the core's choice."""
        pressure = Pressure(self._moves, self._advice)
        self._step.left_prompts = max(self._step.left_prompts, self._step.left)
        at = np.flatnonzero(self._ledger.cols.prompt[rows])
        self._mixed(rows, at, [self._step.left] * len(at), pressure)

    def _mixed(self, order: IntArray, at: IntArray, shares: list[int], pressure: Pressure) -> None:
        """Decodes in segments between the prompts, which stand at `at`."""
        start = 0
        for position, share in zip(at.tolist(), shares, strict=True):
            if position > start and not self._decodes(order[start:position], pressure):
                return
            start = position + 1
            if not self._prompt(int(order[position]), share, pressure):
                return
        if start < len(order):
            self._decodes(order[start:], pressure)

    def _prompts(self, rows: IntArray, shares: list[int], pressure: Pressure) -> None:
        for row, share in zip(rows.tolist(), shares, strict=True):
            if not self._prompt(row, share, pressure):
                return

    def _prompt(self, row: int, share: int, pressure: Pressure) -> bool:
        """Place the next chunk of one prompt."""
        cols, step, ledger = self._ledger.cols, self._step, self._ledger
        if not cols.live[row]:  # it gave way to one before it; its row is not handed out again in this step
            return step.left > 0
        computed = int(cols.computed[row])
        tokens = min(int(cols.total[row]) - computed, step.left, step.left_prompts, share)
        if tokens <= 0:
            return step.left > 0
        seq, held = cols.owner_of(row), cols.block_count(row)
        upto = computed + tokens
        missing = max(0, ledger.blocks_for(upto) - held)
        ahead = max(upto, min(upto + self._advice.traits.lookahead, seq.limit - 1))
        outcome = pressure.make_room(seq, max(missing, ledger.blocks_for(ahead) - held))
        if outcome is Outcome.PHASE_ENDS:
            return False
        if outcome is Outcome.FITS:
            if missing:
                ledger.grow(row, missing)
            self._moves.place_chunk(seq, tokens)
        return step.left > 0

    def _decodes(self, rows: IntArray, pressure: Pressure) -> bool:
        """Place one token for each of these decoding rows, as far as budget and blocks reach."""
        cols, step = self._ledger.cols, self._step
        rows = self._standing(rows)
        if not self._advice.traits.lookahead:
            rows = rows[self._moves.place_what_fits(rows) :]
        while count := len(rows):
            ahead, growing, first = self._first_short(rows)
            if first == count:
                self._place(rows, growing)
                break
            if first > 0:
                self._place(rows[:first], growing[growing < first])
            row = rows[first]
            seq = cols.owner_of(int(row))
            outcome = pressure.make_room(seq, int(ahead[first]))
            if outcome is Outcome.PHASE_ENDS:
                return False
            if outcome is Outcome.FITS:
                if first in growing:
                    self._ledger.grow(int(row), 1)
                self._moves.place_decodes(rows[first : first + 1])
            rows = self._standing(rows[first + 1 :])
        return step.left > 0

    def _place(self, rows: IntArray, growing: IntArray) -> None:
        """One token for each of `rows`, and a block for those at these places."""
        if len(growing):
            self._ledger.grow_each(rows[growing])
        self._moves.place_decodes(rows)

    def _standing(self, rows: IntArray) -> IntArray:
        """Those that still run, as many as there are tokens left."""
        if self._step.preempted:
            rows = rows[self._ledger.cols.live[rows]]
        left = self._step.left
        return rows if len(rows) <= left else rows[: max(0, left)]

    def _first_short(self, rows: IntArray) -> tuple[IntArray | BoolArray, IntArray, int]:
        """For each row the blocks that must be free, the places of those that take one, and the first without."""
        cols, ledger, lookahead = self._ledger.cols, self._ledger, self._advice.traits.lookahead
        total, capacity = cols.total[rows], cols.capacity[rows]
        grows = total > capacity
        growing: IntArray = grows.nonzero()[0]
        free = ledger.pool.free
        if not lookahead:
            return grows, growing, len(rows) if len(growing) <= free else int(growing[free])
        upto = np.maximum(total, np.minimum(total + lookahead, cols.limit[rows] - 1))
        ahead: IntArray = np.maximum(0, -(-upto // ledger.block_size) - capacity // ledger.block_size)
        taken_before: IntArray = np.cumsum(grows) - grows
        short = np.flatnonzero(ahead > np.maximum(0, free - taken_before))
        return ahead, growing, int(short[0]) if len(short) else len(rows)
