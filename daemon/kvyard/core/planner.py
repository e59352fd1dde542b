"""A step from its shape to its plan, and the rules that keep it moving whatever the policies say."""

from __future__ import annotations

import numpy as np

from kvyard.core.advice import Advice
from kvyard.core.growth import Growth
from kvyard.core.intake import Intake
from kvyard.core.loops import gather
from kvyard.core.moves import Moves
from kvyard.core.plan import Plan
from kvyard.policy.decisions import Phase


class Planner:
    """Makes the plan of a step."""

    def __init__(self, moves: Moves, advice: Advice) -> None:
        self.intake = Intake(moves, advice)
        self._growth = Growth(moves, advice)
        self._moves = moves
        self._advice = advice
        self._ledger = moves.ledger
        self._step = moves.step
        self._empty_before = False
        """The last step placed nothing although something ran."""

    def open(self) -> None:
        """A new step."""
        self._ledger.cols.open_step()
        self._step.open(self._ledger.max_step_tokens)

    def walk(self) -> None:
        """Place what the policies want, and then what must be placed."""
        self.intake.look_again()
        self._order_queue()
        shape = self._advice.shape()
        if shape.prompts is not None:
            self._step.left_prompts = min(shape.prompts, self._step.left)
        for group in shape.groups:
            self._group(group)
            if self._step.placed:
                break
        self._break_stall()
        self._break_idling()
        self._empty_before = not self._step.placed and self._ledger.running > 0

    def _order_queue(self) -> None:
        queue, advice = self._ledger.queue, self._advice
        if not queue.unsettled and not advice.order_changed:
            return
        queue.settle()
        if advice.order_changed:
            self.intake.settle_order()
        advice.examine_keys()
        if advice.order_changed:  # the policy did something else than order, and was put out
            self.intake.settle_order()

    def _group(self, group: tuple[Phase, ...]) -> None:
        for number, phase in enumerate(group):
            if phase is Phase.ADMIT:
                self.intake.admit(grant=Phase.PROMPT not in group[number:])
            else:
                self._growth.walk(phase)
                self._moves.flush()

    def _break_stall(self) -> None:
        """Nobody could grow and the policy names no victim: the newest goes, until somebody can."""
        step, cols = self._step, self._ledger.cols
        while not step.placed and step.stalled and self._ledger.running > 1:
            self._advice.guard.override("preemption", "no-victim")
            newest, first = cols.owner_of(int(cols.order[-1])), cols.owner_of(int(cols.order[0]))
            self._moves.preempt(newest, first, "override", "recompute", front=True)
            step.stalled = 0
            self._growth.force(cols.order)
            self._moves.flush()

    def _break_idling(self) -> None:
        """Two steps running that place nothing although something runs: the first one gets what is left."""
        if self._step.placed or not self._empty_before or not self._ledger.running:
            return
        self._advice.guard.override("prefill", "no-progress")
        self._growth.force(self._ledger.cols.order[:1])
        self._moves.flush()

    def plan(self) -> Plan:
        """What was placed, in the order of scheduling."""
        cols, step = self._ledger.cols, self._step
        rows = step.picked()
        if step.preempted:  # a victim placed before it was taken left the plan
            rows = rows[cols.granted[rows] > 0]
        count = len(rows)
        ids, granted, computed = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
        samples = np.empty(count, np.bool_)
        gather(rows, cols.id, cols.granted, cols.computed, cols.total, ids, granted, computed, samples)
        return Plan(
            step=self._ledger.step,
            ids=ids,
            slots=rows,
            granted=granted,
            computed=computed,
            samples=samples,
            tables=cols.tables,
            tokens=cols.tokens,
            admitted=list(step.admitted.values()),
            copies=[*step.copies_out.values(), *step.forks.values(), *step.copies_in.values()],
        )
