"""Products with weights on the CPU: packed once into oneDNN's own format, a row's result made independent of others.

oneDNN chooses its kernel by the number of rows, and two kernels may sum in different orders: a row then
depends on how many rows it came with. Which numbers of rows agree differs between machines (without AMX
nearly all, with AMX two groups of them), so deterministic mode measures it at start: `agreeing_rows` finds
the largest group of row counts that give equal bits, and `RowTiles` computes everything in pieces of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvyard.engine.backends.base import BackendError

Product = Callable[[Tensor], Tensor]

_CANDIDATES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256)
_LARGE = 8_000_000
"""Weights from which on only small pieces are tried: the head, which few rows reach."""
_TRIALS = 8
"""Pieces per row count that are compared, so that the place of a row within its piece counts too."""


def pack(weight: Tensor, bias: Tensor | None) -> Product:
    """A product with `weight` `[out, in]`, packed where oneDNN can; bias in the weight's type."""
    bias = None if bias is None else bias.to(weight.dtype)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call] # torch leaves it out
        return lambda x: torch.nn.functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return product


def agreeing_rows(product: Product, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Row counts that give a row the same bits, ascending: the largest such group of those tried.

    Raises BackendError where no two row counts agree, since then no piece is known to be safe.
    """
    largest = 64 if inputs * outputs > _LARGE else 256
    candidates = [n for n in _CANDIDATES if n <= largest]
    x = torch.randn(largest, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = {n: torch.cat([product(x[i : i + n]) for i in _offsets(n, largest)]) for n in candidates}
    groups = [[n for n in candidates if _agree(results[n], results[first])] for first in candidates]
    best = max(groups, key=len)
    if len(best) < 2:
        raise BackendError(
            f"products of {inputs} by {outputs} in {dtype} give a row other bits for every number of rows beside it",
            "start without --deterministic, or with --dtype float32",
        )
    return tuple(best)


def _offsets(rows: int, total: int) -> list[int]:
    return list(range(0, total, rows))[:_TRIALS]


def _agree(a: Tensor, b: Tensor) -> bool:
    rows = min(len(a), len(b))
    return torch.equal(a[:rows], b[:rows])


class RowTiles:
    """A product computed in pieces of agreeing row counts, the last one padded."""

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self._product = product
        self._sizes = sizes

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        if rows in self._sizes:
            return self._product(x)
        pieces, begin = [], 0
        while begin < rows:
            size = self._piece(rows - begin)
            part = x[begin : begin + size]
            if len(part) < size:
                part = torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
            pieces.append(self._product(part)[: rows - begin])
            begin += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _piece(self, left: int) -> int:
        """The smallest size that takes all that is left, else the largest: a call costs more than padding."""
        return next((size for size in self._sizes if size >= left), self._sizes[-1])
