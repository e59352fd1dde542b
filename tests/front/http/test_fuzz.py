"""Arbitrary bodies: an answer of the documented form or a 4xx in OpenAI's shape, never a 5xx."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.front.http import answers
from kvyard.front.http.errors import ErrorResponse
from kvyard.front.http.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kvyard.front.http.unsupported import UNSUPPORTED

from tests.front.http.conftest import Serve, Served

EOS = 2

NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 16, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 1.5, 1e300, 5e-324]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)
TEXTS = st.one_of(st.sampled_from(["", "a", "user", "text", "stop"]), st.text(max_size=8))
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
GOOD: dict[str, list[object]] = {
    "prompt": ["Hello", "x", [1, 2]],
    "messages": [
        [{"role": "user", "content": "Hi"}],
        [{"role": "x", "content": [{"type": "text", "text": "y"}]}],
    ],
    "tokens": [[1, 2, 3]],
    "stop": ["a", ["b", "c"]],
    "n": [1, 2, 3],
    "best_of": [3],
    "max_tokens": [1, 5, 16],
    "logprobs": [0, 3, True],
    "top_logprobs": [0, 2],
    "logit_bias": [{"5": 1.0}],
    "stream": [False, True],
    "stream_options": [{"include_usage": True}],
    "stop_token_ids": [[5]],
    "echo": [True],
    "temperature": [0, 0.7],
    "model": ["smollm2-135m"],
}


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, object]]:
    """Objects with some of the fields of `kind`, each of a good or of any value, and sometimes others."""
    names = st.sampled_from(kind.__struct_fields__) | st.sampled_from(sorted(UNSUPPORTED)) | TEXTS

    def fields(chosen: list[str]) -> st.SearchStrategy[dict[str, object]]:
        return st.fixed_dictionaries(
            {name: st.sampled_from(GOOD[name]) | JSON if name in GOOD else JSON for name in chosen}
        )

    needed = [name for name in ("prompt", "messages", "tokens") if name in kind.__struct_fields__][:1]
    return st.lists(names, max_size=4, unique=True).map(lambda more: [*needed, *more]).flatmap(fields)


ENDPOINTS: dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]] = {
    "/v1/completions": (CompletionRequest, answers.Completion),
    "/v1/chat/completions": (ChatRequest, answers.ChatCompletion),
    "/tokenize": (TokenizeRequest, answers.Tokenized),
    "/detokenize": (DetokenizeRequest, answers.Detokenized),
}


async def check(served: Served, path: str, content: bytes) -> None:
    answer = await served.http.post(path, content=content)
    assert answer.status_code in (200, 400, 404), (content, answer.text)
    if answer.status_code != 200:
        msgspec.json.decode(answer.content, type=ErrorResponse)
    elif answer.headers["content-type"] == "application/json":
        msgspec.json.decode(answer.content, type=ENDPOINTS[path][1])
    else:
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("examples", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_no_body_is_the_servers_fault(serve: Serve, examples: int) -> None:
    with asyncio.Runner() as runner:
        serving = serve([300, 301, 302, EOS])
        served = runner.run(serving.__aenter__())

        @settings(max_examples=examples, deadline=None)
        @given(st.data())
        def any_body(data: st.DataObject) -> None:
            for path, (kind, _) in ENDPOINTS.items():
                body = data.draw(bodies(kind))
                runner.run(check(served, path, msgspec.json.encode(body)))

        @settings(max_examples=examples, deadline=None)
        @given(st.sampled_from(sorted(ENDPOINTS)), st.binary(max_size=40))
        def any_bytes(path: str, content: bytes) -> None:
            runner.run(check(served, path, content))

        try:
            any_body()
            any_bytes()
            assert served.service.live == 0
        finally:
            runner.run(serving.__aexit__(None, None, None))
