"""Loads and small machines for the simulator's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from kvyard.core.plan import Limits
from kvyard.sim import disciplines
from kvyard.sim.arrivals import Arrival
from kvyard.sim.cost import Machine, Objective, StepCost
from kvyard.sim.simulation import Run, Simulation

DATA = Path(__file__).parent.parent / "data"
AZURE = DATA / "arrivals" / "azure_conv_2023_first_30min.csv"
MOONCAKE = DATA / "arrivals" / "mooncake_conversation_first_1500.jsonl"
TRACES = sorted((DATA / "traces").glob("*.json"))
GOLDEN = sorted((DATA / "golden").glob("*.json"))
COST = StepCost(base=0.01, decode=0.0005, prompt=0.0001, context=1e-7, copy=1e-4)


def limits(**changes: Any) -> Limits:  # noqa: ANN401 - any field of Limits
    """A small machine's limits with some replaced."""
    values: dict[str, Any] = {
        "blocks": 64,
        "block_size": 16,
        "max_running": 8,
        "max_step_tokens": 256,
        "max_model_len": 1024,
    }
    return Limits(**{**values, **changes})


def machine(**changes: Any) -> Machine:  # noqa: ANN401 - any field of Limits
    """A small machine."""
    return Machine("small", "a small machine", COST, limits(**changes), Objective(ttft=1.0, tpot=0.05))


def crowd(count: int, seed: int = 1, gap: float = 0.05, spare: int = 0) -> list[Arrival]:
    """Requests of many lengths, tenants, priorities and deadlines, `gap` seconds apart on average.

    `spare` is by how much clients ask for more than they get, at most.
    """
    draw = np.random.default_rng(seed)
    arrivals, at = [], 0.0
    for number in range(count):
        at += float(draw.exponential(gap))
        output = int(draw.integers(1, 80))
        arrivals.append(
            Arrival(
                at=at,
                prompt=int(draw.integers(1, 400)),
                output=output,
                max_tokens=output + int(draw.integers(0, spare + 1)),
                tenant="many" if number % 4 else "few",
                priority=int(draw.integers(0, 4)),
                deadline=at + float(draw.uniform(0.2, 8.0)),
            )
        )
    return arrivals


def simulate(text: str, arrivals: list[Arrival], **changes: Any) -> Run:  # noqa: ANN401 - any field of Limits
    """A discipline over a load on the small machine, to the end; no policy may be put out."""
    policies = disciplines.make(*disciplines.parse(text))
    run = Simulation(arrivals, policies, limits(**changes), COST).to_the_end()
    assert run.exits == []
    return run
