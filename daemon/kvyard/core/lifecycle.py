"""The life of a sequence as one table: states, events, and which event leads where. No I/O, no data.

    waiting --admit--> running --finish--> finished
       ^                 |  |
       |                 |  +--preempt---> preempted --admit--> running
       +----withdraw-----+  +--swap_out--> swapped   --admit--> running

`preempted` kept nothing and computes its tokens again; `swapped` has its KV in the host pool. All three of
waiting, preempted and swapped stand in the waiting queue. `withdraw` undoes a first admission whose step
failed. Every state but `finished` can finish.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal


class State(Enum):
    """Where a sequence is in its life; the values are the words that operators see."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"

    __hash__ = object.__hash__  # Enum's own is Python code, and the table is looked up for every start and end


class Event(Enum):
    """What can happen to a sequence."""

    ADMIT = "admit"
    WITHDRAW = "withdraw"
    PREEMPT = "preempt"
    SWAP_OUT = "swap_out"
    LOSE_HOST = "lose_host"
    """The copy in the host pool cannot be trusted (its step failed): compute the tokens again."""
    FINISH = "finish"

    __hash__ = object.__hash__


FinishReason = Literal["stop", "length", "cancelled", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "cancelled", "error")
QUEUED = frozenset({State.WAITING, State.PREEMPTED, State.SWAPPED})
"""States in which a sequence stands in the waiting queue."""

TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.RUNNING,
    (State.PREEMPTED, Event.ADMIT): State.RUNNING,
    (State.SWAPPED, Event.ADMIT): State.RUNNING,
    (State.RUNNING, Event.WITHDRAW): State.WAITING,
    (State.RUNNING, Event.PREEMPT): State.PREEMPTED,
    (State.RUNNING, Event.SWAP_OUT): State.SWAPPED,
    (State.SWAPPED, Event.LOSE_HOST): State.PREEMPTED,
    (State.WAITING, Event.FINISH): State.FINISHED,
    (State.RUNNING, Event.FINISH): State.FINISHED,
    (State.PREEMPTED, Event.FINISH): State.FINISHED,
    (State.SWAPPED, Event.FINISH): State.FINISHED,
}


class IllegalTransition(RuntimeError):
    """An event that the table does not allow in this state: a defect of the core, never of a policy."""


def after(state: State, event: Event) -> State:
    """The state that `event` leads to. Raises IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a {state.value} sequence cannot {event.value}") from None
