"""Admission by the distribution of output lengths: its quantiles, its accuracy, and what it wins."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.core.scheduler import Scheduler
from kvyard.policy.params import ParamError
from kvyard.policy.snapshot import IntColumn
from kvyard.sim import disciplines
from kvyard.sim.arrivals import Arrival
from kvyard.sim.simulation import Run, Simulation
from kvyard_policies.output_length import MEMORY, WINDOW, OutputLengthAdmission

from tests.core.harness import run_step
from tests.policies.cores import arrive, core
from tests.sim.loads import COST, limits, simulate


def taught(outputs: list[int], **params: Any) -> OutputLengthAdmission:  # noqa: ANN401 - any parameter
    policy = OutputLengthAdmission(**{"min_outputs": 1, **params})
    policy.import_state({"version": 1, "outputs": outputs})
    return policy


def predicted(policy: OutputLengthAdmission, generated: int, most: int) -> int:
    return int(policy.predict(np.array([generated]), np.array([most]))[0])


@pytest.mark.parametrize(
    ("quantile", "generated", "most", "expected"),
    [
        (0.5, 0, 999, 50),
        (0.9, 0, 999, 90),
        (1.0, 0, 999, 100),
        (0.0, 0, 999, 1),
        (0.5, 50, 999, 75),
        (0.5, 98, 999, 99),
        (0.5, 100, 999, 999),
        (0.9, 0, 30, 30),
    ],
)
def test_the_quantile_of_those_that_were_longer(quantile: float, generated: int, most: int, expected: int) -> None:
    policy = taught(list(range(1, 101)), quantile=quantile)
    assert predicted(policy, generated, most) == pytest.approx(expected, abs=1)


@given(
    outputs=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    generated=st.integers(0, 600),
    quantile=st.floats(0, 1),
)
def test_a_prediction_is_longer_than_what_is_there_and_no_longer_than_asked(
    outputs: list[int], generated: int, quantile: float
) -> None:
    policy = taught(outputs, quantile=quantile)
    found = predicted(policy, generated, 700)
    assert found <= 700
    assert found > generated or found == 700 or (quantile == 0 and generated < found)
    assert found in outputs or found == 700


def test_whole_lives_until_enough_was_seen() -> None:
    assert predicted(taught([5] * 9, min_outputs=10), 0, 300) == 300
    assert predicted(taught([5] * 10, min_outputs=10), 0, 300) == 5


def test_the_memory_is_bounded_and_follows_the_load() -> None:
    policy = taught([10] * MEMORY)
    policy.import_state({"version": 1, "outputs": [400] * MEMORY})
    assert predicted(policy, 0, 999) == 400
    assert len(policy.export_state()["outputs"]) == MEMORY
    policy.import_state({"version": 2, "outputs": [1]})
    assert predicted(policy, 0, 999) == 400


def test_parameters_are_checked() -> None:
    with pytest.raises(ParamError, match="quantile"):
        OutputLengthAdmission(quantile=1.5)


def steady_load(count: int = 160) -> list[Arrival]:
    """Outputs of about 50 tokens, some of 300, where clients ask for 400."""
    draw = np.random.default_rng(4)
    at = np.cumsum(draw.exponential(0.06, count))
    outputs = np.clip(draw.lognormal(4.0, 0.7, count), 5, 390).astype(int)
    return [Arrival(float(t), 20, int(output), 400) for t, output in zip(at, outputs, strict=True)]


LIMITS = limits(blocks=500, block_size=2, max_running=32)


def run_with(text: str) -> tuple[Run, Scheduler]:
    simulation = Simulation(steady_load(), disciplines.make(*disciplines.parse(text)), LIMITS, COST)
    return simulation.to_the_end(), simulation.scheduler


def accuracy(scheduler: Scheduler) -> dict[str, Any]:
    return dict(scheduler.policies.admission.dump())


@cache
def swept(quantile: float) -> tuple[Run, dict[str, Any]]:
    run, scheduler = run_with(f"output-length,admission.quantile={quantile}")
    return run, accuracy(scheduler)


def test_a_low_quantile_underestimates_and_a_high_one_overestimates() -> None:
    low, middle, high = (swept(quantile)[1] for quantile in (0.0, 0.5, 1.0))
    assert low["under"] > 2 * low["over"], "those before enough was seen are over, at 400"
    assert middle["under"] == pytest.approx(middle["over"], rel=0.6)
    assert high["over"] > 10 * high["under"]
    assert low["mean_tokens_under"] > 40 and high["mean_tokens_over"] > 150
    for seen in (low, middle, high):
        assert seen["over"] + seen["under"] + seen["exact"] == seen["outputs"] > 140


def test_concurrency_and_preemptions_fall_with_the_quantile() -> None:
    runs = [swept(quantile)[0] for quantile in (0.0, 0.3, 1.0)]
    preemptions = [int(run.observer.preemptions.sum()) for run in runs]
    assert preemptions[0] > preemptions[1] > preemptions[2] == 0
    seconds = [run.seconds for run in runs]
    assert seconds == sorted(seconds), "what is reserved and not used costs time"


def test_it_admits_more_than_whole_lives_and_preempts_less_than_no_reserve() -> None:
    whole = simulate("trtllm-no-evict", steady_load(), blocks=500, block_size=2, max_running=32)
    none = simulate("vllm", steady_load(), blocks=500, block_size=2, max_running=32)
    ours, _ = swept(0.5)
    assert ours.seconds < 0.7 * whole.seconds
    assert ours.observer.preemptions.sum() < 0.1 * none.observer.preemptions.sum()


def test_the_reserve_stays_free() -> None:
    scheduler = core("output-length,admission.min_outputs=1000,admission.reserve=0.25", blocks=40)
    arrive(scheduler, *((id, 12, 5) for id in range(1, 9)))
    run_step(scheduler)
    arrive(scheduler, *((id, 12, 5) for id in range(9, 12)))
    for _ in range(3):
        run_step(scheduler)
        assert scheduler.blocks_free >= 0
    assert scheduler.running <= 8


def test_cancelled_requests_teach_nothing() -> None:
    scheduler = core("output-length,admission.min_outputs=1", max_running=2)
    arrive(scheduler, (1, 4, 50), (2, 4, 3), (3, 4, 50))
    run_step(scheduler)
    scheduler.cancel([1])
    for _ in range(4):
        run_step(scheduler)
    arrive(scheduler, (4, 4, 3))
    run_step(scheduler)
    assert accuracy(scheduler)["outputs"] == 1


def test_a_long_queue_is_predicted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    predict = OutputLengthAdmission.predict

    def counted(policy: OutputLengthAdmission, generated: IntColumn, most: IntColumn) -> IntColumn:
        asked.append(len(most))
        return predict(policy, generated, most)

    monkeypatch.setattr(OutputLengthAdmission, "predict", counted)
    scheduler = core("output-length", blocks=20_000, max_running=1024, max_step_tokens=8192)
    arrive(scheduler, *((id, 4, 20) for id in range(1, 1500)))
    assert len(run_step(scheduler).scheduled) == WINDOW
    assert asked == [0, WINDOW], "those that run, and those of the queue's head"
