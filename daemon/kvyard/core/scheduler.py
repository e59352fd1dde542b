"""The scheduler: the core's one entrance for the engine and the simulator.

Between steps: `add`, `cancel`, `finish`, `swap`, `set_params`, `pause`. A step: `schedule`, then the model,
then `commit` (or `abandon` when the model failed). Everything else reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from kvyard.core.advice import Advice, Exit
from kvyard.core.conduct import Conduct, ConductLimits
from kvyard.core.guard import Guard
from kvyard.core.journal import Journal, RecordParts
from kvyard.core.ledger import Ledger, NeverFits
from kvyard.core.lifecycle import Event, FinishReason
from kvyard.core.loops import NO_CONTENTS, take_in
from kvyard.core.moves import Moves
from kvyard.core.plan import BoolArray, Committed, IntArray, Limits, Plan, SequenceSpec, TokenArray
from kvyard.core.planner import Planner
from kvyard.core.policy_set import PolicySet
from kvyard.core.sequence import NO_ROW, SequenceState
from kvyard.core.snapshot import CoreSnapshot
from kvyard.core.step import StepState
from kvyard.core.steptime import OnlineStepTime
from kvyard.core.swap import Swapper, SwapTicket
from kvyard.policy.base import Kind, Policy
from kvyard.policy.params import Value

__all__ = ["NeverFits", "PolicySet", "RequestState", "Scheduler"]


class PoolCounts(NamedTuple):
    """KV blocks; the three add up to the pool."""

    used: int
    """Held by sequences."""
    cached: int
    """Free, with reusable content."""
    free: int
    """Free and empty."""


@dataclass(frozen=True, slots=True)
class RequestState:
    """One unfinished sequence, for the operator's list. Lengths in tokens, `arrived` on the core's clock."""

    id: int
    request: int
    state: str
    """waiting, running, preempted, swapped."""
    reason: str
    """Why it waits; empty while it runs."""
    arrival: int
    arrived: float
    priority: int
    tenant: str
    prompt_len: int
    computed: int
    generated: int
    max_new: int
    blocks: int
    preemptions: int


class Scheduler:
    """See the module. `salt` keys the prefix cache: secret, and new with every start."""

    def __init__(
        self,
        limits: Limits,
        policies: PolicySet,
        *,
        clock_ns: Callable[[], int],
        guard: Guard | None = None,
        salt: bytes = b"",
        conduct: ConductLimits | None = None,
    ) -> None:
        """Raises Fault when a policy's declarations cannot be used."""
        _check_limits(limits)
        self.guard = guard or Guard(clock_ns=clock_ns)
        self.ledger = Ledger(limits, salt)
        self.step_time = OnlineStepTime()
        self._state = StepState(2 * limits.max_running)
        self.snapshot = CoreSnapshot(self.ledger, self._state, self.step_time)
        with self.guard.armed():
            self.advice = Advice(self.guard, policies, self.ledger, self._state, self.snapshot)
        self.guard.take_costs()  # reading the declarations is no decision
        self._moves = Moves(self.ledger, self._state)
        self._planner = Planner(self._moves, self.advice)
        self._conduct = Conduct(self.advice, self.ledger, self._state, conduct)
        self._journal = Journal()
        self._swapper = Swapper(self.advice, self.ledger, clock_ns)
        self._open: Plan | None = None
        """The plan that is neither committed nor abandoned."""
        self._over: IntArray = np.empty(2 * limits.max_running, np.int64)
        self._stopped: BoolArray = np.empty(2 * limits.max_running, np.bool_)
        """Room for the rows that end in a step, and whether each was stopped."""
        self._paused = False
        self._refusals: list[tuple[int, str]] = []

    # ---- between steps --------------------------------------------------------------------------------------

    def add(self, spec: SequenceSpec) -> None:
        """Take up a sequence; it waits. Raises NeverFits, or ValueError for an id that is already there.

        `spec.emitted` counts as generated, and is computed again together with the prompt.
        """
        self.ledger.add(spec)

    def cancel(self, ids: Iterable[int]) -> list[int]:
        """End these sequences; those that were known. Their blocks are free at once."""
        return [id for id in ids if self.finish(id, "cancelled")]

    def finish(self, id: int, reason: FinishReason) -> bool:
        """End a sequence; False when there is none with this id. Its blocks are free at once."""
        seq = self.ledger.sequences.get(id)
        if seq is None:
            return False
        self._check_between_steps()
        self.ledger.finish(seq)
        self._journal.finished(seq, reason)
        return True

    def pause(self) -> None:
        """Place nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Schedule again."""
        self._paused = False

    @property
    def paused(self) -> bool:
        """Nothing is placed."""
        return self._paused

    # ---- policies -------------------------------------------------------------------------------------------

    @property
    def policies(self) -> PolicySet:
        """The policies in charge."""
        return self.advice.policies

    def swap(
        self,
        changes: Mapping[Kind, Policy],
        *,
        names: Mapping[Kind, str] | None = None,
        discipline: str | None = None,
    ) -> SwapTicket:
        """Put other policies in charge at a step boundary; see `SwapTicket`. One change at a time."""
        self._check_between_steps()
        return self._swapper.begin(changes, names or {}, discipline)

    def set_params(self, kind: Kind, values: Mapping[str, Value]) -> SwapTicket:
        """Change live parameters of the policy of `kind`. Raises ParamError with nothing changed."""
        self._check_between_steps()
        return self._swapper.set_params(kind, values)

    def export_states(self) -> dict[str, dict[str, Any]]:
        """State of the policies in charge that is worth keeping over a restart, by `kind/name`."""
        with self.guard.armed():
            return self.advice.export()

    def import_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Hand the policies in charge what `export_states` of an earlier engine returned."""
        with self.guard.armed():
            self.advice.restore(states)

    def take_exits(self) -> list[Exit]:
        """Policies put out since the last call."""
        exits, self.advice.exits = self.advice.exits, []
        return exits

    # ---- a step ---------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Plan:
        """Plan a step. A plan that is not `idle` must be committed or abandoned before anything else."""
        self._check_between_steps()
        self.ledger.now = now
        self._planner.open()
        if self._paused:
            self._conduct.pardon()
            with self.guard.armed():
                self._swapper.advance()
            self._forget_reasons()
            self._journal.step_planned(self._state, "paused", -1)
        else:
            self.guard.arm()
            try:
                self._swapper.advance()
                self._forget_reasons()
                self._planner.walk()
                self._conduct.look()
            finally:
                self.guard.disarm()
            self._note_step()
        plan = self._planner.plan()
        if plan.idle:
            self._close_step()
        else:
            self._open = plan
        return plan

    def _forget_reasons(self) -> None:
        """What an admission policy said of single sequences holds for as long as it is in charge."""
        admission = self.advice.policies.admission
        if admission is self._journal.admission:
            return
        for id in self._journal.under(admission):
            if (seq := self.ledger.sequences.get(id)) is not None:
                seq.reason = ""

    def _note_step(self) -> None:
        state = self._state
        placed = self.ledger.max_step_tokens - state.left
        self._journal.prompt_tokens(placed - state.decodes)
        self._journal.step_planned(state, state.queue_reason, state.wake)
        for seq, text in self._planner.intake.take_refusals():
            self._journal.finished(seq, "error")
            self._refusals.append((seq.id, text))

    @property
    def has_news(self) -> bool:
        """`take_refusals` or `take_exits` has something."""
        return bool(self._refusals or self.advice.exits)

    def take_refusals(self) -> list[tuple[int, str]]:
        """Sequences that the admission policy ended for good since the last call, with the text for the client."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def commit(self, plan: Plan, tokens: TokenArray, stop: BoolArray) -> Committed:
        """Take in a step's output: one token and one stop flag per row with `plan.samples`, in the plan's order.

        Appends the tokens and ends what stops or is at its length; blocks are free at once.
        """
        if plan.idle:
            return Committed(plan.ids, [])
        self._check_open(plan)
        cols, state = self.ledger.cols, self._state
        rows, ids, samples = plan.slots, plan.ids, plan.samples
        count = np.count_nonzero(samples)
        tokens, stop = np.ascontiguousarray(tokens, np.int32), np.ascontiguousarray(stop, np.bool_)
        if not tokens.shape == stop.shape == (count,):
            shapes = f"tokens of shape {tokens.shape} and flags of {stop.shape}"
            raise ValueError(f"{count} rows of step {plan.step} sample, with {shapes}")
        over, stopped = self._over, self._stopped
        contents = cols.tokens if self.ledger.contents else NO_CONTENTS
        ended, prompts = take_in(
            rows, plan.granted, plan.computed, samples, cols.computed, cols.total, cols.limit, cols.prompt, contents,
            tokens, stop, over, stopped,
        )  # fmt: skip
        self.ledger.prompts -= prompts
        if count < len(rows):
            ids = ids[samples]
        for host in state.withdrawals.values():
            if host:
                self.ledger.host.release(host)
        finished = self._finish_rows(over[:ended], stopped[:ended]) if ended else []
        self.ledger.count.decode_steps += state.decodes > 0
        self._close_step()
        return Committed(ids, finished)

    def _finish_rows(self, rows: IntArray, stopped: BoolArray) -> list[tuple[int, str]]:
        """These have ended, by a stop or by their length."""
        ended, flags = self.ledger.finish_rows(rows), stopped.tolist()
        finished = [(seq.id, "stop" if by_stop else "length") for seq, by_stop in zip(ended, flags, strict=True)]
        self._journal.ended(finished)
        return finished

    def abandon(self, plan: Plan) -> None:
        """The model failed in this step: nothing of it was computed, and nobody lost anything but time.

        Who came in in this step waits again at its old place. Who was copied out computes again, since
        nobody knows whether the copy was made.
        """
        self._check_open(plan)
        ledger, state = self.ledger, self._state
        self._journal.step_undone(state, self.ledger.max_step_tokens - state.left)
        for seq, before in state.fresh.items():
            ledger.unpublish(seq, before)
        with self.guard.armed():
            for seq in reversed(list(state.admitted)):
                self._withdraw(seq, state.withdrawals[seq])
            self._moves.flush()
        for seq in state.copies_out:
            ledger.lose_host(seq)
        self._close_step()

    def _withdraw(self, seq: SequenceState, host: Sequence[int]) -> None:
        """Undo an admission."""
        ledger = self.ledger
        if host:
            seq.computed = int(ledger.cols.computed[seq.row])
            ledger.leave(seq, Event.SWAP_OUT)
            seq.host = host
        else:
            ledger.leave(seq, Event.PREEMPT if seq.preemptions else Event.WITHDRAW)
        ledger.count.admitted -= 1
        self._state.requeue.append((seq, True))

    def _close_step(self) -> None:
        self.ledger.step += 1
        self._open = None

    def _check_between_steps(self) -> None:
        if self._open is not None:
            raise RuntimeError(f"step {self._open.step} is neither committed nor abandoned")

    def _check_open(self, plan: Plan) -> None:
        if self._open is not plan:
            raise RuntimeError(f"step {plan.step} is not the one under way")

    def observe(self, decodes: int, prompt_tokens: int, seconds: float, copied_blocks: int = 0) -> None:
        """A step took `seconds`: the step-time model that policies see learns from it."""
        self.step_time.observe(decodes, prompt_tokens, seconds, copied_blocks)

    # ---- reading --------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Something runs or waits, or a change of policies is under way: call `schedule` again soon."""
        return bool(self.ledger.sequences) or self._swapper.busy

    @property
    def changing(self) -> bool:
        """A change of policies is under way, also while nothing is placed."""
        return self._swapper.busy

    @property
    def step(self) -> int:
        """Number of the next step, or of the one under way."""
        return self.ledger.step

    @property
    def running(self) -> int:
        """Running sequences."""
        return self.ledger.running

    @property
    def waiting(self) -> int:
        """Waiting sequences, preempted and swapped ones included."""
        return len(self.ledger.queue)

    @property
    def swapped(self) -> int:
        """Of the waiting ones, those whose KV is in the host pool."""
        return self.ledger.swapped

    @property
    def blocks_used(self) -> int:
        """KV blocks held by sequences."""
        return self.ledger.pool.used

    @property
    def blocks_cached(self) -> int:
        """Free KV blocks with reusable content."""
        return self.ledger.pool.free_cached

    @property
    def blocks_free(self) -> int:
        """Free and empty KV blocks; the three add up to the pool."""
        return self.ledger.pool.free - self.ledger.pool.free_cached

    def pool_counts(self) -> PoolCounts:
        """The three numbers of KV blocks at once, for the record of every step."""
        pool = self.ledger.pool
        free, cached = pool.free, pool.free_cached
        return PoolCounts(pool.blocks - free, cached, free - cached)

    def generated(self, slots: IntArray) -> IntArray:
        """Output tokens so far of running sequences, by slot."""
        cols = self.ledger.cols
        made: IntArray = cols.total[slots] - cols.prompt_len[slots]
        return made

    def wait_reason(self) -> tuple[str, int | None]:
        """Why the queue waits and the step at which to ask again (None: any time); for a step without rows."""
        wake = self._journal.wake
        return self._journal.queue_reason, wake if wake >= 0 else None

    def take_record_parts(self) -> RecordParts:
        """The core's part of the step record: everything since the last call."""
        return self._journal.take(self.guard, self.policies)

    def request_rows(self, limit: int) -> list[RequestState]:
        """At most `limit` unfinished sequences: running ones first, then the waiting ones in order."""
        owner = self.ledger.cols.owner_of
        running = (owner(row) for row in self.ledger.cols.order.tolist())
        seqs: Iterator[SequenceState] = chain(running, self.ledger.queue)
        return [self._request_state(seq) for seq in islice(seqs, limit)]

    def _request_state(self, seq: SequenceState) -> RequestState:
        view = self.ledger.view(seq)
        return RequestState(
            id=seq.id,
            request=seq.request,
            state=seq.state.value,
            reason="" if seq.row != NO_ROW else self._reason_of(seq),
            arrival=seq.arrival,
            arrived=seq.arrived,
            priority=seq.priority,
            tenant=seq.tenant,
            prompt_len=seq.prompt_len,
            computed=view.computed,
            generated=view.generated,
            max_new=seq.max_new,
            blocks=view.blocks,
            preemptions=seq.preemptions,
        )

    def _reason_of(self, seq: SequenceState) -> str:
        if seq.reason == "blocks":
            return f"blocks: {seq.short} more KV blocks needed"
        return seq.reason or self._journal.queue_reason or "behind others in the queue"

    def dump(self) -> dict[str, Any]:
        """The whole state in plain values, for the operator's report."""
        ledger = self.ledger
        return {
            "step": ledger.step,
            "now": ledger.now,
            "paused": self._paused,
            "limits": {name: getattr(ledger.limits, name) for name in ledger.limits.__slots__},
            "blocks": {"used": self.blocks_used, "cached": self.blocks_cached, "free": self.blocks_free},
            "evicted_blocks": 0 if ledger.index is None else ledger.index.evicted,
            "host_blocks_used": ledger.host.used,
            "running": self.running,
            "waiting": self.waiting,
            "queue_reason": self._journal.queue_reason,
            "counts": {name: getattr(ledger.count, name) for name in ledger.count.__slots__},
            "policies": self.advice.dump(),
            "swap": self._swapper.describe(),
            "sequences": [
                {name: getattr(row, name) for name in row.__slots__}
                for row in self.request_rows(len(ledger.sequences))
            ],
            "faults": ledger.audit() if self._open is None else [],
        }


def _check_limits(limits: Limits) -> None:
    for name in ("blocks", "block_size", "max_running", "max_step_tokens", "max_model_len"):
        if getattr(limits, name) < 1:
            raise ValueError(f"{name} is {getattr(limits, name)} and must be at least 1")
    if limits.swap_blocks < 0:
        raise ValueError("swap_blocks cannot be negative")
