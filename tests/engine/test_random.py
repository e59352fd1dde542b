"""Counter-based random numbers: known answers, independence of everything but the counter, and uniformity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.engine.random import derive, philox, uniform

_U64 = np.uint64


def _words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_philox_4x32_10(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """The vectors published with the generator (Random123, kat_vectors)."""
    found = philox(_words(*counter), (_words(key[0])[0], _words(key[1])[0]))
    assert tuple(int(word[0]) for word in found) == expected


def test_index_zero_uses_the_seed_unchanged() -> None:
    assert derive(12345, 0) == 12345
    assert derive(-1, 0) == (1 << 64) - 1


def test_other_indices_get_seeds_of_their_own() -> None:
    seeds = [derive(7, index) for index in range(1000)]
    assert len(set(seeds)) == 1000
    assert seeds == [derive(7, index) for index in range(1000)]
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert derive(8, 1) != derive(7, 1)


def test_derived_seeds_are_not_what_tokens_draw() -> None:
    """The stream word keeps the two uses of the same key apart."""
    words = philox(_words(1, 0, 0, 0), _words(7, 0))  # type: ignore[arg-type] # two words
    assert derive(7, 1) != int(words[0][0]) | int(words[1][0]) << 32


@given(
    st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 20)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_a_number_depends_on_its_own_seed_and_output_alone(rows: list[tuple[int, int]], order: object) -> None:
    seeds, outputs = np.array([s for s, _ in rows], dtype=np.uint64), np.array([o for _, o in rows])
    together = uniform(seeds, outputs)
    for i in range(len(rows)):
        assert uniform(seeds[i : i + 1], outputs[i : i + 1])[0] == together[i]
    flipped = uniform(seeds[::-1], outputs[::-1])
    assert np.array_equal(flipped[::-1], together)


def test_numbers_are_uniform_along_outputs_and_along_seeds() -> None:
    count = 20_000
    along_outputs = uniform(np.full(count, 42, dtype=np.uint64), np.arange(count))
    along_seeds = uniform(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64))
    for numbers in (along_outputs, along_seeds):
        assert numbers.min() > 0
        assert numbers.max() < 1
        observed = np.histogram(numbers, 50, (0, 1))[0]
        chi_square = float(((observed - count / 50) ** 2 / (count / 50)).sum())
        assert chi_square < 94.6  # 49 degrees of freedom, p = 1e-4
        assert abs(float(np.corrcoef(numbers[1:], numbers[:-1])[0, 1])) < 0.03


def test_the_ends_are_never_reached() -> None:
    """All bits set, or none, must neither give 0 nor 1: a draw of 1 lies behind every token."""
    for bits in (0, (1 << 52) - 1):
        assert 0 < (float(bits) + 0.5) * 2.0**-52 < 1
