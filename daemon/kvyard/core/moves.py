"""What the phases of a step do to sequences: place tokens, preempt, take back. Ledger and step change together."""

from __future__ import annotations

import numpy as np

from kvyard.core.ledger import Ledger
from kvyard.core.lifecycle import Event
from kvyard.core.loops import place_decodes
from kvyard.core.plan import BlockCopy, IntArray
from kvyard.core.sequence import SequenceState
from kvyard.core.step import StepState
from kvyard.link.record import Preemption


class Moves:
    """Moves within the step under way."""

    def __init__(self, ledger: Ledger, step: StepState) -> None:
        self.ledger = ledger
        self.step = step

    # ---- placing --------------------------------------------------------------------------------------------

    def place_what_fits(self, rows: IntArray) -> int:
        """One token for each of these decoding rows, and a block where one is needed, as far as blocks reach."""
        step, cols, pool = self.step, self.ledger.cols, self.ledger.pool
        placed = place_decodes(
            pool.state, rows, cols.total, cols.capacity, cols.granted, cols.placed_step, step.rows, cols.tables,
            cols.block_size, self.ledger.step, step.picks,
        )  # fmt: skip
        step.picks += placed
        self._count_decodes(rows if placed == len(rows) else rows[:placed])
        return placed

    def place_decodes(self, rows: IntArray) -> None:
        """One token for each of these decoding rows; their blocks are there."""
        cols = self.ledger.cols
        cols.granted[rows] = 1
        cols.placed_step[rows] = self.ledger.step
        self.step.pick_all(rows)
        self._count_decodes(rows)

    def _count_decodes(self, rows: IntArray) -> None:
        step, count = self.step, len(rows)
        step.placed += count
        step.decodes += count
        step.left -= count
        if self.ledger.index is not None:
            self.ledger.publish_decoded(rows, step.fresh)

    def place_chunk(self, seq: SequenceState, tokens: int) -> None:
        """`tokens` of a prompt; its blocks are there."""
        step, ledger, row = self.step, self.ledger, seq.row
        cells = ledger.cols.cells
        cells.granted[row] = tokens
        cells.placed_step[row] = ledger.step
        step.pick(row)
        step.placed += 1
        step.left -= tokens
        if cells.prompt[row]:
            step.left_prompts -= tokens
            ledger.count.last_prefill = ledger.step
        else:
            step.decodes += 1
        if ledger.index is not None:
            before = ledger.publish(seq, cells.computed[row] + tokens)
            if seq.published > before:
                step.fresh.setdefault(seq, before)

    # ---- preempting -----------------------------------------------------------------------------------------

    def may_preempt(self, seq: SequenceState) -> bool:
        """Whether `seq` can give way: it runs, and no newcomer of this step builds on what it computes in it."""
        if seq.row < 0:
            return False
        before = self.step.fresh.get(seq)
        if before is None:
            return True
        fresh = self.ledger.cols.tables[seq.row, before : seq.published].tolist()
        return self.ledger.pool.exclusive(fresh) == len(fresh)

    def preempt(self, seq: SequenceState, by: SequenceState, cause: str, how: str, front: bool) -> None:
        """Take `seq` out of running and out of the plan; it waits again when the phase ends."""
        step, ledger = self.step, self.ledger
        self._take_back(seq)
        event, tokens = self._save(seq, how)
        ledger.leave(seq, event)
        seq.preemptions += 1
        ledger.count.preempted += 1
        step.requeue.append((seq, front))
        step.preempted.append(seq.id)
        way = "swap" if event is Event.SWAP_OUT else "recompute"
        step.preemptions.append(Preemption(seq.id, by.id, cause, way, tokens))

    def _take_back(self, seq: SequenceState) -> None:
        """What was placed for `seq` in this step goes back to the budget, and its fresh blocks lose their names."""
        step, cols, row = self.step, self.ledger.cols, seq.row
        granted = int(cols.granted[row])
        if granted:
            step.placed -= 1
            step.left += granted
            if cols.prompt[row]:
                step.left_prompts += granted
            else:
                step.decodes -= 1
            cols.granted[row] = 0
        before = step.fresh.pop(seq, None)
        if before is not None:
            self.ledger.unpublish(seq, before)
        step.admitted.pop(seq, None)
        step.forks.pop(seq, None)

    def _save(self, seq: SequenceState, how: str) -> tuple[Event, int]:
        """Keep the victim's KV in the host pool if it is wanted and possible; the tokens kept or lost."""
        ledger, step = self.ledger, self.step
        computed = int(ledger.cols.computed[seq.row])
        if seq in step.copies_in:  # it came from the host in this step: its copy there is still whole
            del step.copies_in[seq]
            seq.host = step.withdrawals.pop(seq)
            seq.computed = computed
            return Event.SWAP_OUT, computed
        newcomer = step.withdrawals.pop(seq, None) is not None
        # What a newcomer shares may be computed in this very step, after the copies: it cannot be saved.
        if how != "swap" or newcomer or not computed:
            return Event.PREEMPT, computed
        blocks = ledger.blocks_for(computed)
        host = ledger.host.take(blocks)
        if host is None:
            return Event.PREEMPT, computed
        seq.host, seq.computed = host, computed
        source = ledger.cols.tables[seq.row, :blocks].astype(np.int64)
        step.copies_out[seq] = BlockCopy(seq.id, "out", source, np.array(host, np.int64))
        return Event.SWAP_OUT, computed

    def flush(self) -> None:
        """The phase ends: those preempted in it join the queue."""
        for seq, front in self.step.requeue:
            self.ledger.queue.requeue(seq, front=front)
        self.step.requeue.clear()
