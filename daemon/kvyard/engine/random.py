"""Random numbers by counter: what a token draws depends on seed, sequence index and output index alone.

Philox 4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
Key: the sequence's seed, low and high half. Counter: `(vocabulary group, output index, 0, stream)`. No state
is kept, so batches, preemptions and restarts cannot change what is drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UintArray = npt.NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox(counter: tuple[UintArray, ...], key: tuple[UintArray, UintArray]) -> tuple[UintArray, ...]:
    """Four words of 32 bits (in uint64) for each counter and key; arrays broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _MASK, (first >> _HALF) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _MASK, (k1 + np.uint64(_WEYL[1])) & _MASK
    return c0, c1, c2, c3


def derive(seed: int, index: int) -> int:
    """The seed of a request's sequence `index`: index 0 uses the request's own, unchanged.

    Others take the first 64 bits of Philox with that seed as key and `(index, 0, 0, 1)` as counter; the
    last word keeps them apart from the numbers that tokens draw, which have 0 there.
    """
    seed &= (1 << 64) - 1
    if index == 0:
        return seed
    counter = np.array([[index & 0xFFFFFFFF], [index >> 32], [0], [1]], dtype=np.uint64)
    words = philox((counter[0], counter[1], counter[2], counter[3]), _key([seed]))
    return int(words[0][0]) | int(words[1][0]) << 32


def uniform(seeds: UintArray, outputs: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each row: 52 bits of Philox at counter `(0, output index, 0, 0)`, never 0 or 1."""
    zero = np.zeros(len(seeds), dtype=np.uint64)
    words = philox((zero, outputs.astype(np.uint64) & _MASK, zero, zero), _key(seeds))
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def _key(seeds: UintArray | list[int]) -> tuple[UintArray, UintArray]:
    whole = np.asarray(seeds, dtype=np.uint64)
    return whole & _MASK, whole >> _HALF
