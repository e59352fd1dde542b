"""What reaches the engine is always within the ranges that it trusts."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.http.errors import ApiError
from kvyard.front.http.requests import CompletionRequest
from kvyard.front.http.sampling import GREEDY_BELOW, HOTTEST, sampling_of, stops_of
from kvyard.link.messages import Sampling

VOCAB = 1000


def request(**fields: object) -> CompletionRequest:
    """A request as it comes off the wire, with its ranges checked."""
    return msgspec.json.decode(msgspec.json.encode({"prompt": "x", **fields}), type=CompletionRequest)


def sampling(fields: Mapping[str, object] | None = None, seed: int = 0) -> Sampling:
    return sampling_of(request(**(fields or {})), vocab_size=VOCAB, seed=seed, logprobs=-1, prompt_logprobs=-1)


def optional(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | values


FIELDS = st.fixed_dictionaries(
    {
        "temperature": optional(st.floats(0, allow_infinity=False)),
        "top_p": optional(st.floats(0, 1)),
        "top_k": optional(st.integers(-1, 2**40)),
        "min_p": optional(st.floats(0, 1)),
        "presence_penalty": optional(st.floats(-2, 2)),
        "frequency_penalty": optional(st.floats(-2, 2)),
        "repetition_penalty": optional(st.floats(0.001, 1000)),
        "logit_bias": optional(st.dictionaries(st.integers(0, VOCAB - 1).map(str), st.floats(-100, 100), max_size=4)),
        "stop_token_ids": optional(st.lists(st.integers(0, VOCAB - 1), max_size=4)),
        "min_tokens": optional(st.integers(0, 100)),
    }
)


def fits_float32(value: float) -> bool:
    return math.isfinite(struct.unpack("<f", struct.pack("<f", value))[0])


@given(FIELDS, st.integers(-(2**63), 2**63 - 1))
def test_every_accepted_request_is_safe_to_compute_with(fields: dict[str, object], seed: int) -> None:
    made = sampling(fields, seed)
    assert made.temperature == 0.0 or GREEDY_BELOW <= made.temperature <= HOTTEST
    assert 0 <= made.top_k < VOCAB
    assert 0 < made.top_p <= 1
    assert 0 <= made.min_p <= 1
    assert 0 <= made.seed < 2**63
    assert all(0 <= token < VOCAB for token in made.stop_token_ids)
    assert all(0 <= token < VOCAB and abs(bias) <= 100 for token, bias in made.logit_bias)
    assert len(dict(made.logit_bias)) == len(made.logit_bias)
    numbers = (made.temperature, made.top_p, made.min_p, made.repetition_penalty, made.presence_penalty)
    assert all(fits_float32(number) for number in numbers)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Sampling) == made


def test_nothing_given_is_the_plain_distribution() -> None:
    assert sampling() == Sampling(seed=0)


@given(st.integers(0, 2**63 - 1))
def test_SAMPLING_08_a_seed_that_fits_is_unchanged(seed: int) -> None:
    assert sampling(seed=seed).seed == seed


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {str(VOCAB): 1.0}), ("stop_token_ids", [VOCAB]), ("logit_bias", {"5": 1.0, "9999999999": 2.0})],
)
def test_ids_outside_the_vocabulary_are_named(field: str, value: object) -> None:
    with pytest.raises(ApiError, match=rf"{field}: \d+ is no token id; the model has the ids 0 to 999") as caught:
        sampling({field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


def test_one_token_biased_twice_is_refused_however_it_is_spelt() -> None:
    assert sampling({"logit_bias": {"07": 2.0, "8": 1.0}}).logit_bias == ((7, 2.0), (8, 1.0))
    with pytest.raises(ApiError, match="7 is named twice") as caught:
        sampling({"logit_bias": {"7": 1.0, "07": 2.0}})
    assert (caught.value.code, caught.value.param) == ("duplicate_field", "logit_bias")


@pytest.mark.parametrize(("stop", "any_left"), [(None, False), ("", False), ([], False), ([""], False), ("x", True)])
def test_TEXT_08_stop_strings_of_a_request(stop: object, any_left: bool) -> None:
    assert bool(stops_of(request(stop=stop))) == any_left
