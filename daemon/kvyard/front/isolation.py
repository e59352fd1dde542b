"""Which request ends the engine? Suspects run one at a time until it is known. No I/O here.

Each death adds its weight to every sequence of the step in progress. From SUSPECT on, a sequence is a
suspect, and while there is one the engine gets nothing else: the suspects run alone, one after the
other, each until it has made CLEARED_AFTER new tokens or ended. Only a sequence that was alone when the
engine died is failed. A `kill -9` from outside weighs little, because no request sends one: an operator
who kills the engine again and again must not fail his clients.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvyard.front.engine_child import EngineDeath
from kvyard.front.journal import Entry, Journal
from kvyard.link.progress import EnginePhase, Progress

SUSPECT = 2.0
GUILTY_ALONE = 1.0
CLEARED_AFTER = 4
FULL_WEIGHT = 1.0
KILL_WEIGHT = 0.1


class Isolation:
    """Decides what the engine may have now."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._alone: Entry | None = None
        self._outputs_before = 0
        self._leaving: Entry | None = None

    @property
    def alone(self) -> Entry | None:
        """The suspect that runs by itself, if one does."""
        return self._alone

    def blame(self, death: EngineDeath) -> list[Entry]:
        """Weigh a death; the sequences found guilty, which are to be failed."""
        seen = death.progress
        entries = self._in_question(seen) if seen is not None and death.policy_at_fault is None else []
        weight = KILL_WEIGHT if death.unexplained_kill else FULL_WEIGHT
        for entry in entries:
            entry.suspicion += weight
        alone, self._alone, self._leaving = self._alone, None, None
        if alone is not None and entries == [alone]:
            alone.alone += weight
            if alone.alone >= GUILTY_ALONE:
                return [alone]
        return []

    def _in_question(self, seen: Progress) -> list[Entry]:
        """Sequences of the step in progress; before it is planned, also those that the engine has not begun with."""
        entries = [entry for entry in map(self._journal.get, seen.ids) if entry is not None] if seen.in_step else []
        if seen.phase in (EnginePhase.INBOX, EnginePhase.SCHEDULE):
            entries += [e for e in self._journal if e.submitted and e.state == "waiting" and e not in entries]
        return entries

    def suspects(self) -> list[Entry]:
        """Those that must run alone, the least often hit first, so that one never waits behind its own deaths."""
        found = [entry for entry in self._journal if entry.suspicion >= SUSPECT]
        return sorted(found, key=lambda entry: (entry.alone, entry.id))

    def next(self) -> Iterable[Entry]:
        """What to submit now: one suspect, or everything that the engine does not have yet."""
        if self._alone is not None or self._leaving is not None:
            return ()
        suspects = self.suspects()
        if suspects:
            self._alone, self._outputs_before = suspects[0], suspects[0].outputs
            return suspects[:1]
        return [entry for entry in self._journal if not entry.submitted]

    def holds(self) -> bool:
        """New requests have to wait in the front."""
        return self._alone is not None or self._leaving is not None

    def pause(self, entry: Entry) -> None:
        """A cleared suspect is on its way out of the engine; until `resume` nothing else may enter."""
        self._leaving = entry

    def resume(self) -> None:
        """It is out."""
        self._leaving = None

    def cleared(self) -> Entry | None:
        """The lone suspect, once it has shown that it does no harm; it has to be taken out of the engine."""
        entry = self._alone
        if entry is None or entry.outputs - self._outputs_before < CLEARED_AFTER:
            return None
        entry.suspicion, self._alone = 0.0, None
        return entry

    def ended(self, entry: Entry) -> bool:
        """A sequence ended; True when it was the lone suspect and the next may come."""
        if entry is not self._alone:
            return False
        self._alone = None
        return True
