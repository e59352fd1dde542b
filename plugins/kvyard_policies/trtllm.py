"""TensorRT-LLM's two capacity policies, and its two ways to divide a step among prompts.

Source: TensorRT-LLM, mid-2026, `_torch/pyexecutor/scheduler/scheduler.py`. GUARANTEED_NO_EVICT admits who has
blocks to its end: it gives up concurrency and never computes twice. MAX_UTILIZATION admits who has blocks for
its next step: it fills the pool and pays with pauses, after which prompt and output are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kvyard.policy import (
    ADMIT,
    DECODE,
    DECODE_FIRST,
    PROMPT,
    Admission,
    AdmissionPolicy,
    Cause,
    Discipline,
    PolicyParams,
    PreemptionPolicy,
    PrefillPolicy,
    RequestView,
    Shape,
    Snapshot,
    Victims,
    live,
    nobody,
)


class NextStepAdmission(AdmissionPolicy):
    """A newcomer needs the blocks of its next chunk alone; nobody comes in behind one that was paused."""

    name = "next-step"

    def admit(self, s: Snapshot) -> Admission:
        return nobody("after a pause") if s.preempted else Admission((r, 0) for r in s.waiting)


class LatestArrivalPreemption(PreemptionPolicy):
    """Who arrived last goes first, however late the others were admitted again; computed again from the front."""

    name = "latest-arrival"

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        if cause == "admission":
            return Victims(())
        running = s.running
        return Victims([running[i] for i in np.argsort(-s.cols.arrival).tolist()], self_ends=True)


class TrtllmPrefill(PrefillPolicy):
    """Decodes first; prompts in whole units, one after the other or all in turn."""

    name = "trtllm"

    class Params(PolicyParams):
        """How prompts share a step."""

        chunks: str = live(
            "fcfs",
            choices=("fcfs", "equal-progress"),
            doc="fcfs: one after the other; equal-progress: a unit for each in turn.",
        )
        unit: int = live(
            0, ge=0, unit="tokens", doc="A chunk that does not end its prompt is a multiple; 0: a block."
        )

    params: Params

    def shape(self, s: Snapshot) -> Shape:
        # Equal progress has to see newcomers and running prompts together, so newcomers come in before.
        return DECODE_FIRST if self.params.chunks == "fcfs" else Shape(((DECODE, ADMIT, PROMPT),))

    def divide(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> Sequence[int]:
        unit = self.params.unit or s.block_size
        wanted = [r.wanted for r in prompts]
        if sum(wanted) <= left:
            return wanted
        return _greedy(wanted, left, unit) if self.params.chunks == "fcfs" else _in_turn(wanted, left, unit)


def _greedy(wanted: list[int], left: int, unit: int) -> list[int]:
    """To each what it wants while there is some; a cut chunk is floored to units."""
    shares = []
    for want in wanted:
        share = want if want <= left else left - left % unit
        shares.append(share)
        left -= share
    return shares


def _in_turn(wanted: list[int], left: int, unit: int) -> list[int]:
    """One unit for each per round, until the step is full or all have what they want.

    A unit larger than what the step has is as large as that, or long prompts would stand still beside short ones.
    """
    unit = min(unit, left)
    shares, moved = [0] * len(wanted), True
    while moved:
        moved = False
        for i, want in enumerate(wanted):
            more = min(unit, want - shares[i])
            if 0 < more <= left:
                shares[i] += more
                left -= more
                moved = True
    return shares


class NoEvict(Discipline):
    """TensorRT-LLM, GUARANTEED_NO_EVICT: who comes in has blocks to its end."""

    name = "trtllm-no-evict"
    doc = "TensorRT-LLM GUARANTEED_NO_EVICT: who comes in has blocks to its end"
    parts = {
        "admission": ("whole-life", {}),
        "preemption": ("latest-arrival", {}),
        "prefill": ("trtllm", {}),
    }


class MaxUtilization(Discipline):
    """TensorRT-LLM, MAX_UTILIZATION: who has blocks for its next step runs, the latest are paused."""

    name = "trtllm-max-utilization"
    doc = "TensorRT-LLM MAX_UTILIZATION: blocks for the next step are enough, the latest are paused"
    parts = {
        "admission": ("next-step", {}),
        "preemption": ("latest-arrival", {}),
        "prefill": ("trtllm", {}),
    }
