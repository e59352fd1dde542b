"""The ADMIT phase: candidates in the admission policy's order, each tested at its turn.

The test is `blocks(need) - hits + idle hits + keep <= free`: blocks shared with somebody cost nothing, cached
ones that nobody holds cost what they take out of the free ones. A candidate that is refused is a barrier,
unless the policy allows some to be passed over.
"""

from __future__ import annotations

from itertools import repeat
from typing import NamedTuple

import numpy as np

from kvyard.core.advice import Advice
from kvyard.core.checks import WHOLE, PlainAdmission
from kvyard.core.fork import NO_BLOCK, Fork
from kvyard.core.lifecycle import QUEUED, State
from kvyard.core.moves import Moves
from kvyard.core.plan import Admitted, BlockCopy
from kvyard.core.sequence import SequenceState


class Offer(NamedTuple):
    """What a candidate would get now, and what is missing for it."""

    hits: list[int]
    """Blocks of others that it shares."""
    fork: Fork | None
    """Where they come from, if not from the prefix cache."""
    start: int
    """Tokens whose KV is there when it comes in: cached, taken over, or copied back from the host pool."""
    tokens: int
    first: int
    """New blocks for the first chunk."""
    promised: int
    """New blocks that the policy wants to be there."""
    short: int
    """Blocks missing; 0 or less when there are enough."""
    places: int
    """Places missing; 0 or less when there are enough."""


