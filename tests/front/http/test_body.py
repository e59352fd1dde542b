"""Reading and decoding bodies, apart from any endpoint."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import structlog.testing
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.http.body import BodyDecoder, read_body
from kvyard.front.http.errors import ApiError
from starlette.requests import ClientDisconnect
from starlette.types import Message

from tests.front.http.conftest import PATIENCE, Serve


class Body(msgspec.Struct):
    name: str
    number: int | None = None
    inner: dict[str, int] | None = None


DECODER = BodyDecoder(Body)


def sender(*parts: bytes, cut: bool = False) -> Callable[[], Awaitable[Message]]:
    """A `receive` that gives the parts, then the end, or the client's leaving."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.disconnect"} if cut else {"type": "http.request", "body": b"", "more_body": False})
    left = iter(messages)

    async def receive() -> Message:
        return next(left)

    return receive


async def test_parts_are_joined() -> None:
    assert await read_body({}, sender(b"ab", b"", b"cd"), 10) == b"abcd"
    assert await read_body({}, sender(), 10) == b""
    assert await read_body({}, sender(b"x" * 10), 10) == b"x" * 10


async def test_a_client_that_leaves_in_the_middle() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body({}, sender(b"ab", cut=True), 10)


async def test_API_04_a_body_above_the_limit_is_read_away_and_refused() -> None:
    receive = sender(*[b"x" * 1024] * 100)
    with pytest.raises(ApiError) as caught:
        await read_body({}, receive, 2048)
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")
    assert "2048" in caught.value.message


async def test_API_04_reading_away_has_an_end() -> None:
    seen = 0

    async def endless() -> Message:
        nonlocal seen
        seen += 1 << 20
        return {"type": "http.request", "body": b"x" * (1 << 20), "more_body": True}

    with pytest.raises(ApiError):
        await read_body({}, endless, 2048)
    assert seen <= 80 << 20


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        DECODER.decode(body, "id")
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"[]", "invalid_type", None),
        (b'{"number": 5}', "missing_required_parameter", "name"),
        (b'{"name": 5}', "invalid_type", "name"),
        (b'{"name": "a", "number": "5"}', "invalid_type", "number"),
        (b'{"name": "a", "inner": {"x": "y"}}', "invalid_type", "inner"),
        (b'{"name": "a", "inner": {"x": 1, "x": 2}}', "duplicate_field", "x"),
        (b'{"name": "a", "n\\u0061me": "b"}', "duplicate_field", "name"),
        (b'{"name": "a", "inner": {"x": 1, "\\u0078": 2}}', "duplicate_field", "x"),
        (b'{"name": "a", "other": [{"y": 1, "y" \n: 2}]}', "duplicate_field", "y"),
        (b'{"name": "a", "name": "b"}', "duplicate_field", "name"),
        (b'{"name": "a", "number": null, "number": 3}', "duplicate_field", "number"),
        (b'{"name": "a", "other": 1, "other": 2}', "duplicate_field", "other"),
        (b'{"name": "a", "tools": [1]}', "unsupported_parameter", "tools"),
        (b'{"name": "a", "tools": ["\xff"]}', "invalid_json", "tools"),
    ],
)
def test_what_is_wrong_and_where(body: bytes, code: str | None, param: str | None) -> None:
    error = refused(body)
    assert (error.code, error.param) == (code, param)


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": "name\\": \\"name", "number": 1}',
        b'{"name": "a", "other": [{"x": 1}, {"x": 2}], "inner": {"name": 1}}',
        b'{"name": "\\\\", "other": "\\\\\\"name\\":"}',
        b'{"n\\u0061me": "a"}',
    ],
)
def test_a_name_in_two_objects_or_inside_a_text_is_no_repetition(body: bytes) -> None:
    assert DECODER.decode(body, "id").name


trees = st.recursive(
    st.none() | st.text('ab\\":{}', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab\\":é', max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(trees, st.booleans())
def test_repetition_is_found_wherever_it_is_and_only_there(tree: object, ascii_only: bool) -> None:
    body = json.dumps({"name": "x", "tree": tree}, ensure_ascii=ascii_only)
    DECODER.decode(body.encode(), "id")
    twice = body[:-1] + f', "deep": [{{"k": {json.dumps(tree)}, "\\u006b": 1}}]}}'
    assert refused(twice.encode()).code == "duplicate_field"


def test_a_long_text_and_a_long_list_are_looked_through_in_no_time() -> None:
    began = time.perf_counter()
    DECODER.decode(
        msgspec.json.encode({"name": '\\"' * (1 << 20) + "a" * (4 << 20), "other": list(range(1 << 20))}), "id"
    )
    assert time.perf_counter() - began < 2


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    try:
        DECODER.decode(body, "id")
    except ApiError as error:
        assert error.status == 400


@given(st.text(max_size=20), st.integers() | st.none())
def test_what_was_encoded_is_decoded(name: str, number: int | None) -> None:
    sent = Body(name, number if number is None or -(2**63) <= number < 2**64 else 0)
    assert DECODER.decode(msgspec.json.encode(sent), "id") == sent


def test_unknown_fields_make_one_line_however_many_they_are() -> None:
    many = {f"field{i}": i for i in range(100)} | {"y" * 500: 1}
    with structlog.testing.capture_logs() as lines:
        DECODER.decode(msgspec.json.encode({"name": "a", **many}), "the-request")
    (line,) = lines
    assert line["request_id"] == "the-request"
    assert len(line["fields"]) == 32
    assert max(len(field) for field in line["fields"]) <= 64


def test_a_number_of_thousands_of_digits_in_a_body_that_is_read_twice() -> None:
    assert "cannot be read" in refused(b'{"name": "a", "other": {"name": 1}, "zz": ' + b"9" * 5000 + b"}").message


LARGE = {
    "prompts": (b'{"prompt": [%s]}' % b",".join([b"[5]"] * 1_000_000), "2048 is the most"),
    "texts": (b'{"prompt": [%s]}' % b",".join([b'"x"'] * 1_000_000), "2048 is the most"),
    "unknown fields": (
        b'{"prompt": "x", %s}' % b",".join(b'"f%d":1' % at for at in range(300_000)),
        "1000 is the most",
    ),
    "ids": (b'{"prompt": [%s]}' % b",".join([b"5"] * 2_000_000), "max_model_len"),
}


@pytest.mark.parametrize("kind", LARGE)
async def test_a_body_of_many_small_things_stalls_nobody(serve: Serve, kind: str) -> None:
    body, words = LARGE[kind]
    assert len(body) < 8 << 20
    async with serve(" a") as served:
        asked = asyncio.create_task(served.http.post("/v1/completions", content=body))
        slowest = 0.0
        while not asked.done():
            began = time.monotonic()
            assert (await served.http.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
        answer = asked.result()
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert slowest < 0.3 * PATIENCE
