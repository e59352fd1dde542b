"""Run sequences through the real path (plan, batch, backend, greedy choice) without the engine's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from kvyard.core.plan import Plan
from kvyard.engine.backends.base import Backend
from kvyard.engine.batching import build_batch
from kvyard.engine.hashing import RowHash
from torch import Tensor


@dataclass(slots=True)
class Job:
    """A sequence: how much to generate, in which chunks, and in which step it comes in."""

    prompt: list[int]
    outputs: int = 8
    chunk: int = 1 << 20
    enters: int = 0
    tokens: list[int] = field(default_factory=list)
    """What was generated."""
    hashes: list[int] = field(default_factory=list)
    """Of the logits of each output token."""
    logits: list[Tensor] = field(default_factory=list)
    computed: int = 0
    row: int = -1

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.tokens)


def run(backend: Backend, jobs: Sequence[Job], *, blocks: int = 256, seed: int = 0) -> None:
    """Generate greedily until every job has its outputs; blocks are handed out in shuffled order."""
    block_size = backend.geometry.block_size
    longest = max(len(job.prompt) + job.outputs for job in jobs)
    tables = np.full((len(jobs), -(-longest // block_size)), -1, dtype=np.int32)
    tokens = np.zeros((len(jobs), longest + 1), dtype=np.int32)
    free = np.random.default_rng(seed).permutation(blocks).tolist()
    digest: RowHash | None = None
    for row, job in enumerate(jobs):
        job.row = row
        tokens[row, : len(job.prompt)] = job.prompt
        needed = -(-(len(job.prompt) + job.outputs) // block_size)
        tables[row, :needed] = [free.pop() for _ in range(needed)]
    for step in range(10_000):
        active = [job for job in jobs if job.enters <= step and len(job.tokens) < job.outputs]
        if not active and all(len(job.tokens) == job.outputs for job in jobs):
            return
        if not active:
            continue
        plan = make_plan(active, tables, tokens)
        batch, slots = build_batch(plan, block_size)
        logits = backend.forward(batch)
        digest = digest or RowHash(logits.shape[1])
        hashes = digest(logits.numpy())
        by_row = {job.row: job for job in jobs}
        for job in active:
            job.computed += min(job.chunk, job.known - job.computed)
        for i, slot in enumerate(slots.tolist()):
            job = by_row[slot]
            job.hashes.append(int(hashes[i]))
            job.logits.append(logits[i].clone())
            job.tokens.append(int(logits[i].argmax()))
            tokens[slot, job.known - 1] = job.tokens[-1]
    raise AssertionError("the jobs did not end")


def make_plan(jobs: Sequence[Job], tables: np.ndarray, tokens: np.ndarray) -> Plan:
    """One step that gives every job its next chunk."""
    granted = np.array([min(job.chunk, job.known - job.computed) for job in jobs], dtype=np.int64)
    computed = np.array([job.computed for job in jobs], dtype=np.int64)
    return Plan(
        step=1,
        ids=np.array([job.row for job in jobs], dtype=np.int64),
        slots=np.array([job.row for job in jobs], dtype=np.int64),
        granted=granted,
        computed=computed,
        samples=computed + granted == np.array([job.known for job in jobs]),
        tables=tables,
        tokens=tokens,
    )


def solo(backend: Backend, prompt: list[int], outputs: int, *, chunk: int = 1 << 20, seed: int = 0) -> Job:
    """One sequence alone."""
    job = Job(prompt, outputs, chunk)
    with torch.inference_mode():
        run(backend, [job], seed=seed)
    return job
