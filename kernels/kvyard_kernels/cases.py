"""Random paged-attention problems with traps in them, for the tests and for the check on a GPU.

Blocks are shuffled over a pool in which every slot that no context owns is poisoned; table entries beyond a row's
own point to a block that nobody owns. The right answer is computed densely in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedShape:
    """What a problem looks like; row i has `counts[i]` query tokens at the end of `lengths[i]` positions."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    poison: float = math.nan
    query_scale: float = 1.0
    zero_dims: int = 0
    """The first so many dimensions of q and k are zero."""
    fused: bool = False
    """q is a slice of a fused QKV product."""
    heads_first: bool = False
    """The pool is stored `[blocks, kv_heads, block_size, head_dim]`."""


@dataclass(frozen=True, slots=True)
class PagedCase:
    """The tensors of a problem, shaped as `kvyard_kernels.triton.ops` takes them."""

    shape: PagedShape
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    keys: tuple[Tensor, ...]
    """Each row's keys `[length, kv_heads, head_dim]`, dense."""
    values: tuple[Tensor, ...]

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return 1.0 / math.sqrt(self.shape.head_dim)

    def expected(self) -> Tensor:
        """The answer `[t, heads, head_dim]` in float64, on the CPU."""
        first = self.starts.tolist()
        parts = [self._row(i, self.q[first[i] : first[i + 1]].double().cpu()) for i in range(len(self.keys))]
        return torch.cat(parts) if parts else self.q.double().cpu()

    def _row(self, row: int, q: Tensor) -> Tensor:
        group = self.shape.heads // self.shape.kv_heads
        keys = self.keys[row].double().cpu().repeat_interleave(group, dim=1)
        values = self.values[row].double().cpu().repeat_interleave(group, dim=1)
        at = torch.arange(len(keys) - len(q), len(keys))[:, None]
        position = torch.arange(len(keys))[None, :]
        seen = (position <= at) & (position > at - (self.shape.window or len(keys) + 1))
        scores = torch.einsum("thd,shd->hts", q, keys) * self.scale
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
        return torch.einsum("hts,shd->thd", weights, values)


def paged_case(shape: PagedShape, *, seed: int = 0, device: torch.device | str = "cpu") -> PagedCase:
    """A problem of this shape; the same seed gives the same numbers on every device."""
    random = torch.Generator().manual_seed(seed)
    rows = len(shape.lengths)
    needed = [-(-length // shape.block_size) for length in shape.lengths]
    blocks = sum(needed) + 2
    order = torch.randperm(blocks, generator=random)
    unowned = int(order[-1])
    tables = torch.full((rows, max([*needed, 1]) + 3), unowned, dtype=torch.int32)
    pools, dense = [], []
    taken = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[taken : taken + count].to(torch.int32)
        taken += count
    for _ in range(2):
        pool, rows_of_pool = _pool(shape, tables, blocks, random)
        pools.append(pool.to(device))
        dense.append(rows_of_pool)
    tokens = sum(shape.counts)
    q = _queries(shape, tokens, random, device)
    starts = torch.tensor([0, *shape.counts]).cumsum(0).to(torch.int32)
    return PagedCase(
        shape,
        q,
        pools[0],
        pools[1],
        tables.to(device),
        starts.to(device),
        torch.tensor(shape.lengths, dtype=torch.int32).to(device),
        dense[0],
        dense[1],
    )


def _pool(
    shape: PagedShape, tables: Tensor, blocks: int, random: torch.Generator
) -> tuple[Tensor, tuple[Tensor, ...]]:
    flat = torch.full((blocks * shape.block_size, shape.kv_heads, shape.head_dim), shape.poison, dtype=shape.dtype)
    dense = []
    for row, length in enumerate(shape.lengths):
        content = torch.randn((length, shape.kv_heads, shape.head_dim), generator=random).to(shape.dtype)
        content[..., : shape.zero_dims] = 0
        position = torch.arange(length)
        block = tables[row].long()[position // shape.block_size]
        flat[block * shape.block_size + position % shape.block_size] = content
        low = max(0, length - shape.counts[row] + 1 - shape.window) if shape.window else 0
        # What no query of the row can see any more may have been given away: it is poisoned as well.
        flat[(block * shape.block_size + position % shape.block_size)[:low]] = shape.poison
        dense.append(content)
    pool = flat.view(blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    if shape.heads_first:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    return pool, tuple(dense)


def _queries(shape: PagedShape, tokens: int, random: torch.Generator, device: torch.device | str) -> Tensor:
    width = shape.heads + 2 * shape.kv_heads if shape.fused else shape.heads
    product = torch.randn((tokens, width * shape.head_dim), generator=random) * shape.query_scale
    product = product.to(shape.dtype).to(device)
    q = product[:, : shape.heads * shape.head_dim].view(tokens, shape.heads, shape.head_dim)
    q[..., : shape.zero_dims] = 0
    return q


def as_decodes(shape: PagedShape) -> PagedShape:
    """The same contexts with one query token each; a row without context keeps its token."""
    return replace(shape, counts=(1,) * len(shape.lengths))


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """An output of this shape inside a band of 4 KiB on each side, and the whole, filled with a pattern."""
    band = 4096 // dtype.itemsize
    whole = torch.full((2 * band + math.prod(shape),), 7.0, dtype=dtype, device=device)
    return whole[band : band + math.prod(shape)].view(shape), whole


def guards_intact(whole: Tensor) -> bool:
    """Whether both bands still hold the pattern."""
    band = 4096 // whole.element_size()
    return bool((whole[:band] == 7.0).all()) and bool((whole[-band:] == 7.0).all())
