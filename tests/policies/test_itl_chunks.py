"""Chunks steered to an inter-token latency target."""

from __future__ import annotations

import numpy as np
import pytest
from kvyard.sim import disciplines
from kvyard.sim.arrivals import Arrival
from kvyard.sim.observe import FloatArray
from kvyard.sim.simulation import Simulation

from tests.policies.cores import arrive, core, scheduled
from tests.sim.loads import COST, limits


def load() -> list[Arrival]:
    decoders = [Arrival(0.0, 20, 900, 900) for _ in range(6)]
    draw = np.random.default_rng(7)
    at = np.cumsum(draw.exponential(0.25, 60)) + 1.0
    return decoders + [Arrival(float(t), int(draw.integers(200, 900)), 5, 5) for t in at]


def decode_gaps(text: str) -> tuple[FloatArray, float]:
    """Gaps of the decoders once the model is fitted, and the median first token of the prompts."""
    policies = disciplines.make(*disciplines.parse(text))
    bounds = limits(blocks=600, max_running=16, max_step_tokens=1024, max_model_len=2048)
    run = Simulation(load(), policies, bounds, COST).to_the_end()
    seen = run.observer
    return seen.gaps(6)[300:], float(np.median((seen.first - seen.arrived)[7:]))


@pytest.mark.parametrize("target", [25.0, 40.0, 70.0])
def test_steps_with_prompts_come_near_the_target_and_not_above(target: float) -> None:
    gaps, _ = decode_gaps(f"itl-target,prefill.target_ms={target}")
    assert np.percentile(gaps, 99) <= 1.1 * target / 1e3
    assert gaps.max() >= 0.8 * target / 1e3, "the room is used"


def test_a_wider_target_serves_prompts_sooner() -> None:
    narrow, wide = (decode_gaps(f"itl-target,prefill.target_ms={target}")[1] for target in (20.0, 70.0))
    assert wide < narrow


def test_prompts_move_on_though_the_target_is_out_of_reach() -> None:
    scheduler = core("itl-target,prefill.target_ms=0.1,prefill.least=3", blocks=200)
    for _ in range(20):
        scheduler.observe(1, 0, 0.010)
        scheduler.observe(1, 500, 0.060)
    arrive(scheduler, (1, 4, 50))
    scheduled(scheduler)
    arrive(scheduler, (2, 30, 5))
    assert [scheduled(scheduler) for _ in range(2)] == [{1: 1, 2: 3}, {1: 1, 2: 3}]


def test_nobody_has_to_be_spared_when_nothing_decodes() -> None:
    scheduler = core("itl-target,prefill.first=5")
    arrive(scheduler, (1, 60, 5))
    assert scheduled(scheduler) == {1: 60}


def test_the_target_changes_while_serving() -> None:
    scheduler = core("itl-target,prefill.target_ms=15,prefill.least=1", blocks=200)
    for _ in range(50):
        scheduler.observe(1, 0, 0.010)
        scheduler.observe(1, 64, 0.0164)
        scheduler.observe(1, 640, 0.074)
    arrive(scheduler, (1, 4, 50))
    scheduled(scheduler)
    arrive(scheduler, (2, 200, 5))
    narrow = scheduled(scheduler)[2]
    scheduler.set_params("prefill", {"target_ms": 13.0})
    assert scheduled(scheduler)[2] < narrow <= 60
