"""Policies whose decisions a test writes down, and a record of what they were asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvyard.core.advice import PolicySet
from kvyard.policy import (
    RUNNING_FIRST,
    Admission,
    AdmissionPolicy,
    Cause,
    PreemptionPolicy,
    PrefillPolicy,
    RequestView,
    Shape,
    Snapshot,
    Victims,
)


class ScriptedAdmission(AdmissionPolicy):
    """Answers with `decide`; `asked` counts."""

    name = "scripted"

    def __init__(self, decide: Callable[[Snapshot], Any] | None = None, evicts: bool = False) -> None:
        super().__init__()
        self.decide = decide or (lambda s: Admission(s.waiting))
        self.evicts = evicts  # type: ignore[misc]  # fixed for this object's life
        self.asked = 0

    def admit(self, s: Snapshot) -> Admission:
        self.asked += 1
        answer: Admission = self.decide(s)
        return answer


class ScriptedPreemption(PreemptionPolicy):
    """Answers with `decide`; `asked` keeps who was short of how many blocks, and why."""

    name = "scripted"

    def __init__(
        self, decide: Callable[[Snapshot, RequestView, Cause], Any] | None = None, lookahead: int = 1
    ) -> None:
        super().__init__()
        self.decide = decide or (lambda s, who, cause: Victims(reversed(s.running) if cause == "growth" else ()))
        self.lookahead = lookahead  # type: ignore[misc]  # fixed for this object's life
        self.asked: list[tuple[int, int, str]] = []

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        self.asked.append((who.id, short, cause))
        answer: Victims = self.decide(s, who, cause)
        return answer


class ScriptedPrefill(PrefillPolicy):
    """Answers with a fixed shape and with `share`."""

    name = "scripted"

    def __init__(
        self, shape: Shape = RUNNING_FIRST, share: Callable[[Snapshot, Sequence[RequestView], int], Any] | None = None
    ) -> None:
        super().__init__()
        self.fixed = shape
        self.share = share or (lambda s, prompts, left: [left] * len(prompts))
        self.asked: list[tuple[list[int], int]] = []

    def shape(self, s: Snapshot) -> Shape:
        return self.fixed

    def divide(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> Sequence[int]:
        self.asked.append(([view.id for view in prompts], left))
        answer: Sequence[int] = self.share(s, prompts, left)
        return answer


def scripted_set(
    admission: AdmissionPolicy | None = None,
    preemption: PreemptionPolicy | None = None,
    prefill: PrefillPolicy | None = None,
) -> PolicySet:
    """One policy of each kind, scripted with its defaults where none is given."""
    return PolicySet(
        admission or ScriptedAdmission(), preemption or ScriptedPreemption(), prefill or ScriptedPrefill()
    )


def by_id(s: Snapshot, *ids: int) -> list[RequestView]:
    """Views of these sequences, running or waiting."""
    views = {view.id: view for view in [*s.running, *s.waiting]}
    return [views[id] for id in ids]
