"""The on-line step-time model finds the parts of a step's time, and keeps them on a load that never varies."""

from __future__ import annotations

import random

import pytest
from kvyard.core.steptime import MIN_STEPS, OnlineStepTime


def truth(decodes: int, prompt_tokens: int) -> float:
    return 0.007 + 15e-6 * decodes + 40e-6 * prompt_tokens


def fitted(steps: int, noise: float, seed: int = 1) -> OnlineStepTime:
    draw, model = random.Random(seed), OnlineStepTime()
    for _ in range(steps):
        decodes, prompt = draw.randint(1, 60), draw.choice([0, 0, 300, 512])
        model.observe(decodes, prompt, truth(decodes, prompt) * draw.gauss(1, noise))
    return model


WORK = [(1, 0), (60, 0), (30, 512), (30, 2000)]


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize(("decodes", "prompt"), WORK)
def test_it_finds_the_parts(noise: float, decodes: int, prompt: int) -> None:
    assert fitted(1500, noise).seconds(decodes, prompt) == pytest.approx(truth(decodes, prompt), rel=0.06)


def test_it_says_nothing_before_enough_steps() -> None:
    model = OnlineStepTime()
    for _ in range(MIN_STEPS - 1):
        model.observe(4, 100, 0.01)
    assert model.seconds(4, 100) == 0.0
    model.observe(4, 100, 0.01)
    assert model.seconds(4, 100) > 0.0


def test_a_load_that_never_varies_moves_nothing() -> None:
    model, draw = fitted(1000, 0.02), random.Random(2)
    for _ in range(100_000):
        model.observe(30, 512, truth(30, 512) * draw.gauss(1, 0.02))
    for decodes, prompt in WORK:
        assert model.seconds(decodes, prompt) == pytest.approx(truth(decodes, prompt), rel=0.08)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    model, draw = fitted(500, 0.0), random.Random(3)
    for _ in range(500):
        decodes, prompt = draw.randint(1, 60), draw.choice([0, 300, 512])
        model.observe(decodes, prompt, 2 * truth(decodes, prompt))
    assert model.seconds(30, 400) == pytest.approx(2 * truth(30, 400), rel=0.03)


def test_copies_are_measured_apart() -> None:
    model = fitted(200, 0.0)
    assert model.copy_seconds(10) == 0.0
    before = model.seconds(30, 512)
    for _ in range(50):
        model.observe(30, 0, truth(30, 0) + 20 * 1e-4, copied_blocks=20)
    assert model.copy_seconds(10) == pytest.approx(1e-3, rel=0.05)
    assert model.seconds(30, 512) == before, "a step with copies is no measure of the model"
