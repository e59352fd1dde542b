"""The bound on waiting under priority with aging: nobody waits for ever, however much that is more urgent comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.sim.arrivals import Arrival
from kvyard.sim.simulation import Run

from tests.sim.loads import simulate

LOW, URGENT, AGING = 10, 0, 2.0
OVERTAKING = (LOW - URGENT) / AGING
"""Seconds after its arrival in which something may come that overtakes the low one."""


def stream(gap: float, count: int, low_at: float, outputs: list[int]) -> list[Arrival]:
    """Urgent requests without end, and one of low priority among them."""
    urgent = [
        Arrival(gap * n, 20, outputs[n % len(outputs)], outputs[n % len(outputs)], priority=URGENT)
        for n in range(count)
    ]
    return sorted([*urgent, Arrival(low_at, 20, 5, 5, priority=LOW)], key=lambda arrival: arrival.at)


def waited(text: str, load: list[Arrival]) -> tuple[float, Run, int]:
    """How long the low one waited, the run, and its number."""
    run = simulate(text, load, max_running=1)
    low = 1 + next(n for n, arrival in enumerate(load) if arrival.priority == LOW)
    return float(run.observer.admitted[low] - run.observer.arrived[low]), run, low


def bound(load: list[Arrival], run: Run, low: int) -> float:
    """With one place: everything that may come in before it, served one after the other, and the window itself."""
    seen = run.observer
    last = seen.arrived[low] + OVERTAKING
    ahead = [n for n in range(1, len(load) + 1) if n != low and seen.arrived[n] <= last]
    service = sum(seen.finished[n] - seen.admitted[n] for n in ahead)
    return OVERTAKING + float(service)


@settings(max_examples=12, deadline=None)
@given(
    gap=st.floats(0.03, 0.3),
    low_at=st.floats(0, 5),
    outputs=st.lists(st.integers(1, 12), min_size=1, max_size=5),
)
def test_the_wait_is_within_the_bound(gap: float, low_at: float, outputs: list[int]) -> None:
    load = stream(gap, 150, low_at, outputs)
    wait, run, low = waited(f"kvyard,admission.aging={AGING},preemption.aging={AGING}", load)
    assert wait <= bound(load, run, low) + 1e-6


def test_without_aging_it_waits_for_the_end() -> None:
    load = stream(0.08, 500, 1.0, [8])
    strict, _, _ = waited("vllm-priority", load)
    aged, _, _ = waited(f"kvyard,admission.aging={AGING},preemption.aging={AGING}", load)
    assert strict > 35, "urgent ones come for 40 seconds, a little faster than they are served"
    assert aged < 0.5 * strict


def test_nobody_who_came_later_than_the_window_overtakes() -> None:
    load = stream(0.08, 500, 1.0, [8])
    _, run, low = waited(f"kvyard,admission.aging={AGING},preemption.aging={AGING}", load)
    seen = run.observer
    overtook = np.flatnonzero((seen.admitted < seen.admitted[low]) & (seen.arrived > seen.arrived[low]))
    assert len(overtook) > 10
    assert seen.arrived[overtook].max() <= seen.arrived[low] + OVERTAKING


@pytest.mark.parametrize("aging", [0.5, 1.0, 4.0])
def test_quicker_aging_waits_less(aging: float) -> None:
    load = stream(0.08, 600, 1.0, [8])
    wait, _, _ = waited(f"kvyard,admission.aging={aging},preemption.aging={aging}", load)
    assert wait < 1.6 * (LOW - URGENT) / aging + 1.0
