"""Attention of long chunks on the CPU: keys and values gathered from the pool, then matrix products.

A chunk of a prompt has many queries for the same keys, so the processor's matrix units (AMX, AVX-512 BF16) pay,
which the routine of `cpu_attention` does not use: it adds in one order whatever the chunk's shape, and that is
what deterministic mode needs. Here a row's last bits depend on the shape of its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvyard_kernels.cpu import CpuPool

LEAST_QUERIES = 32
LEAST_PAIRS = 16_384
"""Queries, and queries times keys, of a sequence in a step from which on gathering its keys and values pays."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's queries in a step: made once, used by every layer."""

    sequence: int
    """Its place in the step."""
    begin: int
    """Its first row in the step."""
    end: int
    blocks: Tensor
    """int64: its blocks, in order."""
    length: int
    """Its context, these queries included."""
    mask: Tensor | None
    """Added to the scores, `[queries, length]`; None for a chunk that begins its sequence: plain causal order."""


def chunks_of(starts: Tensor, lengths: Tensor, tables: Tensor, block_size: int, dtype: torch.dtype) -> list[Chunk]:
    """The sequences of a step that are better computed here.

    int32 `[n + 1]` starts, `[n]` lengths and `[n, blocks]` tables; `dtype` is the pool's.
    """
    begins, contexts = starts.numpy(), lengths.numpy()
    counts = begins[1:] - begins[:-1]
    found = []
    for row in ((counts >= LEAST_QUERIES) & (counts * contexts >= LEAST_PAIRS)).nonzero()[0].tolist():
        count, length = int(counts[row]), int(contexts[row])
        blocks = tables[row, : -(-length // block_size)].long()
        found.append(Chunk(row, int(begins[row]), int(begins[row + 1]), blocks, length, _mask(count, length, dtype)))
    return found


def _mask(queries: int, length: int, dtype: torch.dtype) -> Tensor | None:
    if queries == length:
        return None
    return torch.full((queries, length), float("-inf"), dtype=dtype).triu_(length - queries + 1)


def chunk_attention(q: Tensor, pool: CpuPool, layer: int, chunk: Chunk, scale: float, out: Tensor) -> None:
    """Write `out[chunk.begin : chunk.end]`, `[t, heads * width]`, from float32 queries `[t, heads, width]`."""
    heads, width = q.shape[1:]
    keys, values = pool.gather(layer, chunk.blocks, chunk.length)
    group = heads // pool.kv_heads
    if group > 1:
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    queries = q[chunk.begin : chunk.end].transpose(0, 1).to(pool.dtype)
    made = functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], chunk.mask, is_causal=chunk.mask is None, scale=scale
    )
    out[chunk.begin : chunk.end] = made[0].transpose(0, 1).reshape(-1, heads * width)
