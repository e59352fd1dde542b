"""The lifecycle table: every state can end, nothing leaves the end, and the core only makes legal moves."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.core.lifecycle import FINISH_REASONS, QUEUED, TRANSITIONS, Event, IllegalTransition, State, after
from kvyard.core.sequence import SequenceState

from tests.core.harness import spec


@given(st.lists(st.sampled_from(Event)))
def test_any_walk_stays_in_the_table(events: list[Event]) -> None:
    seq = SequenceState(spec(1), None)
    for event in events:
        before = seq.state
        if (before, event) in TRANSITIONS:
            seq.move(event)
            assert seq.state is TRANSITIONS[before, event]
        else:
            with pytest.raises(IllegalTransition, match=f"a {before.value} sequence cannot {event.value}"):
                seq.move(event)
            assert seq.state is before, "a refused event changes nothing"


def test_every_state_but_the_last_can_finish() -> None:
    for state in State:
        if state is State.FINISHED:
            assert not [event for event in Event if (state, event) in TRANSITIONS]
        else:
            assert after(state, Event.FINISH) is State.FINISHED


def test_every_state_is_reached_from_the_first() -> None:
    reached, todo = {State.WAITING}, deque([State.WAITING])
    while todo:
        state = todo.popleft()
        for event in Event:
            target = TRANSITIONS.get((state, event))
            if target is not None and target not in reached:
                reached.add(target)
                todo.append(target)
    assert reached == set(State)


def test_only_what_waits_can_be_admitted() -> None:
    assert {state for state in State if (state, Event.ADMIT) in TRANSITIONS} == QUEUED
    assert {after(state, Event.ADMIT) for state in QUEUED} == {State.RUNNING}


def test_every_event_of_the_table_has_a_use_and_every_reason_is_a_word() -> None:
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert len(set(FINISH_REASONS)) == 4
