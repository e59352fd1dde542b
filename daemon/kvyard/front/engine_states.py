"""The engine process as the front sees it: one table, no I/O.

down -> starting -> ready -> lost -> starting ...
                \\-> refused          (it said why it cannot start)
any  -> leaving -> down              (the front stops it)
"""

from __future__ import annotations

from enum import Enum


class EngineState(Enum):
    """States of the engine process."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    LOST = "recovering"
    REFUSED = "refused"
    LEAVING = "leaving"


class EngineEvent(Enum):
    """What can happen to it."""

    SPAWNED = "spawned"
    SERVES = "serves"
    REFUSES = "refuses"
    DIED = "died"
    STOPPED = "stopped"


S, E = EngineState, EngineEvent

TRANSITIONS: dict[tuple[EngineState, EngineEvent], EngineState] = {
    (S.DOWN, E.SPAWNED): S.STARTING,
    (S.LOST, E.SPAWNED): S.STARTING,
    (S.STARTING, E.SERVES): S.READY,
    (S.STARTING, E.REFUSES): S.REFUSED,
    (S.STARTING, E.DIED): S.LOST,
    (S.READY, E.DIED): S.LOST,
    # A refusing engine exits by itself after its last word; the state keeps saying why.
    (S.REFUSED, E.DIED): S.REFUSED,
    (S.REFUSED, E.SPAWNED): S.STARTING,
    (S.DOWN, E.STOPPED): S.DOWN,
    (S.STARTING, E.STOPPED): S.LEAVING,
    (S.READY, E.STOPPED): S.LEAVING,
    (S.LOST, E.STOPPED): S.DOWN,
    (S.REFUSED, E.STOPPED): S.LEAVING,
    (S.LEAVING, E.STOPPED): S.LEAVING,
    (S.LEAVING, E.SERVES): S.LEAVING,
    (S.LEAVING, E.REFUSES): S.LEAVING,
    (S.LEAVING, E.DIED): S.DOWN,
}
"""What is not in the table cannot happen; asking for it is a bug of the supervisor."""


def next_state(state: EngineState, event: EngineEvent) -> EngineState:
    """The state after `event`. Raises KeyError for what cannot happen."""
    return TRANSITIONS[state, event]
