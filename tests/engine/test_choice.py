"""Choosing from a row: the quick ways against plain sorting, on rows with ties, holes and extremes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.engine.choice import best, cut_ids, draw, weights
from kvyard.link.messages import Sampling

Row = npt.NDArray[np.float32]


def _naive_order(row: Row) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def _naive_cut(row: Row, cut: Sampling) -> list[int]:
    order = [i for i in _naive_order(row) if row[i] >= np.float32(cut.min_p) * row.max()]
    if cut.top_k > 0:
        order = order[: cut.top_k]
    if cut.top_p >= 1:
        return order
    total, reached, kept = sum(float(row[i]) for i in order), 0.0, []
    for i in order:
        kept.append(i)
        reached += float(row[i])
        if reached >= cut.top_p * total:
            break
    return kept


def _row(seed: int, size: int, levels: int) -> Row:
    """Logits with many equals (few levels) or none."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, levels, size) / 4 if levels else generator.normal(size=size) * 3
    return values.astype(np.float32)


_ROWS = st.builds(
    _row, st.integers(0, 10**6), st.sampled_from([1, 2, 127, 128, 129, 1000, 5000]), st.sampled_from([0, 2, 9, 60])
)


@settings(deadline=None)
@given(_ROWS, st.sampled_from([0, 1, 2, 5, 9, 40, 300, 5000]))
def test_best_is_the_head_of_the_sorted_ids(row: Row, count: int) -> None:
    assert best(row, count).tolist() == _naive_order(row)[:count]


@settings(deadline=None, max_examples=200)
@given(
    _ROWS,
    st.sampled_from([0, 1, 3, 40, 10**9]),
    st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1e-3, 0.2, 1.0]),
)
def test_cuts_are_those_of_sorting_everything(row: Row, top_k: int, top_p: float, min_p: float) -> None:
    cut = Sampling(seed=0, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = weights(row, 1.0)
    found, expected = cut_ids(scores, cut).tolist(), _naive_cut(scores, cut)
    assert found[: min(len(found), len(expected))] == expected[: min(len(found), len(expected))]
    # Sums taken in another order may end one id sooner or later where the share is met exactly.
    assert abs(len(found) - len(expected)) <= (1 if top_p < 1 else 0)
    assert found


@settings(deadline=None, max_examples=200)
@given(_ROWS, st.floats(1e-12, 1 - 1e-12), st.sampled_from([0.3, 1.0, 5.0]))
def test_a_draw_is_where_the_running_sum_passes_it(row: Row, number: float, temperature: float) -> None:
    found = draw(row, temperature, number, None)
    sums = np.cumsum(weights(row, temperature).astype(np.float64))
    before = sums[found - 1] if found else 0.0
    slack = 1e-9 * sums[-1]
    assert before - slack <= number * sums[-1] <= sums[found] + slack
    assert weights(row, temperature)[found] > 0


@pytest.mark.parametrize("number", [2.0**-54, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("place", [0, 127, 128, 4999])
def test_an_id_without_weight_is_never_drawn(number: float, place: int) -> None:
    row = np.full(5000, -np.inf, dtype=np.float32)
    row[place] = 1.0
    assert draw(row, 1.0, number, None) == place
    assert draw(row, 1.0, number, Sampling(seed=0, top_p=0.9)) == place


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-5, 0.01])
def test_cold_rows_give_the_best_without_a_warning(temperature: float) -> None:
    row = _row(3, 1000, 0) * 100
    with np.errstate(all="raise", under="ignore"):
        assert {draw(row, temperature, number, None) for number in (0.01, 0.5, 0.99)} == {int(row.argmax())}


def test_large_logits_do_not_overflow() -> None:
    row = np.array([3e38, -3e38, 0.0], dtype=np.float32)
    with np.errstate(invalid="raise", divide="raise"):
        assert draw(row, 1.0, 0.7, None) == 0
