"""A paged context on the CPU, filled through the kernel that the engine fills it with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from kvyard_kernels import cpu, reference
from torch import Tensor


@dataclass(slots=True)
class Case:
    """Sequences of the given lengths in a pool whose other slots are poisoned."""

    pool: cpu.CpuPool
    tables: Tensor
    queries: list[Tensor]
    """Per sequence float32 `[length, heads, width]`, turned: a query for every position."""
    heads: int

    def attend(
        self, chunks: list[tuple[int, int, int]], window: int = 0, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """One call for chunks `(sequence, first, end)`; `[end - first, heads, width]` for each."""
        q, starts, lengths, tables = self.arguments(chunks)
        tiles = cpu.attention_tiles(starts, lengths, self.heads // self.pool.kv_heads)
        scale = self.pool.width**-0.5
        out = cpu.paged_attention(q, self.pool, 0, tables, starts, lengths, tiles, scale, window, dtype)
        return _by_chunk(out.view(len(q), self.heads, self.pool.width), chunks)

    def expect(self, chunks: list[tuple[int, int, int]], window: int = 0) -> list[Tensor]:
        """The reference's answer to the same."""
        q, starts, lengths, tables = self.arguments(chunks)
        keys, values = self.pool.keys(0).float(), self.pool.values(0).float()
        out = reference.paged_attention(q, keys, values, tables, starts, lengths, self.pool.width**-0.5, window)
        return _by_chunk(out, chunks)

    def arguments(self, chunks: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, starts, lengths and tables of a step with these chunks."""
        q = torch.cat([self.queries[i][first:end] for i, first, end in chunks])
        counts = torch.tensor([0, *(end - first for _, first, end in chunks)])
        lengths = torch.tensor([end for _, _, end in chunks], dtype=torch.int32)
        rows = torch.tensor([i for i, _, _ in chunks])
        return q, counts.cumsum(0).int(), lengths, self.tables[rows].contiguous()


def _by_chunk(rows: Tensor, chunks: list[tuple[int, int, int]]) -> list[Tensor]:
    ends = list(accumulate(end - first for _, first, end in chunks))
    return [rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def make_case(
    lengths: list[int],
    *,
    heads: int = 9,
    kv_heads: int = 3,
    width: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    poison: float = torch.nan,
    magnitude: float = 1.0,
    seed: int = 0,
) -> Case:
    """Random sequences in shuffled blocks; every slot that no token owns holds `poison`."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + 3
    pool = cpu.CpuPool(blocks, 1, kv_heads, width, block_size, dtype)
    pool.blocks.fill_(poison)
    order = torch.randperm(blocks, generator=generator).int()
    tables = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    queries, taken = [], 0
    for i, length in enumerate(lengths):
        tables[i, : needed[i]] = order[taken : taken + needed[i]]
        taken += needed[i]
        qkv = (torch.randn(length, (heads + 2 * kv_heads) * width, generator=generator) * magnitude).to(dtype)
        positions = torch.arange(length)
        slots = tables[i].long()[positions // block_size] * block_size + positions % block_size
        cos, sin = reference.rope_tables(positions, reference.inverse_frequencies(width, 10_000.0))
        queries.append(cpu.rope_and_cache(qkv, heads, cos, sin, pool, 0, slots))
    return Case(pool, tables, queries, heads)
