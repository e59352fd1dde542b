"""Products with weights on the CPU: packed once into oneDNN's own format, a row's result made independent of others.

oneDNN chooses its kernel by the number of rows, and two kernels may sum in different orders: a row then
depends on how many rows it came with. Which numbers of rows agree differs between machines (without AMX
nearly all do, with AMX those up to 32 and those above), so deterministic mode measures it at start:
`agreeing_rows` finds the groups of row counts that give equal bits and takes the cheapest, and `RowTiles`
computes everything in pieces of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]

_CANDIDATES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256)
_LARGE = 8_000_000
"""Weights from which on only pieces of up to 64 rows are tried: the head, which few rows reach."""
_CALL_ROWS = 120
"""What reading the weights once costs, in rows of arithmetic (measured: 17 ms a step and 0.13 ms a row)."""
_FEW_ROWS = 16
"""Rows up to which a quantised matrix is the faster form (measured, all layers on one core: 8 rows 32 against 43 ms,
16 rows 42 against 45, 32 rows 78 against 53)."""
_TYPICAL_STEPS = (1, 32, 256)


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


def agreeing_rows(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Row counts, ascending, that give a row the same bits in products of this shape and type.

    Of the groups that agree, the one that computes typical steps at the least cost.
    """
    largest = 64 if inputs * outputs > _LARGE else _CANDIDATES[-1]
    candidates = [n for n in _CANDIDATES if n <= largest]
    weight, x = _cancelling(outputs, inputs, largest, dtype)
    product = pack(weight, None)
    results = {n: torch.cat([product(x[i : i + n]) for i in _offsets(n, largest)]) for n in candidates}
    groups = {tuple(n for n in candidates if _agree(results[n], results[first])) for first in candidates}
    return min(
        sorted(groups), key=lambda group: sum(_cost(group, rows) for rows in _TYPICAL_STEPS if rows <= largest)
    )


def _cancelling(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights and rows whose products cancel to nothing but rounding.

    What is left of each sum is the order in which it was taken. Ordinary numbers hide that: rounding the
    result to bfloat16 makes different float32 sums equal again in all but one of thousands.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(min(outputs, 1024), inputs // 2, generator=generator)
    half = half.repeat(-(-outputs // len(half)), 1)[:outputs]
    x = torch.randn(rows, inputs // 2, generator=generator)
    odd = inputs % 2
    weight = torch.cat([half, -half, torch.zeros(outputs, odd)], dim=1)
    return weight.to(dtype), torch.cat([x, x, torch.zeros(rows, odd)], dim=1).to(dtype)


def _offsets(rows: int, total: int) -> tuple[int, ...]:
    """Two pieces of each size, so that the place of a row within its piece counts too."""
    return (0,) if 2 * rows > total else (0, rows)


def _agree(a: Tensor, b: Tensor) -> bool:
    rows = min(len(a), len(b))
    return torch.equal(a[:rows], b[:rows])


def _cost(sizes: Sequence[int], rows: int) -> int:
    return sum(_CALL_ROWS + size for size in pieces(sizes, rows))


def pieces(sizes: Sequence[int], rows: int) -> list[int]:
    """Sizes whose sum is at least `rows`: the smallest that takes all that is left, else the largest."""
    chosen, left = [], rows
    while left > 0:
        chosen.append(next((size for size in sizes if size >= left), sizes[-1]))
        left -= chosen[-1]
    return chosen


class ByRows:
    """Two forms of one matrix: the quantised one for few rows, whose bytes count, the dense one for many."""

    def __init__(self, few: Product, many: Product) -> None:
        self._few, self._many = few, many

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if len(x) <= _FEW_ROWS else self._many(x)


class RowTiles:
    """A product computed in pieces of agreeing row counts, the last one padded with zeros."""

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self._product = product
        self._sizes = sizes

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        if rows in self._sizes:
            return self._product(x)
        results, begin = [], 0
        for size in pieces(self._sizes, rows):
            part = x[begin : begin + size]
            missing = size - len(part)
            padded = torch.nn.functional.pad(part, (0, 0, 0, missing)) if missing else part
            results.append(self._product(padded)[: len(part)])
            begin += size
        return results[0] if len(results) == 1 else torch.cat(results)
