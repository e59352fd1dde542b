"""Greedy generation straight on a backend: mixed batches of chunks and decodes, without the engine's scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvyard.core.plan import Plan
from kvyard.engine.backends.base import Batch
from kvyard.engine.batching import build_batch

Forward = Callable[[Batch], Tensor]


@dataclass(slots=True)
class Stream:
    """A prompt and what came of it."""

    prompt: list[int]
    outputs: int
    chunk: int = 1 << 20
    """Prompt tokens of a step at most."""
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between the two best logits, for each output token."""
    computed: int = 0

    @property
    def known(self) -> int:
        """Tokens whose ids are known."""
        return len(self.prompt) + len(self.tokens)

    @property
    def wanted(self) -> int:
        """Tokens of its next step."""
        return min(self.chunk, self.known - self.computed)


@dataclass(slots=True)
class Pace:
    """How long generation took."""

    prompt_seconds: float = 0.0
    """Steps with a prompt in them."""
    decode_seconds: float = 0.0
    decode_tokens: int = 0


def blocks_needed(streams: Sequence[Stream], block_size: int) -> int:
    """Blocks of all of them at their full length."""
    return sum(-(-(len(s.prompt) + s.outputs) // block_size) for s in streams)


def generate(forward: Forward, streams: Sequence[Stream], block_size: int) -> Pace:
    """Until each has its outputs. Blocks are handed out in shuffled order, so that tables matter."""
    longest = max(len(s.prompt) + s.outputs for s in streams)
    free = np.random.default_rng(0).permutation(blocks_needed(streams, block_size)).tolist()
    tables = np.zeros((len(streams), -(-longest // block_size)), dtype=np.int32)
    tokens = np.zeros((len(streams), longest + 1), dtype=np.int32)
    for row, stream in enumerate(streams):
        needed = -(-(len(stream.prompt) + stream.outputs) // block_size)
        tables[row, :needed] = [free.pop() for _ in range(needed)]
        tokens[row, : len(stream.prompt)] = stream.prompt
    pace = Pace()
    while active := [row for row, s in enumerate(streams) if len(s.tokens) < s.outputs]:
        _step(forward, streams, active, tables, tokens, block_size, pace)
    return pace


def _step(
    forward: Forward,
    streams: Sequence[Stream],
    active: list[int],
    tables: np.ndarray,
    tokens: np.ndarray,
    block_size: int,
    pace: Pace,
) -> None:
    begin = time.perf_counter()
    batch, slots = build_batch(_plan(streams, active, tables, tokens), block_size)
    logits = forward(batch)
    best = torch.topk(logits, 2)
    ids, values = best.indices[:, 0].tolist(), best.values.tolist()
    for row in active:
        streams[row].computed += streams[row].wanted
    for slot, token, (first, second) in zip(slots.tolist(), ids, values, strict=True):
        stream = streams[slot]
        tokens[slot, stream.known] = token
        stream.tokens.append(token)
        stream.gaps.append(first - second)
    seconds = time.perf_counter() - begin
    if batch.decodes == len(active):
        pace.decode_seconds += seconds
        pace.decode_tokens += len(slots)
    else:
        pace.prompt_seconds += seconds


def _plan(streams: Sequence[Stream], active: list[int], tables: np.ndarray, tokens: np.ndarray) -> Plan:
    rows = np.array(active, dtype=np.int64)
    granted = np.array([streams[row].wanted for row in active], dtype=np.int64)
    computed = np.array([streams[row].computed for row in active], dtype=np.int64)
    known = np.array([streams[row].known for row in active], dtype=np.int64)
    return Plan(0, rows, rows, granted, computed, computed + granted == known, tables, tokens)
