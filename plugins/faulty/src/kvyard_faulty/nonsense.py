"""Raises, or returns what is no decision."""

from collections.abc import Sequence
from typing import Any

from kvyard.policy import (
    ADMIT,
    Admission,
    Cause,
    PreemptionPolicy,
    PrefillPolicy,
    RequestView,
    Shape,
    Snapshot,
    Victims,
)

from kvyard_faulty.trigger import FaultyAdmission


class Raises(FaultyAdmission):
    """Raises an exception."""

    def fault(self, s: Snapshot) -> Admission:
        raise ZeroDivisionError(f"in step {s.step}")


class ReturnsNone(FaultyAdmission):
    """Forgets to return."""

    def fault(self, s: Snapshot) -> Any:
        return None


class Garbage(FaultyAdmission):
    """Returns an Admission of garbage."""

    def fault(self, s: Snapshot) -> Any:
        return Admission(entries=[b"\0", {}, 7], keep=-1.5, skip="many", refuse=3)  # type: ignore[arg-type]


class UnknownIds(FaultyAdmission):
    """Names ids that nobody has."""

    def fault(self, s: Snapshot) -> Any:
        return Admission([999_999, 1_000_000])  # type: ignore[list-item]


class FinishedIds(FaultyAdmission):
    """Admits a sequence that has long ended: it kept a view."""

    kept: RequestView | None = None

    def admit(self, s: Snapshot) -> Admission:
        if self.kept is None and s.running:
            self.kept = min(s.running, key=lambda r: r.remaining)
        elif self.kept is not None and all(r.id != self.kept.id for r in (*s.running, *s.waiting)):
            return Admission([self.kept])
        return Admission(s.waiting)


class Duplicates(FaultyAdmission):
    """Names one request twice."""

    def fault(self, s: Snapshot) -> Admission:
        first = next(iter(s.waiting))
        return Admission([first, first], evict=True)


class VictimsRaise(PreemptionPolicy):
    """Raises while it chooses a victim, and while its exception is told."""

    api = (1, 0)

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        class Rude(Exception):
            def __str__(self) -> str:
                raise SystemExit(1)

        raise Rude


class Negative(PrefillPolicy):
    """Grants a negative number of tokens."""

    api = (1, 0)

    def divide(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> list[int]:
        return [-1] * len(prompts) if len(s.waiting) >= 12 else [left] * len(prompts)


class BadShape(PrefillPolicy):
    """Returns a Shape of lists and texts."""

    api = (1, 0)

    def shape(self, s: Snapshot) -> Shape:
        if len(s.running) >= 8:
            return Shape((["running", ADMIT],))  # type: ignore[arg-type]
        return super().shape(s)
