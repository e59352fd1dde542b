"""Batch sizes and bits: where a half-precision step may choose another token, and where it may not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from kvyard.engine.backends.base import Backend
from kvyard.engine.loading import load
from torch import Tensor

from tests.engine.running import Job, run

PROMPTS = [
    [(i * 7919 + 31 * n) % 49000 for i in range(length)] for n, length in enumerate((5, 9, 17, 30, 33, 48, 64, 96))
]
CLOSE_STEPS = 2
"""Steps of bfloat16 under which two best logits may change places."""


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is tried where."""

    device: Literal["cpu", "cuda"]
    prompts: int
    sizes: tuple[int, ...]
    outputs: int


scopes = pytest.mark.parametrize(
    "scope",
    [
        pytest.param(
            Scope("cuda", len(PROMPTS), (1, 2, 4, 8, 32), 48),
            id="cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
        pytest.param(Scope("cpu", 3, (1, 3), 3), id="cpu"),
    ],
)
"""On the CPU a short form, so that the tests themselves are known to work."""


def backend_on(scope: Scope, model: Path, *, deterministic: bool) -> Backend:
    loaded = load(
        str(model),
        device=scope.device,
        dtype="bfloat16",
        deterministic=deterministic,
        block_size=16,
        progress=lambda what, fraction: None,
    )
    loaded.backend.allocate(512, 0)
    return loaded.backend


def batches(backend: Backend, scope: Scope) -> dict[int, list[Job]]:
    """The same prompts in batches of every size; a batch of 32 has each four times."""
    found: dict[int, list[Job]] = {}
    for size in scope.sizes:
        jobs = [Job(prompt, scope.outputs) for prompt in PROMPTS[: scope.prompts] * max(1, size // scope.prompts)]
        for begin in range(0, len(jobs), size):
            run(backend, jobs[begin : begin + size], seed=size, blocks=512)
        found[size] = jobs
    return found


def steps_apart(logits: Tensor) -> float:
    """Gap of the two best logits in steps of bfloat16 (8 bits of precision) at their magnitude."""
    best, second = logits.topk(2).values.tolist()
    step = 2.0 ** (math.floor(math.log2(max(abs(best), 1e-30))) - 7)
    return float((best - second) / step)


@scopes
def test_INVARIANCE_02_batches_part_only_where_the_two_best_are_close(default_model: Path, scope: Scope) -> None:
    found = batches(backend_on(scope, default_model, deterministic=False), scope)
    for size, jobs in found.items():
        for number, job in enumerate(jobs):
            alone = found[1][number % scope.prompts]
            pairs = zip(job.tokens, alone.tokens, strict=True)
            parted = next((at for at, (mine, solo) in enumerate(pairs) if mine != solo), None)
            if parted is not None:
                apart = steps_apart(alone.logits[parted])
                assert apart <= CLOSE_STEPS, f"size {size}, prompt {number}, token {parted}"


@scopes
def test_INVARIANCE_02_in_deterministic_mode_no_bit_depends_on_the_batch(default_model: Path, scope: Scope) -> None:
    found = batches(backend_on(scope, default_model, deterministic=True), scope)
    for size, jobs in found.items():
        for number, job in enumerate(jobs):
            assert job.hashes == found[1][number % scope.prompts].hashes, f"size {size}, prompt {number}"


def test_steps_are_those_of_bfloat16() -> None:
    for value in (1.0, 3.0, 100.0, 0.02):
        here = torch.tensor(value, dtype=torch.bfloat16)
        below = torch.nextafter(here, torch.tensor(0.0, dtype=torch.bfloat16))
        assert steps_apart(torch.stack([here, below, below - 1]).float()) == pytest.approx(1.0, rel=0.51)
