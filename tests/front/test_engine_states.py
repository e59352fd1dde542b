"""The engine's states: the table is closed, every way out leads on, and a stop always ends it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.engine_states import TRANSITIONS, EngineEvent, EngineState, next_state


def test_every_state_can_be_stopped_and_left() -> None:
    for state in EngineState:
        assert (state, EngineEvent.STOPPED) in TRANSITIONS
    reached = set(TRANSITIONS.values())
    assert reached == set(EngineState)


@given(st.lists(st.sampled_from(EngineEvent), max_size=30))
def test_a_stopped_engine_never_serves(events: list[EngineEvent]) -> None:
    state, stopped = EngineState.DOWN, False
    for event in events:
        if (state, event) not in TRANSITIONS:
            continue
        stopped = (stopped or event is EngineEvent.STOPPED) and event is not EngineEvent.SPAWNED
        state = next_state(state, event)
        assert not (stopped and state is EngineState.READY)


def test_what_cannot_happen_is_a_bug() -> None:
    with pytest.raises(KeyError):
        next_state(EngineState.READY, EngineEvent.SPAWNED)
    with pytest.raises(KeyError):
        next_state(EngineState.DOWN, EngineEvent.SERVES)
