"""Makes the step record: where the time went, and what the scheduler did and why."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvyard.core.plan import Plan
from kvyard.core.scheduler import Scheduler
from kvyard.link.record import StepRecord, Timings


class Recorder:
    """Stop-watch of the loop and builder of records. Durations in nanoseconds, `clock_ns` from outside."""

    def __init__(self, scheduler: Scheduler, clock_ns: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._ns = clock_ns
        self.generation = 0
        """Number of policy changes so far."""
        self.inbox_ns = 0
        """Time in the inbox since the last step."""
        self.mark = 0
        """Start of the step under way, on `clock_ns`."""
        self._at = 0.0
        self._last = 0
        self._ended: int | None = None
        self._told = (0, 0)
        """Waiting sequences and generation in the last record: while nothing is placed, only these can change."""
        self._gap = self._send = self._schedule = self._model = self._sample = 0
        self._sent_ns = 0

    def begin(self, at: float) -> None:
        """A step starts."""
        self.mark = self._last = self._ns()
        self._at = at
        self._gap = self.mark - self._ended - self.inbox_ns if self._ended is not None else 0
        self._send = self._sent_ns if self._ended is not None else 0
        self._schedule = self._model = self._sample = 0

    def idle(self) -> None:
        """The loop waits for work: that is no gap between steps."""
        self._ended = None

    def sent(self, spent_ns: int) -> None:
        """The record of the step before was handed to the front."""
        self._sent_ns = spent_ns

    def scheduled(self) -> None:
        """Policies, guard, planner and pool are done."""
        self._schedule = self._lap()

    def computed(self) -> None:
        """The model is done."""
        self._model = self._lap()

    def sampled(self) -> None:
        """The sampler is done."""
        self._sample = self._lap()

    def _lap(self) -> int:
        now = self._ns()
        spent, self._last = now - self._last, now
        return spent

    def record(self, plan: Plan, undone: bool = False) -> StepRecord | None:
        """The record of the step; None when nothing ran and nothing changed. An undone step computed nothing."""
        scheduler = self._scheduler
        parts = scheduler.take_record_parts()
        waiting = scheduler.waiting
        told = waiting, self.generation
        if not len(plan) and told == self._told and not (parts.preempted or parts.waits or parts.finished):
            return None
        self._told = told
        outputs = self._lap()
        self._ended = self._last
        copied = sum([len(copy.source) for copy in plan.copies]) if plan.copies else 0
        scheduler.observe(parts.decode_tokens, parts.prompt_tokens, (self._model + self._sample) / 1e9, copied)
        pool = scheduler.pool_counts()
        record = StepRecord(
            step=plan.step,
            at=self._at,
            timings=self._timings(outputs),
            ids=b"" if undone else plan.ids.tobytes(),
            granted=b"" if undone else plan.granted.astype(np.int32).tobytes(),
            prompt_tokens=parts.prompt_tokens,
            decode_tokens=parts.decode_tokens,
            running=scheduler.running,
            waiting=waiting,
            swapped=scheduler.swapped,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_free=pool.free,
            admitted=parts.admitted,
            preempted=parts.preempted,
            finished=parts.finished,
            waits=parts.waits,
            policies=parts.policies,
            generation=self.generation,
            resident=parts.resident,
        )
        self.inbox_ns = 0
        return record

    def _timings(self, outputs: int) -> Timings:
        gap = max(self._gap, 0)
        return Timings(self.inbox_ns, self._schedule, self._model, self._sample, outputs, gap, min(self._send, gap))
