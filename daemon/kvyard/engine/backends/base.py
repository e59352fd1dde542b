"""The interface between the engine's step loop and the device.

A backend owns the weights, the KV pool and the host pool of one model on one device. The step loop
hands it a `Batch` and gets logits; nothing above this line knows what a device is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvyard.core.plan import BlockCopy


class BackendError(Exception):
    """The backend cannot do what was asked; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(slots=True)
class Batch:
    """One step's tokens, flattened: `n` sequences, `t` tokens, chunks and decodes mixed.

    Row i owns the tokens `starts[i]:starts[i + 1]`; they stand at `positions` of its sequence, and its
    context after the step is `lengths[i]` tokens, found through `tables[i]`. All tensors are on the CPU
    (the backend moves them): int32 unless said otherwise.
    """

    tokens: Tensor
    """`[t]` token ids."""
    positions: Tensor
    """`[t]` 0-based positions."""
    starts: Tensor
    """`[n + 1]` first token of each row; the last entry is t."""
    lengths: Tensor
    """`[n]` context length of each row after the step."""
    tables: Tensor
    """`[n, b]` block tables, b = most blocks of any row here; entries beyond a row's own are undefined."""
    cache_slots: Tensor
    """`[t]` int64: block * block_size + offset, where each token's K and V go."""
    logit_rows: Tensor
    """`[k]` int64 indices into the t tokens whose logits are wanted."""
    decodes: int
    """The first `decodes` rows have one token each; chunks follow."""
    scored_rows: Tensor | None = None
    """`[s]` int64 indices of tokens whose logits are read once and not kept; see `Backend.forward`."""


SCORED_PIECE = 64
"""Rows of `scored_rows` whose logits exist at a time: 13 MB with a vocabulary of 50,000."""

ScoreReader = Callable[[Tensor], None]
"""Takes the next rows' logits, float32 `[m, vocab]` on the CPU, which are not kept afterwards."""


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The KV pool: `[layers, 2, blocks, block_size, kv_heads, head_dim]` in `dtype`, or the backend's own order."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class Backend(Protocol):
    """A model on a device."""

    name: str
    """`cpu` or `cuda`."""
    device_name: str
    """In words, for the operator."""
    geometry: KvGeometry

    def free_bytes(self) -> int:
        """Bytes that a KV pool may take now; what others on the device use is already taken off."""
        ...

    def allocate(self, blocks: int, swap_blocks: int) -> None:
        """Make the KV pool and the host pool. Raises BackendError when they do not fit."""
        ...

    def forward(self, batch: Batch, read: ScoreReader | None = None) -> Tensor:
        """Run the model: KV of all t tokens is written, logits `[k, vocab]` float32 come back on the CPU.

        Where the batch has `scored_rows`, `read` gets their logits in order, at most `SCORED_PIECE` at a time.
        """
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Swap out, swap in and copy blocks, in the order given, before the next `forward`."""
        ...

    def self_check(self) -> None:
        """Deterministic mode: the real layers at 1, 2, 3, 5, 8, 17 and 64 rows. Raises BackendError."""
        ...
