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

ROUNDED_TO = 32
"""Queries and keys are filled up with zeros to a multiple of this: torch compiles a bfloat16 product for each shape
that is left over at the end of its tiles and keeps it for good (measured: 0.1 MB per pair of lengths, endlessly)."""


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
    """Added to the scores, `[queries, length]`, both rounded up to `ROUNDED_TO`; None for a chunk that begins its
    sequence: plain causal order."""


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
    shape = (_rounded(queries), _rounded(length))
    return torch.full(shape, float("-inf"), dtype=dtype).triu_(length - queries + 1)


def _rounded(rows: int) -> int:
    return -(-rows // ROUNDED_TO) * ROUNDED_TO


def chunk_attention(q: Tensor, pool: CpuPool, layer: int, chunk: Chunk, scale: float, out: Tensor) -> None:
    """Write `out[chunk.begin : chunk.end]`, `[t, heads * width]`, from float32 queries `[t, heads, width]`."""
    heads, width = q.shape[1:]
    keys, values = pool.gather(layer, chunk.blocks, chunk.length)
    group, count = heads // pool.kv_heads, chunk.end - chunk.begin
    queries = _filled_up(q[chunk.begin : chunk.end].transpose(0, 1), 1, pool.dtype)
    made = functional.scaled_dot_product_attention(
        queries, _filled_up(keys, group, pool.dtype), _filled_up(values, group, pool.dtype), chunk.mask,
        is_causal=chunk.mask is None, scale=scale,
    )  # fmt: skip
    out[chunk.begin : chunk.end] = made[0, :, :count].transpose(0, 1).reshape(-1, heads * width)


def _filled_up(x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """`[heads, rows, width]` as `[1, heads * group, rounded rows, width]`: each head `group` times, then zeros."""
    heads, rows, width = x.shape
    made = torch.empty(heads, group, _rounded(rows), width, dtype=dtype)
    made[:, :, :rows] = x[:, None]
    made[:, :, rows:] = 0
    return made.view(1, heads * group, -1, width)
