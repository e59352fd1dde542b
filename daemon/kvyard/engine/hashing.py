"""A 64-bit hash of each row of logits, by which deterministic mode is proven.

Multilinear over the float32 bits read as pairs (one uint64 each): `sum(a_i * x_i) mod 2^64` with fixed odd
`a_i`, then mixed. One product per two logits makes it a single pass at memory speed; any change of one pair
changes the sum, since an odd factor is invertible.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_SEED = np.uint64(0x9E3779B97F4A7C15)


def splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection that mixes all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class RowHash:
    """Hashes rows of one width."""

    def __init__(self, width: int) -> None:
        self._pairs = (width + 1) // 2
        index = np.arange(1, self._pairs + 1, dtype=np.uint64)
        self._factors = splitmix(index * _SEED) | np.uint64(1)

    def __call__(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
        """`[k, width]` float32 -> `[k]` uint64."""
        if rows.shape[1] % 2:
            rows = np.pad(rows, ((0, 0), (0, 1)))
        words = np.ascontiguousarray(rows).view(np.uint64)
        sums = np.empty(len(rows), dtype=np.uint64)
        for i, row in enumerate(words):  # row by row keeps the products in cache
            sums[i] = np.dot(row, self._factors)
        return splitmix(sums ^ _SEED)
