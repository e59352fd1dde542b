"""Log-probabilities, ranks and alternatives, against plain sorting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.engine.logprobs import token_logprobs
from kvyard.link.messages import TokenLogprobs


def _one(values: list[float], token: int, top: int) -> TokenLogprobs:
    return token_logprobs(torch.tensor([values]), np.array([token], np.int32), np.array([top]))[0]


def test_values_are_log_softmax() -> None:
    found = _one([0.0, 1.0, 2.0, -1.0], 1, 2)
    expected = torch.log_softmax(torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64), 0)
    assert found.token == 1
    assert found.logprob == pytest.approx(float(expected[1]))
    assert found.rank == 2
    assert [i for i, _ in found.top] == [2, 1]
    assert [value for _, value in found.top] == pytest.approx([float(expected[2]), float(expected[1])])


def test_zero_alternatives_give_the_chosen_token_alone() -> None:
    assert _one([3.0, 2.0], 0, 0).top == []


def test_more_alternatives_than_tokens() -> None:
    assert [i for i, _ in _one([1.0, 3.0, 2.0], 0, 10).top] == [1, 2, 0]


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=30), st.integers(1, 8), st.data())
def test_equals_are_ordered_by_id(values: list[float], top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(values) - 1))
    found = _one(values, token, top)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert [i for i, _ in found.top] == order[:top]
    assert found.rank == order.index(token) + 1


def test_a_row_does_not_depend_on_others() -> None:
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(0))
    tokens, tops = np.arange(9, dtype=np.int32), np.arange(9)
    together = token_logprobs(logits, tokens, tops)
    assert together == [token_logprobs(logits[i : i + 1], tokens[i : i + 1], tops[i : i + 1])[0] for i in range(9)]


def test_impossible_tokens_are_minus_infinity_and_last() -> None:
    found = _one([0.0, -float("inf"), 1.0], 1, 3)
    assert found.logprob == -float("inf")
    assert found.rank == 3
