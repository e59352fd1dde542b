"""The request journal: every unfinished sequence, whole enough to be given to a new engine.

It holds the prompt, the parameters, the seed and the tokens already sent, so that a stream goes on
after an engine's death: what was sent stands and nothing is repeated. No I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvyard.link.messages import Sequence
from kvyard.link.record import StepRecord


@dataclass(slots=True, eq=False)
class Entry:
    """One unfinished sequence. Times are CLOCK_MONOTONIC seconds."""

    sequence: Sequence
    request_id: str
    owner: Any
    """The generation that its deltas go to."""
    queue_until: float | None = None
    """When it gives up waiting for its first admission."""
    emitted: bytearray = field(default_factory=bytearray)
    """Output tokens sent so far, int32."""
    submitted: bool = False
    """The present engine has it."""
    state: str = "waiting"
    """waiting, running, preempted, swapped: for the operator's list."""
    reason: str = ""
    computed: int = 0
    preemptions: int = 0
    admitted_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    suspicion: float = 0.0
    """Engine deaths it may have to do with; see isolation."""
    alone: float = 0.0
    """Engine deaths while nothing else ran."""

    @property
    def id(self) -> int:
        """The sequence's id."""
        return self.sequence.id

    @property
    def outputs(self) -> int:
        """Output tokens so far."""
        return len(self.emitted) // 4

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens."""
        return len(self.sequence.prompt) // 4


class Journal:
    """The unfinished sequences by id, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self.waiting = 0
        """Sequences never admitted yet."""
        self.waiting_tokens = 0
        """Their prompt tokens."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, sequence_id: int) -> Entry | None:
        """The entry, None when it has ended."""
        return self._entries.get(sequence_id)

    def add(self, entry: Entry) -> None:
        """Take up a sequence."""
        self._entries[entry.id] = entry
        self.waiting += 1
        self.waiting_tokens += entry.prompt_tokens

    def admitted(self, entry: Entry, at: float) -> bool:
        """It was admitted; True the first time."""
        if entry.admitted_at is not None:
            return False
        entry.admitted_at = at
        self._leave_queue(entry)
        return True

    def end(self, sequence_id: int) -> Entry | None:
        """It ended, however; None when it had ended before."""
        entry = self._entries.pop(sequence_id, None)
        if entry is not None and entry.admitted_at is None:
            self._leave_queue(entry)
        return entry

    def _leave_queue(self, entry: Entry) -> None:
        self.waiting -= 1
        self.waiting_tokens -= entry.prompt_tokens

    def engine_lost(self) -> None:
        """No engine has anything now."""
        for entry in self._entries.values():
            entry.submitted = False
            entry.state, entry.reason, entry.computed = "waiting", "engine restarts", 0

    def step(self, record: StepRecord) -> None:
        """Keep the operator's view of each sequence from the step record."""
        entries = self._entries
        for sequence_id, cached in record.admitted:
            if (entry := entries.get(sequence_id)) is not None:
                entry.state, entry.reason = "running", ""
                entry.computed = cached
        for sequence_id, tokens in record.resident:
            if (entry := entries.get(sequence_id)) is not None:
                entry.computed = tokens
        ids = np.frombuffer(record.ids, np.int64).tolist()
        for sequence_id, granted in zip(ids, np.frombuffer(record.granted, np.int32).tolist(), strict=True):
            if (entry := entries.get(sequence_id)) is not None:
                entry.computed += granted
        for preemption in record.preempted:
            if (entry := entries.get(preemption.id)) is not None:
                entry.preemptions += 1
                entry.state = "swapped" if preemption.how == "swap" else "preempted"
                entry.computed = entry.computed if preemption.how == "swap" else 0
        for wait in record.waits:
            if (entry := entries.get(wait.id)) is not None:
                entry.reason = wait.reason

    def for_engine(self, entry: Entry) -> Sequence:
        """The sequence as the engine must take it up now: behind the tokens already sent."""
        entry.sequence.emitted = bytes(entry.emitted)
        return entry.sequence


def tokens_of(column: bytes) -> Iterable[int]:
    """The ids of an int32 column."""
    values: list[int] = np.frombuffer(column, np.int32).tolist()
    return values
