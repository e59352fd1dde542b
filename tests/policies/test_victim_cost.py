"""Victims by cost, and the cheaper way back as measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kvyard.sim import disciplines
from kvyard.sim.arrivals import Arrival
from kvyard.sim.simulation import Run, Simulation

from tests.sim.loads import COST, limits

LIMITS = limits(blocks=60, max_running=16, max_step_tokens=1024, swap_blocks=200)


def pressure(count: int = 120) -> list[Arrival]:
    draw = np.random.default_rng(9)
    at = np.cumsum(draw.exponential(0.05, count))
    return [
        Arrival(float(t), int(draw.choice([10, 20, 300])), output, output)
        for t, output in zip(at, draw.integers(20, 120, count).tolist(), strict=True)
    ]


def run_with(name: str, copy: float = COST.copy, prompt: float = COST.prompt) -> Run:
    cost = replace(COST, copy=copy, prompt=prompt)
    return Simulation(pressure(), disciplines.make(name), LIMITS, cost).to_the_end()


def test_fewer_tokens_are_computed_again_than_with_the_newest_as_victim() -> None:
    newest, cheapest = run_with("vllm"), run_with("least-recompute")
    per_victim = [run.observer.recomputed.sum() / run.observer.preemptions.sum() for run in (newest, cheapest)]
    assert newest.observer.preemptions.sum() > 20
    assert per_victim[1] < per_victim[0]


@pytest.mark.parametrize(("copy", "least", "most"), [(1e-7, 0.8, 1.0), (1.0, 0.0, 0.2)])
def test_the_way_follows_the_measured_cost(copy: float, least: float, most: float) -> None:
    """Copies that cost nothing are used, copies that cost a second a block are measured once and left alone."""
    seen = run_with("recompute-or-swap", copy=copy).observer
    assert seen.preemptions.sum() > 10
    assert least <= seen.swaps / seen.preemptions.sum() <= most
    assert seen.swaps >= 1, "what was never tried was never measured"


def test_dear_prompts_are_swapped() -> None:
    cheap, dear = (run_with("recompute-or-swap", copy=2e-3, prompt=prompt).observer for prompt in (1e-5, 5e-3))
    assert cheap.swaps / cheap.preemptions.sum() < 0.3
    assert dear.swaps / dear.preemptions.sum() > 0.7


def test_swapping_is_quicker_where_it_is_chosen() -> None:
    swapped, computed = (
        run_with("recompute-or-swap", copy=1e-6, prompt=1e-3),
        run_with("least-recompute", prompt=1e-3),
    )
    assert swapped.seconds < computed.seconds
