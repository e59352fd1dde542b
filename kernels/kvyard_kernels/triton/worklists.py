"""What each program of an attention launch computes, laid out on the host once per step and used by all layers.

A grid over rows x longest row would start programs with nothing to do, and keep room for their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvyard_kernels.triton import config


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """Which split of which row each program of `paged_decode` reads. A row's splits lie side by side."""

    rows: Tensor
    """`[items]` int32; -1 is padding."""
    numbers: Tensor
    """`[items]` int32: the split begins at position `number * config.SPLIT`."""
    firsts: Tensor
    """`[n + 1]` int32, the first item of each row."""
    window: int
    """The window they were made for: splits before it are left out."""
    several: bool
    """Some row has more than one split, so that results must be merged."""

    @property
    def count(self) -> int:
        """Rows of the batch."""
        return len(self.firsts) - 1


def decode_splits(
    lengths: Sequence[int] | Tensor, window: int = 0, device: torch.device | str = "cpu", padding: int = 0
) -> DecodeSplits:
    """Cut contexts of `lengths` (on the host) into splits at fixed positions; each row has one at least.

    `padding` items that do nothing are added, for launches whose size is fixed.
    """
    known = torch.as_tensor(lengths, dtype=torch.int64)
    low = (known - window).clamp_min(0) // config.SPLIT if window else torch.zeros_like(known)
    counts = ((known + config.SPLIT - 1) // config.SPLIT - low).clamp_min(1)
    firsts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    rows = torch.repeat_interleave(torch.arange(len(known)), counts)
    numbers = torch.arange(len(rows)) - firsts[rows] + low[rows]
    idle = torch.full((padding,), -1)
    # One piece, so that one copy moves it.
    packed = torch.cat((rows, idle, numbers, idle, firsts)).to(torch.int32).to(device, non_blocking=True)
    items = len(rows) + padding
    return DecodeSplits(
        packed[:items], packed[items : 2 * items], packed[2 * items :], window, len(rows) > len(known)
    )


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Which row and which of its tokens each query tile of `paged_mixed` computes."""

    rows: Tensor
    """`[tiles]` int32."""
    tokens: Tensor
    """`[tiles]` int32, first token of the tile within its row's chunk."""
    span: int
    """Tokens of one tile."""


def query_tiles(starts: Sequence[int] | Tensor, span: int, device: torch.device | str = "cpu") -> QueryTiles:
    """Cut the rows `starts[i]:starts[i + 1]` (on the host) into tiles of `span` tokens, which `tile_span` tells."""
    counts = (torch.as_tensor(starts, dtype=torch.int64).diff() + span - 1) // span
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    tokens = (torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]) * span
    packed = torch.cat((rows, tokens)).to(torch.int32).to(device, non_blocking=True)
    return QueryTiles(packed[: len(rows)], packed[len(rows) :], span)


def tile_span(heads: int, k_cache: Tensor) -> int:
    """Tokens that one query tile holds for a model of `heads` query heads over this cache."""
    group = heads // k_cache.shape[2]
    return config.chunk_tokens(config.mixed_config(k_cache.shape[3], group, k_cache.element_size()), group)
