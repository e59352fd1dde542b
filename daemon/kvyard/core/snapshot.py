"""What policies see, as views on the ledger: nothing is copied until it is asked for.

A view reads through to the ledger, so it is frozen exactly as long as the core does not write, which it
does not while a policy runs. There is no way to write through one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvyard.core.lifecycle import State
from kvyard.core.sequence import NO_ROW

if TYPE_CHECKING:
    from kvyard.core.ledger import Ledger
    from kvyard.core.sequence import SequenceState
    from kvyard.core.step import StepState
    from kvyard.policy.snapshot import Counts, Ended, FloatColumn, IntColumn, Kept, StepTime

N = TypeVar("N", np.int64, np.float64)


class ReadOnly:
    """Objects handed to policies cannot be changed by them."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"policies read, the core writes: {type(self).__name__}.{name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"policies read, the core writes: {type(self).__name__}.{name} cannot be deleted")


class View(ReadOnly):
    """A sequence as a policy sees it (`kvyard.policy.RequestView`); made once, read through."""

    __slots__ = ("_ledger", "_seq")
    _ledger: Ledger
    _seq: SequenceState

    def __init__(self, ledger: Ledger, seq: SequenceState) -> None:
        object.__setattr__(self, "_ledger", ledger)
        object.__setattr__(self, "_seq", seq)

    def __repr__(self) -> str:
        return f"<sequence {self.id}, {self._seq.state.value}>"

    @property
    def id(self) -> int:
        return self._seq.id

    @property
    def arrival(self) -> int:
        return self._seq.arrival

    @property
    def arrived(self) -> float:
        return self._seq.arrived

    @property
    def priority(self) -> int:
        return self._seq.priority

    @property
    def tenant(self) -> str:
        return self._seq.tenant

    @property
    def deadline(self) -> float | None:
        return self._seq.deadline

    @property
    def prompt_len(self) -> int:
        return self._seq.prompt_len

    @property
    def max_new(self) -> int:
        return self._seq.max_new

    @property
    def kv_max(self) -> int:
        return self._seq.prompt_len + self._seq.max_new - 1

    @property
    def total(self) -> int:
        seq = self._seq
        return seq.total if seq.row == NO_ROW else int(self._ledger.cols.total[seq.row])

    @property
    def generated(self) -> int:
        return self.total - self._seq.prompt_len

    @property
    def remaining(self) -> int:
        return self._seq.limit - self.total

    @property
    def computed(self) -> int:
        seq = self._seq
        return seq.computed if seq.row == NO_ROW else int(self._ledger.cols.computed[seq.row])

    @property
    def wanted(self) -> int:
        return self.total - self.computed

    @property
    def blocks(self) -> int:
        row = self._seq.row
        return 0 if row == NO_ROW else self._ledger.cols.block_count(row)

    @property
    def hits(self) -> int:
        seq, ledger = self._seq, self._ledger
        if seq.row != NO_ROW:
            return 0
        hits, fork = len(ledger.hits(seq)), ledger.fork(seq)
        return hits if fork is None else max(hits, len(fork.blocks))

    @property
    def preemptions(self) -> int:
        return self._seq.preemptions

    @property
    def kept(self) -> Kept:
        return "swapped" if self._seq.state is State.SWAPPED else "none"


class WaitingView(ReadOnly):
    """The waiting sequences in order, walked lazily."""

    __slots__ = ("_ledger",)
    _ledger: Ledger

    def __init__(self, ledger: Ledger) -> None:
        object.__setattr__(self, "_ledger", ledger)

    def __len__(self) -> int:
        return len(self._ledger.queue)

    def __iter__(self) -> Iterator[View]:
        return map(self._ledger.view, self._ledger.queue)


