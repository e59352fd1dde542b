"""Earliest deadline first, with those that cannot be in time any more behind those that can.

Source: earliest deadline first (Liu and Layland, 1973), as router-level schedulers apply it to LLM requests.
Plain EDF collapses under overload, since it spends its time on requests that are late already; the on-line
step-time model tells which these are. It gives up the order of arrival and the requests that are late; it
wins the most answers in time. Neither who is late nor who has plenty of time waits for ever (`PassedOver`).
"""

from __future__ import annotations

from itertools import chain, islice

import numpy as np
from kvyard.policy import (
    Admission,
    AdmissionPolicy,
    Cause,
    Discipline,
    OrderKey,
    PolicyParams,
    PreemptionPolicy,
    RequestView,
    Snapshot,
    Value,
    Victims,
    live,
    nobody,
)

from kvyard_policies.passed_over import PassedOver

PATIENCE = 60.0
WINDOW = 256
"""Waiting requests that are sorted into early and late in a step."""


class DeadlineAdmission(AdmissionPolicy):
    """The earliest deadline comes in first; who will be late whatever happens waits behind, or is ended."""

    name = "deadline"

    class Params(PolicyParams):
        """What a deadline is where none was given, and what becomes of those who are late."""

        patience: float = live(PATIENCE, ge=0.001, unit="seconds", doc="Deadline after arrival where none was given.")
        late: str = live("last", choices=("last", "refuse", "keep"), doc="Late requests: behind, ended, or in order.")

    params: Params

    def __init__(self, **values: Value) -> None:
        super().__init__(**values)
        self._passed_over = PassedOver()

    def key(self, r: RequestView) -> OrderKey:
        return (_deadline(r, self.params.patience),)

    def admit(self, s: Snapshot) -> Admission:
        if s.preempted:
            return nobody("after a preemption")
        keep = s.blocks // 100 if s.running else 0
        due = self._passed_over.due(s)
        first = () if due is None else (due,)
        if self.params.late == "keep":
            return Admission(
                s.waiting if due is None else chain(first, (r for r in s.waiting if r is not due)), keep=keep
            )
        early, late = list[RequestView](), list[RequestView]()
        for r in islice(s.waiting, WINDOW):
            in_time = s.now + self._seconds(s, r) <= _deadline(r, self.params.patience)
            (early if in_time else late).append(r)
        # A request that named no deadline is never ended for being late.
        refused = [r for r in late if r.deadline is not None] if self.params.late == "refuse" else []
        texts = tuple((r, "its deadline would have passed before its answer was complete") for r in refused)
        kept = [r for r in late if r.deadline is None] if refused else late
        behind = [r for r in (*early, *kept) if r is not due]
        return Admission([*(r for r in first if r not in refused), *behind], keep=keep, refuse=texts)

    @staticmethod
    def _seconds(s: Snapshot, r: RequestView) -> float:
        """Expected time from now to its last token, if it came in at once; 0.0 before the model is fitted."""
        decodes = s.decoding + 1
        prefill = s.step_time.seconds(s.decoding, r.wanted)
        return prefill + s.step_time.seconds(decodes, 0) * (r.remaining - 1)


class DeadlinePreemption(PreemptionPolicy):
    """The latest deadline goes first."""

    name = "deadline"

    class Params(PolicyParams):
        """What a deadline is where none was given."""

        patience: float = live(PATIENCE, ge=0.001, unit="seconds", doc="Deadline after arrival where none was given.")

    params: Params

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        if cause == "admission":
            return Victims(())
        views = list(s.running)
        deadlines = np.array([_deadline(r, self.params.patience) for r in views])
        order = np.lexsort((s.cols.arrival, deadlines))[::-1]
        return Victims([views[i] for i in order.tolist()], self_ends=True)


def _deadline(r: RequestView, patience: float) -> float:
    return r.arrived + patience if r.deadline is None else r.deadline


class Deadline(Discipline):
    """Earliest deadline first, those that will be late behind."""

    name = "deadline"
    doc = "the earliest deadline first, those that will be late behind"
    parts = {
        "admission": ("deadline", {}),
        "preemption": ("deadline", {}),
        "prefill": ("vllm", {}),
    }
