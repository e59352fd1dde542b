"""LightLLM: admission by the peak of memory that the running requests will reach as they end.

Source: LightLLM 2025-07, `router/req_queue/chunked_prefill/impl.py` ("Past-Future"). It gives up some safety,
since the peak rests on expected lengths, and microseconds for the estimate; it wins that memory freed by those
that end sooner is counted on for those that go on, which whole-life reservations leave unused.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from kvyard.policy import Admission, AdmissionPolicy, Discipline, PolicyParams, RequestView, Snapshot, live
from kvyard.policy.snapshot import IntColumn

SLACK = 6
"""Tokens that each request may hold beyond what is expected of it."""


class PeakAdmission(AdmissionPolicy):
    """Newcomers while the worst moment ahead stays within the pool; the first that does not fit ends it."""

    name = "lightllm-peak"

    class Params(PolicyParams):
        """When lengths are estimated, and how many requests and tokens come in."""

        token_ratio: float = live(
            0.0,
            ge=0,
            le=1,
            unit="of the pool",
            doc="Below this use outputs are taken for shorter than their max_tokens; 0: never.",
        )
        max_requests: int = live(1000, ge=1, unit="requests", doc="Most running and preempted requests.")

    params: Params

    def admit(self, s: Snapshot) -> Admission:
        cols, pool, take = s.cols, s.blocks * s.block_size, list[RequestView]()
        busy = s.blocks - s.free >= self.params.token_ratio * s.blocks
        made, most = cols.generated, cols.generated + cols.remaining
        expected = SLACK + (most if busy else np.minimum(most, np.maximum(1.1 * made, 1024).astype(np.int64))) - made
        held = cols.total
        for r in islice(s.waiting, max(0, min(s.slots, self.params.max_requests - len(s.running)))):
            more = r.remaining if busy else min(r.remaining, max(int(1.1 * r.generated), 1024) - r.generated)
            expected, held = np.append(expected, more + SLACK), np.append(held, r.total)
            if peak(expected, held) >= pool:
                break
            take.append(r)
        return Admission(take)


def peak(expected: IntColumn, held: IntColumn) -> int:
    """Tokens held at the worst moment, when each holds `held` now and ends after `expected` more, all growing."""
    order = np.argsort(-expected, kind="stable")
    alive = np.arange(1, len(order) + 1)
    return int((expected[order] * alive + np.cumsum(held[order])).max())


class Lightllm(Discipline):
    """LightLLM: admission by the peak of memory ahead, prompts before decodes."""

    name = "lightllm-peak"
    doc = "LightLLM: admission by the peak of memory ahead, prompts before decodes"
    parts = {
        "admission": ("lightllm-peak", {}),
        "preemption": ("vllm", {}),
        "prefill": ("sglang", {}),
    }