class Intake:
    """Admits waiting sequences."""

    def __init__(self, moves: Moves, advice: Advice) -> None:
        self._moves = moves
        self._advice = advice
        self._ledger = moves.ledger
        self._step = moves.step
        self._entered: list[int] = []
        """Rows of those that came in and are not yet in the running order."""
        self._grant = True
        self._keep = 0
        self._decision: PlainAdmission | None = None
        self._refusals: list[tuple[SequenceState, str]] = []
        self._held_back: dict[SequenceState, None] = {}
        """Those that were told to wait for one of their own."""

    def look_again(self) -> None:
        """At the beginning of a step: who waited for one of its own that has computed the prompt waits as all do."""
        for seq in list(self._held_back):
            if seq.reason == "sibling" and self._ledger.awaits(seq):
                continue
            del self._held_back[seq]
            if seq.reason == "sibling" and seq.state in QUEUED:
                seq.reason = ""
                self._step.refused.append(seq)

    def admit(self, grant: bool) -> None:
        """The phase. Without `grant`, newcomers get their tokens in a later phase of the same group."""
        ledger, step = self._ledger, self._step
        if not len(ledger.queue) or step.left <= 0 or step.left_prompts <= 0:
            return
        if ledger.running >= ledger.max_running and not self._advice.traits.evicts:
            step.queue_reason = "slots"
            return
        decision = self._decision = self._advice.admit()
        if self._advice.order_changed:
            self.settle_order()
        self._grant, self._keep = grant, decision.keep
        step.queue_reason, step.wake = decision.reason, decision.wake
        self._refuse_for_good(decision)
        came_in = self._walk(decision)
        ledger.append(self._entered)
        self._entered.clear()
        for seq in came_in:
            ledger.queue.remove(seq)
        self._moves.flush()

    def settle_order(self) -> None:
        """Bring the queue into the order of the admission policy in charge, at once."""
        advice, queue = self._advice, self._ledger.queue
        # The key may put its policy out while it is asked; then the built-in's order is built instead.
        for _ in range(2):
            advice.order_changed = False
            built = queue.reorder(advice.order(advice.traits))
            built.advance(len(queue))
            if not advice.order_changed:
                queue.adopt(built)
                return
        raise RuntimeError("the built-in admission policy has no usable order")

    def _refuse_for_good(self, decision: PlainAdmission) -> None:
        for seq, text in decision.refuse:
            self._ledger.finish(seq)
            self._refusals.append((seq, text))

    def take_refusals(self) -> list[tuple[SequenceState, str]]:
        """Ended for good by the admission policy since the last call: the sequence and the text for its client."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def _walk(self, decision: PlainAdmission) -> list[SequenceState]:
        step, cols, evict = self._step, self._ledger.cols, decision.evict
        came_in: list[SequenceState] = []
        skipped = 0
        entries = decision.entries
        for seq, need in zip(self._ledger.queue, repeat(WHOLE)) if entries is None else entries:
            if step.left <= 0 or step.left_prompts <= 0:
                step.queue_reason = step.queue_reason or "budget"
                break
            if (not evict and self._places_missing() > 0) or not cols.vacant:
                step.queue_reason = step.queue_reason or "slots"
                break
            # A victim is not taken back in the step that preempted it; whoever was refused for good is gone.
            if seq.state not in QUEUED or seq.id in step.preempted:
                continue
            if seq.family is not None and self._ledger.awaits(seq):
                seq.reason = "sibling"
                step.refused.append(seq)
                self._held_back[seq] = None
                continue
            offer = self._offer(seq, need)
            if evict and not self._acceptable(offer):
                offer = self._offer_with_room(seq, need, offer)
            if self._acceptable(offer):
                seq.promised = need
                self._enter(seq, offer, decision)
                came_in.append(seq)
                continue
            self._note_refusal(seq, offer)
            if skipped >= decision.skip:
                break
            skipped += 1
        return came_in

    def _note_refusal(self, seq: SequenceState, offer: Offer) -> None:
        if self._grant and offer.tokens <= 0:
            seq.reason = "chunk"
        else:
            seq.reason = "slots" if offer.places > 0 else "blocks"
        seq.short = max(0, offer.short)
        self._step.refused.append(seq)

    def _places_missing(self) -> int:
        return self._ledger.running + len(self._entered) - self._ledger.max_running + 1

    def _acceptable(self, offer: Offer) -> bool:
        return (offer.tokens > 0 or not self._grant) and offer.short <= 0 and offer.places <= 0

    def _offer_with_room(self, seq: SequenceState, need: int, offer: Offer) -> Offer:
        """What `seq` gets after making room for it, where the preemption policy makes any."""
        if self._grant and offer.tokens <= 0:
            return offer
        return self._offer(seq, need) if self._make_room(seq, offer) else offer

    def _offer(self, seq: SequenceState, need: int) -> Offer:
        ledger, step = self._ledger, self._step
        hits, fork = ledger.hits(seq), None
        start = seq.computed if seq.state is State.SWAPPED else len(hits) * ledger.block_size
        if seq.family is not None and (found := ledger.fork(seq)) is not None and found.tokens > start:
            hits, start, fork = found.blocks, found.tokens, found
        held = len(hits)
        wanted = seq.total - start
        tokens = 0
        if self._grant:
            most = min(wanted, step.left, step.left_prompts)
            divides = self._advice.traits.divides
            tokens = min(most, self._advice.divide([ledger.view(seq)], most)[0]) if divides else most
        idle = ledger.pool.idle(hits) if held else 0
        promised = ledger.blocks_for(seq.total if need == WHOLE else need) - held
        first = ledger.blocks_for(start + tokens) - held
        short = max(promised + self._keep, first) + idle - ledger.pool.free
        if not ledger.running and not self._entered and (short > 0 or (self._grant and tokens <= 0)):
            # With nothing running, what physically fits comes in whatever the policies say.
            self._advice.guard.override("admission" if short > 0 else "prefill", "alone")
            if self._grant and tokens <= 0:
                tokens = min(wanted, step.left)
            first = ledger.blocks_for(start + tokens) - held
            short = first + idle - ledger.pool.free
        return Offer(hits, fork, start, tokens, first, promised, short, self._places_missing())

    def _make_room(self, seq: SequenceState, offer: Offer) -> bool:
        """Preempt for a candidate what the preemption policy allows: all that is needed, or nobody."""
        moves, ledger = self._moves, self._ledger
        answer = self._advice.victims(max(0, offer.short), seq, "admission")
        blocks, places, victims = offer.short, offer.places, []
        for victim in answer.order:
            if blocks <= 0 and places <= 0:
                break
            # Who came in in this step is not put out for another newcomer, nor is whom this one builds on.
            if victim.admitted_step == ledger.step or not moves.may_preempt(victim):
                continue
            if offer.fork is not None and victim is offer.fork.donor:
                continue
            victims.append(victim)
            blocks -= ledger.pool.exclusive(ledger.cols.table(victim.row))
            places -= 1
        if blocks > 0 or places > 0:
            return False
        for victim in victims:
            moves.preempt(victim, seq, "admission", answer.how, answer.requeue == "front")
        return True

    def _enter(self, seq: SequenceState, offer: Offer, decision: PlainAdmission) -> None:
        ledger, step = self._ledger, self._step
        resumed, host = seq.preemptions > 0, seq.host
        seq.reason = ""
        row = ledger.enter(seq, offer.hits, offer.first, offer.start)
        step.withdrawals[seq] = host
        if host:
            seq.host = ()
            target = ledger.cols.tables[row, : len(host)].astype(np.int64)
            step.copies_in[seq] = BlockCopy(seq.id, "in", np.array(host, np.int64), target)
        if offer.fork is not None:
            self._copy_partial(seq, offer.fork)
        cached = 0 if offer.fork is not None else min(len(offer.hits) * ledger.block_size, seq.prompt_len)
        step.admitted[seq] = Admitted(seq.id, row, cached, resumed, offer.start, seq.prompt_len, seq.attached)
        ledger.count.admitted += 1
        if decision.evict:  # the preemption policy must see it
            ledger.append([row])
        else:
            self._entered.append(row)
        if offer.tokens:
            self._moves.place_chunk(seq, offer.tokens)
        if decision.hold:
            self._keep += max(0, offer.promised - offer.first)

    def _copy_partial(self, seq: SequenceState, fork: Fork) -> None:
        """Its first own block begins as a copy of the donor's."""
        if fork.partial != NO_BLOCK:
            target = self._ledger.cols.tables[seq.row, len(fork.blocks) : len(fork.blocks) + 1].astype(np.int64)
            self._step.forks[seq] = BlockCopy(seq.id, "copy", np.array([fork.partial], np.int64), target)
