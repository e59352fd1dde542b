"""The logits hash: same bits, same hash; any other bit, another hash; rows by themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.engine.hashing import RowHash, splitmix


def _rows(count: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)


@pytest.mark.parametrize("width", [1, 2, 97, 49152])
def test_a_row_has_its_hash_in_any_company(width: int) -> None:
    rows, digest = _rows(5, width), RowHash(width)
    together = digest(rows)
    assert together.dtype == np.uint64
    assert [int(digest(rows[i : i + 1])[0]) for i in range(5)] == together.tolist()
    assert digest(rows[::-1]).tolist() == together[::-1].tolist()


def test_two_hashers_agree() -> None:
    rows = _rows(3, 100)
    assert np.array_equal(RowHash(100)(rows), RowHash(100)(rows))


@given(st.integers(0, 96), st.integers(0, 31))
def test_one_bit_changes_the_hash(at: int, bit: int) -> None:
    rows, digest = _rows(1, 97), RowHash(97)
    before = digest(rows)[0]
    rows.view(np.uint32)[0, at] ^= np.uint32(1 << bit)
    assert digest(rows)[0] != before


def test_zeros_of_both_signs_differ() -> None:
    digest = RowHash(4)
    assert digest(np.zeros((1, 4), np.float32))[0] != digest(-np.zeros((1, 4), np.float32))[0]


def test_exchanged_logits_differ() -> None:
    rows, digest = _rows(1, 64), RowHash(64)
    for i in range(63):
        swapped = rows.copy()
        swapped[0, [i, i + 1]] = swapped[0, [i + 1, i]]
        assert digest(swapped)[0] != digest(rows)[0]


def test_many_rows_do_not_collide() -> None:
    values = np.arange(20_000, dtype=np.float32).reshape(-1, 1) * np.ones((1, 8), np.float32)
    assert len(set(RowHash(8)(values).tolist())) == 20_000


def test_no_row_gives_no_hash() -> None:
    assert RowHash(8)(np.empty((0, 8), np.float32)).shape == (0,)


def test_splitmix_is_a_bijection_on_a_sample() -> None:
    assert len(np.unique(splitmix(np.arange(100_000, dtype=np.uint64)))) == 100_000
