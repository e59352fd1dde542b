"""The policies that cannot be removed: they take over in the step in which another one is put out.

vLLM's shape with an order by priority that ages, so that nobody waits for ever. They are plain on purpose:
no parameters, no state, nothing that can fail.
"""

from __future__ import annotations

import numpy as np

from kvyard.policy.base import AdmissionPolicy, Kind, Policy, PreemptionPolicy, PrefillPolicy
from kvyard.policy.decisions import Admission, Cause, LinearKey, Victims, nobody
from kvyard.policy.snapshot import RequestView, Snapshot

AGING = 0.1
"""Priority levels that a waiting request gains in a second."""


class BuiltinAdmission(AdmissionPolicy):
    """By priority with linear aging; the first that does not fit holds the others back."""

    name = "builtin"

    key = LinearKey(priority=1.0, arrived=AGING)

    def admit(self, s: Snapshot) -> Admission:
        if s.preempted:
            return nobody("after a preemption")
        return Admission(s.waiting, keep=s.blocks // 100 if s.running else 0)


class BuiltinPreemption(PreemptionPolicy):
    """The least urgent by the same order goes first, and computes again."""

    name = "builtin"

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        if cause == "admission":
            return Victims(())
        running, cols = s.running, s.cols
        order = np.lexsort((cols.arrival, cols.priority + AGING * cols.arrived))[::-1]
        return Victims([running[i] for i in order.tolist()], self_ends=True)


class BuiltinPrefill(PrefillPolicy):
    """Whatever runs first, then newcomers, in one token budget."""

    name = "builtin"


BUILTIN: dict[Kind, type[Policy]] = {
    "admission": BuiltinAdmission,
    "preemption": BuiltinPreemption,
    "prefill": BuiltinPrefill,
}
