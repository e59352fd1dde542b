"""Victims by what their preemption costs, and the cheaper way to bring each back.

Recomputing costs the tokens in KV times what the step-time model says of a prompt token; swapping costs the
blocks twice, out and in, times what copies were measured to take. Long sequences are dear to recompute, so
they are swapped where copies are quick and left alone where they are not. It gives up the order of admission
among victims; it wins the work that the newest, if it is the longest, would have had to repeat.
"""

from __future__ import annotations

import numpy as np
from kvyard.policy import Cause, Discipline, PreemptionPolicy, RequestView, Snapshot, Victims

PROBE = 512
"""Prompt tokens at which the model is read off, well within what it was fitted on."""


class LeastCostPreemption(PreemptionPolicy):
    """The cheapest to bring back goes first, by recomputation or by swap, whichever was measured cheaper."""

    name = "least-cost"

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        if cause == "admission":
            return Victims(())
        running, cols, model = s.running, s.cols, s.step_time
        per_token = (model.seconds(s.decoding, PROBE) - model.seconds(s.decoding, 0)) / PROBE
        recompute, swap = cols.computed * max(per_token, 0.0), cols.blocks * 2 * model.copy_seconds(1)
        order = np.lexsort((-cols.arrival, cols.computed, np.minimum(recompute, swap)))
        # Until a copy was measured it counts as free, so the first victim is swapped and measures it.
        enough = int(np.searchsorted(np.cumsum(cols.blocks[order]), short)) + 1
        dear = recompute[order[:enough]].sum() > swap[order[:enough]].sum()
        return Victims([running[i] for i in order.tolist()], how="swap" if dear else "recompute")


class LeastRecompute(Discipline):
    """vLLM's shape; who has the least to compute again gives way."""

    name = "least-recompute"
    doc = "vLLM's shape; who has the least to compute again gives way"
    parts = {
        "admission": ("vllm", {"watermark": 0.01}),
        "preemption": ("fewest-computed", {}),
        "prefill": ("vllm", {}),
    }


class RecomputeOrSwap(Discipline):
    """vLLM's shape; the cheapest gives way, by recomputation or swap as measured."""

    name = "recompute-or-swap"
    doc = "vLLM's shape; the cheapest gives way, recomputed or swapped as measured"
    parts = {
        "admission": ("vllm", {"watermark": 0.01}),
        "preemption": ("least-cost", {}),
        "prefill": ("vllm", {}),
    }
