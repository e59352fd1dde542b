"""LightLLM: admission by the peak of memory that the running requests will reach as they end.

Source: LightLLM 2025-07, `router/req_queue/chunked_prefill/impl.py` ("Past-Future"). It gives up some safety,
since the peak rests on expected lengths, and microseconds for the estimate; it wins that memory freed by those
that end sooner is counted on for those that go on, which whole-life reservations leave unused.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice

import numpy as np
from kvyard.policy import Admission, AdmissionPolicy, Discipline, PolicyParams, RequestView, Snapshot, live
from kvyard.policy.snapshot import IntColumn

SLACK = 6
"""Tokens that each request may hold beyond what is expected of it."""
LEAST_EXPECTED = 1024
"""Output tokens that no expectation falls below, unless the client asks for fewer."""
WINDOW = 256
"""Waiting requests that are looked at in a step."""


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
        cols, pool = s.cols, s.blocks * s.block_size
        busy = s.blocks - s.free >= self.params.token_ratio * s.blocks
        views, rows = list[RequestView](), list[tuple[int, int, int]]()
        room = pool - int(cols.total.sum())
        for r in islice(s.waiting, max(0, min(s.slots, self.params.max_requests - len(s.running), WINDOW))):
            views.append(r)
            rows.append((r.total, r.generated, r.max_new))
            room -= r.total
            if room <= 0:  # no peak is lower than what is held
                break
        if not views:
            return Admission()
        totals, made, most = np.array(rows, np.int64).T
        expected = np.append(
            _expected(cols.generated, cols.generated + cols.remaining, busy), _expected(made, most, busy)
        )
        held, running = np.append(cols.total, totals), len(s.running)

        def peak_with(newcomers: int) -> int:
            return peak(expected[: running + newcomers], held[: running + newcomers])

        # With each newcomer the peak grows, so the first that does not fit is found by halving.
        fitting = bisect_left(range(1, len(views) + 1), pool, key=peak_with)
        # The window was checked when it arrived: the slack must not keep out one that has the pool to itself.
        return Admission(views[: fitting if s.running else max(1, fitting)])


def _expected(made: IntColumn, most: IntColumn, busy: bool) -> IntColumn:
    """Tokens that each is expected to hold in the end beyond those it has."""
    length = most if busy else np.minimum(most, np.maximum((1.1 * made).astype(np.int64), LEAST_EXPECTED))
    return SLACK + length - made


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
