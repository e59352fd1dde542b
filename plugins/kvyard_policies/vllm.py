"""vLLM's V1 scheduler: what runs comes first, then newcomers, in one token budget per step.

Source: vLLM 0.32.0, `vllm/v1/core/sched/scheduler.py`. Reproduced decision by decision: the whole prompt must
fit at admission, the first newcomer that does not fit holds the others back, nobody is admitted in a step
that preempted, and a request that becomes its own victim ends the phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from kvyard.policy import (
    Admission,
    AdmissionPolicy,
    Cause,
    Divide,
    LinearKey,
    PolicyParams,
    PreemptionPolicy,
    PrefillPolicy,
    RequestView,
    Snapshot,
    Victims,
    live,
    nobody,
)

ORDERS = ("fcfs", "priority")


class VllmAdmission(AdmissionPolicy):
    """First come first served, or by priority; the head of the queue is a barrier."""

    name = "vllm"

    class Params(PolicyParams):
        """Watermark, order and size of a batch."""

        watermark: float = live(0.0, ge=0, le=0.5, unit="of all blocks", doc="Blocks kept free while anything runs.")
        order: str = live("fcfs", choices=ORDERS, doc="Order of the waiting queue; priority: lower first.")
        batch: int = live(0, ge=0, unit="requests", doc="Most running requests; 0 leaves it to max_running.")

    params: Params

    @property
    def key(self) -> LinearKey:  # type: ignore[override]  # a constant is allowed in the place of the method
        """By priority where that is the order; requeued requests come first under `fcfs` as they arrived earlier."""
        return LinearKey(priority=1.0) if self.params.order == "priority" else LinearKey(arrived=1.0)

    def admit(self, s: Snapshot) -> Admission:
        if s.preempted:
            return nobody("after a preemption")
        running, batch = len(s.running), self.params.batch
        if batch and running >= batch:
            return nobody("slots")
        entries = islice(s.waiting, batch - running) if batch else s.waiting
        return Admission(entries, keep=int(self.params.watermark * s.blocks) if running else 0)


class VllmPreemption(PreemptionPolicy):
    """The newest admitted goes first, or the least urgent newest; what it had computed is computed again."""

    name = "vllm"

    class Params(PolicyParams):
        """Order of victims."""

        order: str = live("fcfs", choices=ORDERS, doc="fcfs: last admitted first; priority: largest number first.")

    params: Params

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        if cause == "admission":
            return Victims(())
        running = s.running
        if self.params.order == "fcfs":
            return Victims(reversed(running), self_ends=True)
        order = np.lexsort((s.cols.arrival, s.cols.priority))[::-1]
        return Victims([running[i] for i in order.tolist()], self_ends=True)


class VllmPrefill(PrefillPolicy):
    """Running sequences, then newcomers; long prompts are cut at a threshold while others are there."""

    name = "vllm"

    class Params(PolicyParams):
        """Long-prefill threshold."""

        long_prefill: int = live(0, ge=0, unit="tokens", doc="Most prompt tokens of one request per step; 0 is off.")

    params: Params

    @property
    def divide(self) -> Divide | None:  # type: ignore[override]  # None is allowed: nothing is cut, nobody asked
        """The cut at the threshold, where there is one."""
        return self._cut if self.params.long_prefill else None

    def _cut(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> Sequence[int]:
        share = min(self.params.long_prefill, s.budget) if len(s.running) + len(s.waiting) > 1 else left
        return [share] * len(prompts)
