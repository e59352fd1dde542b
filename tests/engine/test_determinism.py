"""Deterministic mode on the default model: the logits' bits are those of the solo run, whatever happens around."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kvyard.core.plan import BlockCopy
from kvyard.engine.backends.base import Backend
from kvyard.engine.loading import load

from tests.engine.running import Job, run, solo

_PROMPTS = [
    [(i * 7919 + 31 * n) % 49000 for i in range(length)] for n, length in enumerate((37, 1, 15, 16, 33, 130, 48))
]
_OUTPUTS = 6


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def backend(request: pytest.FixtureRequest, default_model: Path) -> Iterator[Backend]:
    """The default model, deterministic."""
    loaded = load(
        str(default_model),
        device="cpu",
        dtype=request.param,
        deterministic=True,
        block_size=16,
        progress=lambda what, fraction: None,
    )
    loaded.backend.allocate(256, 16)
    yield loaded.backend


@pytest.fixture(scope="module")
def alone(backend: Backend) -> list[Job]:
    """Each prompt by itself, whole."""
    return [solo(backend, prompt, _OUTPUTS) for prompt in _PROMPTS]


def test_the_self_check_passes_and_changes_nothing(backend: Backend, alone: list[Job]) -> None:
    backend.self_check()
    assert solo(backend, _PROMPTS[0], 2).hashes == alone[0].hashes[:2]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_change_no_bit(backend: Backend, alone: list[Job], chunk: int) -> None:
    assert solo(backend, _PROMPTS[0], _OUTPUTS, chunk=chunk, seed=chunk).hashes == alone[0].hashes


@pytest.mark.parametrize("count", [2, 3, 7])
def test_neighbours_change_no_bit(backend: Backend, alone: list[Job], count: int) -> None:
    jobs = [Job(prompt, _OUTPUTS, chunk=40) for prompt in _PROMPTS[:count]]
    run(backend, jobs, seed=count)
    assert [job.hashes for job in jobs] == [job.hashes for job in alone[:count]]


def test_a_crowd_change_no_bit(backend: Backend, alone: list[Job]) -> None:
    """More rows than one piece of a product takes, entering one after the other."""
    crowd = [Job([n + 3, 2 * n + 5], 7, enters=n % 4) for n in range(66)]
    jobs = [Job(_PROMPTS[i], _OUTPUTS, chunk=23, enters=2) for i in (0, 4)]
    run(backend, [*crowd, *jobs], seed=5)
    assert [job.hashes for job in jobs] == [alone[i].hashes for i in (0, 4)]


def test_a_second_run_has_the_same_bits(backend: Backend, alone: list[Job]) -> None:
    assert solo(backend, _PROMPTS[5], _OUTPUTS, seed=77).hashes == alone[5].hashes


def test_recomputing_a_sequence_with_its_output_changes_no_bit(backend: Backend, alone: list[Job]) -> None:
    """Preemption by recompute: prompt and output so far come back as one prompt."""
    resumed = solo(backend, _PROMPTS[4] + alone[4].tokens[:3], _OUTPUTS - 3)
    assert resumed.hashes == alone[4].hashes[3:]


def test_poison_in_unused_slots_changes_no_bit(backend: Backend, alone: list[Job]) -> None:
    from kvyard.engine.backends.cpu import CpuBackend

    assert isinstance(backend, CpuBackend)
    pool = backend._ops.pool
    assert pool is not None
    pool.blocks.fill_(torch.nan)
    assert solo(backend, _PROMPTS[4], _OUTPUTS, seed=3).hashes == alone[4].hashes


def test_swapping_out_and_in_changes_no_bit(backend: Backend) -> None:
    """The blocks of a sequence go to the host pool, are overwritten, and come back to other places."""
    from kvyard.engine.backends.cpu import CpuBackend

    assert isinstance(backend, CpuBackend)
    pool = backend._ops.pool
    assert pool is not None
    before = pool.blocks[[3, 9, 4]].clone()
    out = BlockCopy(1, "out", np.array([3, 9, 4]), np.array([15, 0, 7]))
    backend.copy_blocks([out])
    pool.blocks[[3, 9, 4]] = torch.nan
    back = BlockCopy(1, "in", np.array([15, 0, 7]), np.array([100, 3, 55]))
    backend.copy_blocks([back, BlockCopy(2, "copy", np.array([100, 3]), np.array([4, 9]))])
    assert torch.equal(pool.blocks[[100, 3, 55]].view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(pool.blocks[[4, 9]].view(torch.uint8), before[:2].view(torch.uint8))
