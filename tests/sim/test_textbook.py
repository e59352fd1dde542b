"""The two examples with which continuous batching is explained."""

from __future__ import annotations

import pytest
from kvyard.core.scheduler import Scheduler
from kvyard.sim import disciplines

from tests.core.harness import Clock, run_all, spec
from tests.sim.loads import limits

# LMDeploy's turns belong to the decodes while half of the places are taken, so C waits for B there as well.
CONTINUOUS = sorted(set(disciplines.names()) - {"static", "dynamic-window", "lmdeploy-turns"})
ALL = [f"{name},admission.size=3" if name == "dynamic-window" else name for name in disciplines.names()]


def core(name: str, places: int) -> Scheduler:
    bounds = limits(max_running=places, max_model_len=256)
    return Scheduler(bounds, disciplines.make(*disciplines.parse(name)), clock_ns=Clock())


@pytest.mark.parametrize("name", ALL)
def test_remaining_outputs_2_1_3(name: str) -> None:
    """Active counts 3, 2, 1: six token slots, where a padded batch would take nine."""
    scheduler = core(name, places=3)
    for id, outputs in ((1, 2), (2, 1), (3, 3)):
        scheduler.add(spec(id, prompt_len=1, max_new=outputs, arrived=0.0))
    active = [len(log.sampled) for log in run_all(scheduler)]
    assert [count for count in active if count] == [3, 2, 1]
    assert sum(active) == 6


@pytest.mark.parametrize("name", CONTINUOUS)
def test_two_places_continuous(name: str) -> None:
    """A needs 2 steps, B 4; C, which needs 2, starts right after A."""
    scheduler = core(name, places=2)
    for id, outputs in ((1, 2), (2, 4), (3, 2)):
        scheduler.add(spec(id, prompt_len=1, max_new=outputs, arrived=0.0))
    logs = [log for log in run_all(scheduler) if log.scheduled]
    first = next(number for number, log in enumerate(logs) if 3 in log.scheduled)
    assert first == 2
    assert [id for id, _ in logs[1].finished] == [1]


@pytest.mark.parametrize("name", ["static", "dynamic-window,admission.size=2"])
def test_two_places_static(name: str) -> None:
    """C starts only after B, in the fifth step."""
    scheduler = core(name, places=2)
    for id, outputs in ((1, 2), (2, 4), (3, 2)):
        scheduler.add(spec(id, prompt_len=1, max_new=outputs, arrived=0.0))
    logs = [log for log in run_all(scheduler) if log.scheduled]
    first = next(number for number, log in enumerate(logs) if 3 in log.scheduled)
    assert first == 4
    assert [id for log in logs[:4] for id, _ in log.finished] == [1, 2]
