"""The journal: what is unfinished, what a new engine is given, what the operator's list shows."""

from __future__ import annotations

import numpy as np
from kvyard.front.journal import Entry, Journal
from kvyard.link.codec import encode_sampling
from kvyard.link.messages import Sampling, Sequence
from kvyard.link.record import Preemption, StepRecord, Timings, Wait


def entry(sequence_id: int, prompt: int = 3) -> Entry:
    sequence = Sequence(
        id=sequence_id,
        request=sequence_id,
        index=0,
        arrived=0.0,
        prompt=np.arange(prompt, dtype=np.int32).tobytes(),
        max_new=5,
        sampling=encode_sampling(Sampling(seed=1)),
    )
    return Entry(sequence, f"r{sequence_id}", None)


def record(granted: dict[int, int] | None = None, **changes: object) -> StepRecord:
    values: dict[str, object] = {
        "step": 1,
        "at": 0.0,
        "timings": Timings(0, 0, 0, 0, 0, 0),
        "ids": np.array(list(granted or {}), np.int64).tobytes(),
        "granted": np.array(list((granted or {}).values()), np.int32).tobytes(),
        "prompt_tokens": 0,
        "decode_tokens": 0,
        "running": 0,
        "waiting": 0,
        "swapped": 0,
        "blocks_used": 0,
        "blocks_cached": 0,
        "blocks_free": 0,
    }
    return StepRecord(**{**values, **changes})  # type: ignore[arg-type]  # keywords checked by msgspec


def test_waiting_is_what_was_never_admitted() -> None:
    journal = Journal()
    for number in (1, 2, 3):
        journal.add(entry(number, prompt=10 * number))
    assert (journal.waiting, journal.waiting_tokens, len(journal)) == (3, 60, 3)
    first = journal.get(1)
    assert first is not None
    assert journal.admitted(first, 1.5)
    assert not journal.admitted(first, 2.5)
    assert first.admitted_at == 1.5
    assert (journal.waiting, journal.waiting_tokens) == (2, 50)
    journal.end(1)
    journal.end(2)
    assert journal.end(2) is None
    assert (journal.waiting, journal.waiting_tokens, len(journal)) == (1, 30, 1)


def test_a_new_engine_goes_on_behind_what_was_sent() -> None:
    journal = Journal()
    mine = entry(1)
    journal.add(mine)
    for token in (70000, 5):
        mine.emitted += token.to_bytes(4, "little", signed=True)
    given = journal.for_engine(mine)
    assert np.frombuffer(given.emitted, np.int32).tolist() == [70000, 5]
    assert mine.outputs == 2


def test_the_record_tells_each_sequences_state() -> None:
    journal = Journal()
    mine = entry(1)
    journal.add(mine)
    journal.step(record(waits=[Wait(1, "blocks")]))
    assert (mine.state, mine.reason) == ("waiting", "blocks")
    journal.step(record({1: 8}, admitted=[(1, 16)]))
    assert (mine.state, mine.reason, mine.computed) == ("running", "", 24)
    journal.step(record({1: 1}))
    assert mine.computed == 25
    journal.step(record(preempted=[Preemption(1, 2, "growth", "swap", 25)]))
    assert (mine.state, mine.computed, mine.preemptions) == ("swapped", 25, 1)
    journal.step(record(preempted=[Preemption(1, 2, "growth", "recompute", 25)]))
    assert (mine.state, mine.computed, mine.preemptions) == ("preempted", 0, 2)
    journal.engine_lost()
    assert (mine.state, mine.reason) == ("waiting", "engine restarts")


def test_records_of_what_has_ended_are_passed_over() -> None:
    journal = Journal()
    journal.add(entry(1))
    journal.step(record({9: 1}, admitted=[(9, 0)], waits=[Wait(9, "x")], preempted=[Preemption(9, 1, "a", "b", 1)]))
    (other,) = journal
    assert (other.id, other.state, other.computed, other.preemptions) == (1, "waiting", 0, 0)


def test_what_came_back_or_was_taken_over_counts_as_computed() -> None:
    journal = Journal()
    for number in (1, 2, 3):
        journal.add(entry(number))
    journal.step(record({1: 40}, admitted=[(1, 0)]))
    journal.step(record(preempted=[Preemption(1, 2, "growth", "swap", 40)]))
    journal.step(record({1: 1, 2: 1, 3: 5}, admitted=[(1, 0), (2, 0), (3, 16)], resident=[(1, 40), (2, 39), (9, 7)]))
    assert [each.computed for each in journal] == [41, 40, 21]
