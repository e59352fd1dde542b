"""The scheduler's state and the moves on it that keep rows, blocks, queue and lifecycle together.

Nothing here decides; nothing outside changes a block, a row or a state. Every way out of running goes
through `_vacate`, so blocks come back exactly once, whatever ends a sequence.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvyard.core.columns import RowColumns
from kvyard.core.fork import Families, Fork
from kvyard.core.host_pool import HostPool
from kvyard.core.lifecycle import Event, State
from kvyard.core.loops import Filled, find_filled
from kvyard.core.plan import IntArray, Limits, SequenceSpec, Tokens, token_array
from kvyard.core.pool import BlockPool
from kvyard.core.prefix import DIGEST_BYTES, DigestChain
from kvyard.core.queue import WaitingQueue
from kvyard.core.sequence import NO_ROW, SequenceState
from kvyard.core.snapshot import View
from kvyard.policy.snapshot import Ended

TOKEN_BYTES = 4
REMEMBER_ENDED = 256
"""Sequences that ran to their end, kept for policies to learn from."""


class NeverFits(ValueError):
    """A sequence that this engine can never hold; the text names the limit."""


@dataclass(slots=True)
class Tally:
    """Counters since the start; policies read them through the snapshot."""

    preempted: int = 0
    finished: int = 0
    admitted: int = 0
    decode_steps: int = 0
    last_prefill: int = -1


class Ledger:
    """All sequences that are not finished, and what they hold."""

    def __init__(self, limits: Limits, salt: bytes) -> None:
        self.limits = limits
        self.max_running = limits.max_running
        self.max_step_tokens = limits.max_step_tokens
        self.block_size = limits.block_size
        self.pool = BlockPool(limits.blocks, cached=limits.prefix_cache)
        self.index = self.pool.index
        self.host = HostPool(limits.swap_blocks)
        self.cols = RowColumns(limits)
        self.queue = WaitingQueue()
        self.families = Families(self.cols)
        self.sequences: dict[int, SequenceState] = {}
        self.count = Tally()
        self.ended: deque[Ended] = deque(maxlen=REMEMBER_ENDED)
        self.step = 0
        self.now = 0.0
        self.prompts = 0
        """Running sequences whose prompt is not wholly computed."""
        self.swapped = 0
        self.contents = False
        """Tokens are known, not lengths alone."""
        self._chain = DigestChain(salt)
        self._filled = Filled.of(2 * limits.max_running, limits.block_size)
        self._views: tuple[View, ...] | None = None

    # ---- arrival and end ------------------------------------------------------------------------------------

    def add(self, spec: SequenceSpec) -> SequenceState:
        """Take up a sequence; it waits. Raises NeverFits, or ValueError for an id that is already there."""
        if spec.id in self.sequences:
            raise ValueError(f"sequence {spec.id} is already there")
        self._check_fits(spec)
        seq = SequenceState(spec, _contents(spec))
        self.contents = self.contents or seq.tokens is not None
        if self.index is not None:
            seq.root = self._chain.root(spec.tenant if self.limits.isolate_tenants else "", spec.cache_salt)
        if spec.siblings:
            self.families.join(seq)
        self.sequences[spec.id] = seq
        self.queue.arrive(seq)
        return seq

    def _check_fits(self, spec: SequenceSpec) -> None:
        emitted = 0 if spec.emitted is None else len(spec.emitted)
        if spec.prompt_len < 1 or spec.max_new < 1 or emitted >= spec.max_new:
            raise NeverFits(
                f"a sequence has at least one prompt token and one output token to come, not"
                f" {spec.prompt_len} and {spec.max_new - emitted}"
            )
        if spec.prompt is not None and (tokens := _count(spec.prompt)) != spec.prompt_len:
            raise ValueError(f"the prompt has {tokens} tokens, not {spec.prompt_len}")
        length = spec.prompt_len + spec.max_new
        if length > self.limits.max_model_len:
            raise NeverFits(f"needs {length} tokens and a sequence may hold {self.limits.max_model_len}")
        blocks = self.blocks_for(length - 1)
        if blocks > self.pool.blocks:
            raise NeverFits(f"needs {blocks} KV blocks and the pool has {self.pool.blocks}")

    def finish(self, seq: SequenceState) -> None:
        """End a sequence from any state; what it holds is free at once."""
        if seq.row != NO_ROW:
            self._vacate(seq, keep_tokens=False)
            self.cols.close_ranks()
        else:
            self.queue.remove(seq)
            self._drop_host(seq)
        self._end(seq)

    def finish_rows(self, rows: IntArray) -> list[SequenceState]:
        """End many running sequences at once, as `finish` would; they ran to their end."""
        cols, pool, sequences, told = self.cols, self.pool, self.sequences, self.ended
        # Who ends here has sampled, so none of them is a prompt any more.
        pool.release_rows(rows, cols.capacity, cols.tables, self.block_size)
        ended = cols.vacate_all(rows)
        for seq in ended:
            seq.published = 0
            seq.move(Event.FINISH)
            seq.tokens = None
            seq.view = None  # the two hold each other, and the collector is off while anything runs
            if seq.family is not None:
                self.families.vacate(seq)
                self.families.end(seq)
            del sequences[seq.id]
            told.append(Ended(seq.id, seq.tenant, seq.prompt_len, seq.total - seq.prompt_len, seq.max_new))
        self.count.finished += len(ended)
        self._views = None
        return ended

    def _end(self, seq: SequenceState) -> None:
        seq.move(Event.FINISH)
        seq.tokens = seq.view = None
        self.families.end(seq)
        del self.sequences[seq.id]
        self.count.finished += 1

    # ---- running and waiting --------------------------------------------------------------------------------

    def enter(self, seq: SequenceState, hits: list[int], blocks: int, computed: int) -> int:
        """Give `seq` a row with the blocks `hits` of others and `blocks` new ones; it still stands in the queue.

        `computed` tokens are there, or will be when the step's copies are made. The caller takes it out of the
        queue and appends the row to the order, for many at once.
        """
        if hits:
            self.pool.share(hits)
        seq.published = len(hits)
        held = len(hits) + blocks
        row = self.cols.enter(seq, held, computed, self.step)
        if hits:
            self.cols.tables[row, : len(hits)] = hits
        self.pool.take_for(row, self.cols.tables, len(hits), held)
        self.prompts += 1
        if seq.state is State.SWAPPED:
            self.swapped -= 1
            # What comes back from the host with one token to go is a decode, not a prompt.
            if seq.total - computed == 1:
                self.cols.prompt[row] = False
                self.prompts -= 1
        if seq.family is not None:
            self.families.enter(seq)
        seq.move(Event.ADMIT)
        seq.admissions += 1
        seq.admitted_step = self.step
        self._views = None
        return row

    def leave(self, seq: SequenceState, event: Event) -> None:
        """A running sequence gives up its row and its blocks and waits; the caller requeues it."""
        self._vacate(seq, keep_tokens=True)
        self.cols.close_ranks()
        seq.move(event)
        if seq.state is State.SWAPPED:
            self.swapped += 1
        else:
            seq.computed = 0

    def _vacate(self, seq: SequenceState, *, keep_tokens: bool) -> None:
        self.pool.release(self.cols.table(seq.row))
        self.prompts -= bool(self.cols.prompt[seq.row])
        self.families.vacate(seq)
        self.cols.vacate(seq, keep_tokens)
        seq.published = 0
        self._views = None

    def _drop_host(self, seq: SequenceState) -> None:
        if seq.state is State.SWAPPED:
            self.swapped -= 1
        if seq.host:
            self.host.release(seq.host)
            seq.host = ()

    def lose_host(self, seq: SequenceState) -> None:
        """The host copy of a swapped sequence cannot be trusted: it computes its tokens again."""
        self._drop_host(seq)
        seq.move(Event.LOSE_HOST)
        seq.computed = 0

    def append(self, rows: list[int]) -> None:
        """These rows run from now on, behind the others."""
        self.cols.append(rows)
        self._views = None

    @property
    def running(self) -> int:
        """Running sequences."""
        return len(self.cols.order)

    def views(self) -> tuple[View, ...]:
        """Views of the running sequences in order of admission."""
        if self._views is None:
            owner, view = self.cols.owner_of, self.view
            self._views = tuple([view(owner(row)) for row in self.cols.order.tolist()])
        return self._views

    def view(self, seq: SequenceState) -> View:
        """What policies see of `seq`: always the same object until it ends."""
        view = seq.view
        if view is None:  # most wait and run without a look at them
            view = View(self, seq)
            if (
                seq.state is not State.FINISHED
            ):  # who kept an iterator may see ended ones: the two would hold each other
                seq.view = view
        return view

    # ---- blocks ---------------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def grow(self, row: int, count: int) -> None:
        """`count` more blocks for one row; there are as many free."""
        held = self.cols.block_count(row)
        self.pool.take_for(row, self.cols.tables, held, held + count)
        self.cols.capacity[row] = (held + count) * self.block_size

    def grow_each(self, rows: IntArray) -> None:
        """One more block for each of `rows`; there are as many free."""
        capacity = self.cols.capacity
        self.cols.tables[rows, capacity[rows] // self.block_size] = self.pool.take(len(rows))
        capacity[rows] += self.block_size

    # ---- copy-on-write --------------------------------------------------------------------------------------

    def fork(self, seq: SequenceState) -> Fork | None:
        """What `seq`, which waits, could take over from another sequence of its request."""
        return None if seq.family is None else self.families.fork(seq, self.step)

    def awaits(self, seq: SequenceState) -> bool:
        """Whether it is better for `seq` to wait until another sequence of its request has computed the prompt."""
        return seq.family is not None and self.families.awaits(seq, self.step)

    # ---- prefix cache ---------------------------------------------------------------------------------------

    def hits(self, seq: SequenceState) -> list[int]:
        """Cached blocks that `seq`, which waits, could share now; at least one token stays to be computed."""
        index = self.index
        if index is None or seq.state is State.SWAPPED or seq.tokens is None:
            return []
        if seq.scored and seq.total == seq.prompt_len:
            return []
        found: list[int] = []
        for number in range((seq.total - 1) // self.block_size):
            # One digest at a time: most newcomers share nothing, and then the first one tells.
            block = index.find(self._digests(seq, number + 1, seq.tokens), number)
            if block is None:
                break
            found.append(block)
        return found

    def _digests(self, seq: SequenceState, count: int, tokens: Tokens) -> bytearray | bytes:
        """Digests of at least the first `count` blocks of `seq`; each is made once."""
        known, size = len(seq.digests) // DIGEST_BYTES, self.block_size
        if known < count:
            raw = token_array(tokens)[known * size : count * size].tobytes()
            self._chain.extend(seq.own_digests(), seq.root, raw, size * TOKEN_BYTES)
        return seq.digests

    def publish(self, seq: SequenceState, upto: int) -> int:
        """Let others find the full blocks up to token `upto` of a running sequence.

        This happens when the tokens are granted: a later newcomer of the same step may share them, since a
        step writes the KV of all its tokens before any of them is read. Returns how many were published
        before.
        """
        before, last = seq.published, upto // self.block_size
        index = self.index
        if index is None or seq.tokens is None or last <= before:
            return before
        row = seq.row
        digests = self._digests(seq, last, self.cols.tokens[row])
        index.publish(self.cols.tables[row, before:last], digests, before)
        seq.published = last
        return before

    def publish_decoded(self, rows: IntArray, fresh: dict[SequenceState, int]) -> None:
        """`publish` for those of these running sequences whose decode fills a block; `fresh` gets who did.

        Their tokens are read, and their blocks named, all at once: one by one it takes twice as long.
        """
        cols, index, full = self.cols, self.index, self._filled
        if index is None or not self.contents:
            return
        count = find_filled(rows, cols.total, cols.tables, cols.tokens, full)
        raw, width = full.tokens[:count].tobytes(), full.tokens.strides[0]
        owner, next_digest = cols.owner, self._chain.next
        named, digests = list[int](), bytearray()
        for at, (row, held) in enumerate(zip(full.rows[:count].tolist(), full.counts[:count].tolist(), strict=True)):
            seq = owner[row]
            assert seq is not None
            before = held - 1
            if seq.published == before and len(seq.digests) == before * DIGEST_BYTES:
                parent = bytes(seq.digests[-DIGEST_BYTES:]) or seq.root
                digest = next_digest(parent, raw[at * width : (at + 1) * width])
                seq.own_digests().extend(digest)
                digests += digest
                named.append(at)
                seq.published = held
            else:
                before = self.publish(seq, held * self.block_size)
            fresh.setdefault(seq, before)
        if named:
            index.publish(full.blocks[named], digests)

    def unpublish(self, seq: SequenceState, keep: int) -> None:
        """Take back all but the first `keep` published blocks: they will not be computed after all."""
        if self.index is None:
            return
        self.index.forget(self.cols.tables[seq.row, keep : seq.published])
        seq.published = keep

    # ---- checking -------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Every broken invariant in words; empty when all is well. Costs a walk over everything."""
        cols = self.cols
        running = [seq for seq in self.sequences.values() if seq.row != NO_ROW]
        faults = self.pool.audit(cols.table(seq.row) for seq in running)
        if sorted(seq.row for seq in running) != sorted(cols.order.tolist()):
            faults.append("the order of running differs from the rows in use")
        if any(seq.state is not State.RUNNING for seq in running):
            faults.append("a sequence with a row does not run")
        waiting = set(self.queue)
        if waiting | set(running) != set(self.sequences.values()) or waiting & set(running):
            faults.append("a sequence is neither running nor waiting, or both")
        if len(waiting) != len(self.queue):
            faults.append("the queue's length is wrong")
        if self.prompts != int(np.count_nonzero(cols.prompt & cols.live)):
            faults.append("the count of running prompts is wrong")
        if self.swapped != sum(seq.state is State.SWAPPED for seq in waiting):
            faults.append("the count of swapped sequences is wrong")
        if sum(len(seq.host) for seq in self.sequences.values()) != self.host.used:
            faults.append("host blocks are lost or held twice")
        return faults + self.families.audit()


def _count(tokens: Tokens) -> int:
    return len(tokens) // TOKEN_BYTES if isinstance(tokens, bytes) else len(tokens)


def _contents(spec: SequenceSpec) -> Tokens | None:
    """Prompt and emitted tokens in one, or None where only lengths count."""
    if spec.prompt is None:
        return None
    if spec.emitted is None or not len(spec.emitted):
        # Nobody writes to it: tokens that are added are added to the row's own copy.
        return spec.prompt if isinstance(spec.prompt, bytes) else spec.prompt.astype(np.int32, copy=False)
    return np.concatenate((token_array(spec.prompt), spec.emitted)).astype(np.int32, copy=False)
