"""What is wrong with a body, in words for people and a code for programs."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.http.body import BodyDecoder
from kvyard.front.http.errors import ApiError
from kvyard.front.http.requests import ChatRequest, CompletionRequest

COMPLETION, CHAT = BodyDecoder(CompletionRequest), BodyDecoder(ChatRequest)
LIBRARY = re.compile(r"`|regex|array|\bstr\b|\bint\b|[<>]=|\$|[Oo]bject missing")
"""Words of the decoder that no person should have to read."""

RANGES = [
    ({"temperature": -1}, "temperature", "temperature must be at least 0, not -1."),
    ({"top_p": 1.5}, "top_p", "top_p must be at most 1, not 1.5."),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be at least 0.001, not 0."),
    ({"seed": 2**63}, "seed", f"seed must be at most {2**63 - 1}, not {2**63}."),
    ({"stop_token_ids": [1, -3]}, "stop_token_ids[1]", "stop_token_ids[1] must be at least 0, not -3."),
    ({"user": "x" * 300}, "user", "user must have at most 256 characters, not 300."),
    ({"stop": ["a"] * 65}, "stop", "stop must have at most 64 entries, not 65."),
    ({"logit_bias": {"1": 1000}}, "logit_bias", "logit_bias: each value must be at most 100."),
    (
        {"logit_bias": {"x": 1}},
        "logit_bias",
        'logit_bias: each name must be a token id in decimal digits, such as "42".',
    ),
]
TYPES = [
    ({"n": 1.5}, "n", "n must be an integer, not 1.5."),
    ({"n": "1"}, "n", 'n must be an integer, not "1".'),
    ({"stream": 1}, "stream", "stream must be true or false, not 1."),
    ({"prompt": {"text": "a"}}, "prompt", "prompt must be a text or a list, not an object."),
    ({"user": ["x"]}, "user", "user must be a text, not a list."),
]
EMPTY = [
    ({"prompt": ""}, "prompt", "prompt is empty; at least one character is needed."),
    ({"prompt": []}, "prompt", "prompt is empty; at least one entry is needed."),
    ({"prompt": ["a", ""]}, "prompt[1]", "prompt[1] is empty; at least one character is needed."),
    ({"prompt": [[]]}, "prompt[0]", "prompt[0] is empty; at least one entry is needed."),
]


def refused(decoder: BodyDecoder[CompletionRequest] | BodyDecoder[ChatRequest], body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decoder.decode(msgspec.json.encode(body), "id")
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "message", "code"),
    [
        *((*case, "invalid_value") for case in RANGES),
        *((*case, "invalid_type") for case in TYPES),
        *((*case, "empty_prompt") for case in EMPTY),
    ],
)
def test_the_field_the_rule_and_the_value(fields: dict[str, object], param: str, message: str, code: str) -> None:
    error = refused(COMPLETION, {"prompt": "a", **fields})
    assert (error.code, error.param, error.message) == (code, param, message)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
    ],
)
def test_what_is_missing_is_the_param(body: object, param: str) -> None:
    error = refused(CHAT, body)
    assert (error.code, error.param) == ("missing_required_parameter", param)
    assert error.message.startswith(f"{param} is missing")


def test_an_empty_conversation_is_no_empty_prompt() -> None:
    error = refused(CHAT, {"messages": []})
    assert (error.code, error.message) == ("invalid_value", "messages is empty; at least one entry is needed.")


def test_a_body_that_is_no_object() -> None:
    error = refused(COMPLETION, [1])
    assert (error.code, error.param) == ("invalid_type", None)
    assert error.message == "The request body must be an object, not a list."


def test_a_long_value_is_not_repeated() -> None:
    error = refused(COMPLETION, {"prompt": "a", "n": "x" * 10_000})
    assert error.message == "n must be an integer, not a text."


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text("ab1", max_size=3)
)
names = st.text("a1", max_size=2)
values: st.SearchStrategy[object] = st.one_of(
    scalars, st.lists(scalars, max_size=2), st.dictionaries(names, scalars, max_size=2)
)


@given(st.sampled_from(CompletionRequest.__struct_fields__), values)
def test_no_message_has_the_decoders_words(name: str, value: object) -> None:
    try:
        COMPLETION.decode(msgspec.json.encode({"prompt": "a", name: value}), "id")
    except ApiError as error:
        assert not LIBRARY.search(error.message), error.message
