"""Figures of a simulation: of the whole, and of each request."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvyard.sim.cost import Objective
from kvyard.sim.observe import FloatArray
from kvyard.sim.simulation import Run

PERCENTILES = (50, 95, 99)


def percentiles(values: FloatArray) -> dict[str, float | None]:
    """`p50`, `p95`, `p99` and `mean`; None where there are no values."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {**{f"p{p}": None for p in PERCENTILES}, "mean": None}
    found = np.percentile(known, PERCENTILES)
    return {**{f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}, "mean": float(known.mean())}


def totals(run: Run, objective: Objective, blocks: int) -> dict[str, Any]:
    """Total figures. Durations in seconds; `blocks` is the pool's size."""
    seen, load = run.observer, run.observer.load_sums
    finished = ~np.isnan(seen.finished)
    seconds = max(run.seconds - float(np.nanmin(seen.arrived)), 1e-9)
    tokens = int(seen.tokens.sum())
    good = int(_good(run, objective).sum())
    busy = max(load.seconds, 1e-9)
    return {
        "requests": len(seen.arrived) - 1,
        "finished": int(finished.sum()),
        "refused": len(seen.refusals),
        "seconds": seconds,
        "steps": run.steps,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        "queue_s": percentiles(seen.admitted - seen.arrived),
        "ttft_s": percentiles(seen.first - seen.arrived),
        "itl_s": percentiles(seen.gaps()),
        "tpot_s": percentiles(_tpot(run)),
        "e2e_s": percentiles(seen.finished - seen.arrived),
        "preemptions": int(seen.preemptions.sum()),
        "swaps": seen.swaps,
        "recomputed_tokens": int(seen.recomputed.sum()),
        "cached_tokens": int(seen.cached.sum()),
        "goodput": {
            "ttft_s": objective.ttft,
            "tpot_s": objective.tpot,
            "requests_per_s": good / seconds,
            "share": good / max(1, len(seen.arrived) - 1),
        },
        "mean_running": load.running / busy,
        "mean_waiting": load.waiting / busy,
        "most_waiting": load.most_waiting,
        "mean_kv_use": load.blocks / busy / blocks,
        "overrides": run.overrides,
        "ejected": [f"{left.kind}/{left.name} at step {left.step}: {left.message}" for left in run.exits],
    }


def requests(run: Run) -> list[dict[str, Any]]:
    """Figures of each request, in order of arrival; None where it did not come to that."""
    seen, tpot = run.observer, _tpot(run)
    return [
        {
            "request": id,
            "arrival_s": float(seen.arrived[id]),
            "queue_s": _number(seen.admitted[id] - seen.arrived[id]),
            "ttft_s": _number(seen.first[id] - seen.arrived[id]),
            "tpot_s": _number(tpot[id]),
            "worst_itl_s": float(seen.worst_gap[id]) if seen.tokens[id] > 1 else None,
            "e2e_s": _number(seen.finished[id] - seen.arrived[id]),
            "output_tokens": int(seen.tokens[id]),
            "preemptions": int(seen.preemptions[id]),
            "recomputed_tokens": int(seen.recomputed[id]),
            "cached_tokens": int(seen.cached[id]),
            "refused": seen.refusals.get(id),
        }
        for id in range(1, len(seen.arrived))
    ]


def _tpot(run: Run) -> FloatArray:
    """Mean time per output token after the first; NaN with fewer than two."""
    seen = run.observer
    tpot = np.full(len(seen.arrived), np.nan)
    many = seen.tokens > 1
    tpot[many] = (seen.last[many] - seen.first[many]) / (seen.tokens[many] - 1)
    return tpot


def _good(run: Run, objective: Objective) -> FloatArray:
    """Whether each request finished within the objective."""
    seen, tpot = run.observer, _tpot(run)
    in_time = seen.first - seen.arrived <= objective.ttft
    steady = np.isnan(tpot) | (tpot <= objective.tpot)
    good: FloatArray = (in_time & steady & ~np.isnan(seen.finished)).astype(np.float64)
    return good


def _number(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)