class RunningViews(Sequence["View"]):
    """The running sequences in order of admission; the views are gathered when one is asked for."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __len__(self) -> int:
        return self._ledger.running

    @overload
    def __getitem__(self, index: int) -> View: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[View, ...]: ...
    def __getitem__(self, index: int | slice) -> View | tuple[View, ...]:
        return self._ledger.views()[index]

    def __iter__(self) -> Iterator[View]:
        return iter(self._ledger.views())

    def __reversed__(self) -> Iterator[View]:
        return reversed(self._ledger.views())


class RunningColumns(ReadOnly):
    """Read-only columns over the running sequences, in order of admission; each is made when asked for."""

    __slots__ = ("_ledger",)
    _ledger: Ledger

    def __init__(self, ledger: Ledger) -> None:
        object.__setattr__(self, "_ledger", ledger)

    def _column(self, values: npt.NDArray[N]) -> npt.NDArray[N]:
        column = values[self._ledger.cols.order]
        column.flags.writeable = False
        return column

    @property
    def id(self) -> IntColumn:
        return self._column(self._ledger.cols.id)

    @property
    def arrival(self) -> IntColumn:
        return self._column(self._ledger.cols.arrival)

    @property
    def arrived(self) -> FloatColumn:
        return self._column(self._ledger.cols.arrived)

    @property
    def priority(self) -> IntColumn:
        return self._column(self._ledger.cols.priority)

    @property
    def prompt_len(self) -> IntColumn:
        return self._column(self._ledger.cols.prompt_len)

    @property
    def total(self) -> IntColumn:
        return self._column(self._ledger.cols.total)

    @property
    def computed(self) -> IntColumn:
        return self._column(self._ledger.cols.computed)

    @property
    def generated(self) -> IntColumn:
        return self._column(self._ledger.cols.total - self._ledger.cols.prompt_len)

    @property
    def remaining(self) -> IntColumn:
        return self._column(self._ledger.cols.limit - self._ledger.cols.total)

    @property
    def kv_max(self) -> IntColumn:
        return self._column(self._ledger.cols.limit - 1)

    @property
    def blocks(self) -> IntColumn:
        return self._column(self._ledger.cols.capacity // self._ledger.block_size)


class CoreSnapshot(ReadOnly):
    """`kvyard.policy.Snapshot` over the ledger and the step under way; one object for the core's life."""

    __slots__ = ("_ledger", "_step_state", "cols", "count", "step_time", "waiting")
    _ledger: Ledger
    _step_state: StepState
    cols: RunningColumns
    count: Counts
    step_time: StepTime
    waiting: WaitingView

    def __init__(self, ledger: Ledger, step_state: StepState, step_time: StepTime) -> None:
        put = object.__setattr__
        put(self, "_ledger", ledger)
        put(self, "_step_state", step_state)
        put(self, "cols", RunningColumns(ledger))
        put(self, "count", CountsView(ledger))
        put(self, "step_time", step_time)
        put(self, "waiting", WaitingView(ledger))

    @property
    def step(self) -> int:
        return self._ledger.step

    @property
    def now(self) -> float:
        return self._ledger.now

    @property
    def block_size(self) -> int:
        return self._ledger.block_size

    @property
    def blocks(self) -> int:
        return self._ledger.pool.blocks

    @property
    def free(self) -> int:
        return self._ledger.pool.free

    @property
    def free_cached(self) -> int:
        return self._ledger.pool.free_cached

    @property
    def budget(self) -> int:
        return self._ledger.max_step_tokens

    @property
    def left(self) -> int:
        return self._step_state.left

    @property
    def left_prompts(self) -> int:
        return max(0, min(self._step_state.left, self._step_state.left_prompts))

    @property
    def placed(self) -> int:
        return self._step_state.placed

    @property
    def slots(self) -> int:
        return self._ledger.max_running - self._ledger.running

    @property
    def max_running(self) -> int:
        return self._ledger.max_running

    @property
    def running(self) -> RunningViews:
        return RunningViews(self._ledger)

    @property
    def decoding(self) -> int:
        return self._ledger.running - self._ledger.prompts

    @property
    def preempted(self) -> tuple[int, ...]:
        return tuple(self._step_state.preempted)

    @property
    def ended(self) -> tuple[Ended, ...]:
        return tuple(self._ledger.ended)

    def blocks_for(self, tokens: int) -> int:
        return self._ledger.blocks_for(tokens)


class CountsView(ReadOnly):
    """Cumulative counters, read through."""

    __slots__ = ("_ledger",)
    _ledger: Ledger

    def __init__(self, ledger: Ledger) -> None:
        object.__setattr__(self, "_ledger", ledger)

    @property
    def preempted(self) -> int:
        return self._ledger.count.preempted

    @property
    def finished(self) -> int:
        return self._ledger.count.finished

    @property
    def admitted(self) -> int:
        return self._ledger.count.admitted

    @property
    def decode_steps(self) -> int:
        return self._ledger.count.decode_steps

    @property
    def last_prefill(self) -> int:
        return self._ledger.count.last_prefill
