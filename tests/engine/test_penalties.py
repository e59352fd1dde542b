"""Penalties against a plain loop over the vocabulary, as tokens come and when a sequence is rebuilt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.engine.penalties import Penalties
from kvyard.link.messages import Sampling

_VOCAB = 40
_TOKENS = st.lists(st.integers(0, _VOCAB - 1), max_size=60)


def _expected(row: np.ndarray, sampling: Sampling, prompt: list[int], output: list[int]) -> np.ndarray:
    out = row.astype(np.float64)
    for token in range(_VOCAB):
        count = output.count(token)
        if count or token in prompt:
            factor = sampling.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= count * sampling.frequency_penalty + (count > 0) * sampling.presence_penalty
    return out


def _ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@settings(deadline=None)
@given(
    _TOKENS,
    _TOKENS,
    _TOKENS,
    st.sampled_from([1.0, 0.01, 0.7, 2.0]),
    st.sampled_from([0.0, -2.0, 0.5]),
    st.sampled_from([0.0, 2.0, -0.25]),
)
def test_any_history(
    prompt: list[int], emitted: list[int], later: list[int], repetition: float, frequency: float, presence: float
) -> None:
    sampling = Sampling(seed=0, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    penalties = Penalties(sampling, _ids(prompt), _ids(emitted))
    for token in later:
        penalties.count(token)
    row = np.random.default_rng(0).normal(size=_VOCAB).astype(np.float32)
    expected = _expected(row, sampling, prompt, emitted + later)
    rebuilt, grown = row.copy(), row.copy()
    penalties.apply(grown)
    Penalties(sampling, _ids(prompt), _ids(emitted + later)).apply(rebuilt)
    assert np.array_equal(grown, rebuilt)
    assert np.allclose(grown, expected, rtol=1e-5, atol=1e-5)


def test_more_new_tokens_than_there_was_room_for() -> None:
    sampling = Sampling(seed=0, presence_penalty=1.0)
    penalties = Penalties(sampling, _ids([]), _ids([]))
    for token in range(1000):
        penalties.count(token)
    row = np.zeros(1001, dtype=np.float32)
    penalties.apply(row)
    assert row.tolist() == [-1.0] * 1000 + [0.0]


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(seed=0), False),
        (Sampling(seed=0, presence_penalty=0.1), True),
        (Sampling(seed=0, frequency_penalty=-0.1), True),
        (Sampling(seed=0, repetition_penalty=1.1), True),
    ],
)
def test_only_requests_that_ask_pay(sampling: Sampling, wanted: bool) -> None:
    assert Penalties.wanted(sampling) is wanted


@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_a_step_that_is_computed_again_counts_once(repetition: float) -> None:
    sampling = Sampling(seed=0, frequency_penalty=1.0, repetition_penalty=repetition)
    straight = Penalties(sampling, _ids([1, 2]), _ids([3]))
    repeated = Penalties(sampling, _ids([1, 2]), _ids([3]))
    for token in (4, 3, 4):
        straight.count(token)
    for token in (4, 9, 9):
        repeated.count(token)
    repeated.rewind(2)
    for token in (3, 4):
        repeated.count(token)
    one, other = (np.random.default_rng(1).normal(size=_VOCAB).astype(np.float32) for _ in range(2))
    straight.apply(one)
    repeated.apply(other)
    assert np.array_equal(one, other)
