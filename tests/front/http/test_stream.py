"""Streams: one finish per choice, usage when asked, errors inside, and when deltas leave."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import msgspec
import pytest
from kvyard.front.service import Job, Refusal

from tests.front.http.conftest import PATIENCE, Serve, Served, events
from tests.front.http.scripted import Fail, Script, ScriptedGeneration, Wait

EOS = 2


async def chunks_of(served: Served, **fields: object) -> list[dict[str, Any]]:
    data = events((await served.complete(stream=True, **fields)).text)
    assert data[-1] == "[DONE]"
    return [msgspec.json.decode(each) for each in data[:-1]]


async def test_API_10_one_finish_though_the_last_text_is_empty(serve: Serve) -> None:
    async with serve([300, 301, EOS]) as served:
        chunks = await chunks_of(served)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert [reason for reason in reasons if reason is not None] == ["stop"]
        assert reasons[-1] == "stop"


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
async def test_API_07_no_usage_unless_asked(serve: Serve, options: dict[str, Any]) -> None:
    async with serve(" a b c") as served:
        assert all(chunk.get("usage") is None for chunk in await chunks_of(served, **options))


async def test_usage_comes_last_and_without_choices(serve: Serve) -> None:
    async with serve(" a b c") as served:
        chunks = await chunks_of(served, stream_options={"include_usage": True})
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_usage_in_every_chunk(serve: Serve) -> None:
    async with serve(" a b c") as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await chunks_of(served, stream_options=options, max_tokens=3)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_several_tokens_that_are_there_go_in_one_chunk(serve: Serve) -> None:
    async with serve([[300, 301, 302], 303, [304, EOS]]) as served:
        chunks = await chunks_of(served, return_token_ids=True)
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[300, 301, 302], [303], [304, EOS]]
        assert [("prompt_token_ids" in chunk["choices"][0]) for chunk in chunks] == [True, False, False]


async def test_TEXT_07_each_delta_leaves_with_its_token(serve: Serve) -> None:
    gates = [asyncio.Event() for _ in range(5)]
    script: Script = [item for i, gate in enumerate(gates) for item in (Wait(gate), 300 + i)]
    gates[0].set()  # the response begins with the first token
    async with (
        serve(script) as served,
        served.http.stream("POST", "/v1/completions", json=_stream(stop=["Z" * 200])) as answer,
    ):
        lines = (line async for line in answer.aiter_lines() if line)
        for i, gate in enumerate(gates):
            gate.set()
            chunk = msgspec.json.decode((await asyncio.wait_for(anext(lines), 2 * PATIENCE)).removeprefix("data: "))
            assert chunk["choices"][0]["text"] == served.text.tokenizer.token_text(300 + i)


def _stream(**fields: object) -> dict[str, Any]:
    return {"prompt": "Hello", "stream": True, **fields}


async def test_echo_stands_in_the_first_chunk_of_each_choice(serve: Serve) -> None:
    async with serve(" a b") as served:
        chunks = await chunks_of(served, prompt="Hello", echo=True, n=2)
        for index in range(2):
            texts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert "".join(texts) == "Hello a b"


async def test_API_12_a_failure_in_mid_stream_is_an_event_and_the_connection_closes(serve: Serve) -> None:
    async with serve([300, 301, Fail("engine_killed", "this request ended the engine")]) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = msgspec.json.encode(_stream())
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        whole = await asyncio.wait_for(reader.read(), PATIENCE)  # to the end of the connection
        assert b'"error":{"message":"this request ended the engine","type":"server_error"' in whole
        assert b"[DONE]" not in whole
        assert whole.endswith(b"0\r\n\r\n")
        assert served.service.live == 0
        writer.close()


async def test_API_12_a_failure_before_the_first_token_has_a_status(serve: Serve) -> None:
    for code, status in (("queue_timeout", 408), ("deadline", 408), ("engine_killed", 500), ("cancelled", 503)):
        async with serve([Fail(code, "why it failed")]) as served:
            for stream in (True, False):
                answer = await served.complete(stream=stream)
                assert answer.status_code == status
                assert answer.headers.get("x-should-retry") == (None if code == "queue_timeout" else "false")
                assert answer.json()["error"] == {
                    "message": "why it failed",
                    "type": "server_error" if status >= 500 else "invalid_request_error",
                    "param": None,
                    "code": code,
                }


async def test_API_12_a_bad_request_gets_a_400_before_any_event(serve: Serve) -> None:
    async with serve(" a", max_model_len=32) as served:
        for fields in ({"n": 0}, {"prompt": [300] * 40}):
            answer = await served.complete(stream=True, **fields)
            assert answer.status_code == 400
            assert answer.headers["content-type"] == "application/json"


async def test_one_failed_choice_ends_all_of_the_request(serve: Serve) -> None:
    def script(job: Job, index: int) -> Script:
        return [300, Fail("engine_killed")] if index == 1 else [300] * 200

    async with serve(script, step_s=0.002) as served:
        answer = await served.complete(n=3, max_tokens=200)
        assert answer.status_code == 500
        await served.eventually(lambda: served.service.live == 0)
        assert served.service.cancelled == 2


@pytest.mark.parametrize(("status", "code"), [(429, "queue_full"), (503, "draining")])
@pytest.mark.parametrize("where", ["refusal", "no_room"])
async def test_refusals_say_when_to_come_back(serve: Serve, where: str, status: int, code: str) -> None:
    async with serve(" a", **{where: Refusal(status, code, "come back later", 7)}) as served:
        answer = await served.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (status, "7")
        assert answer.json()["error"]["code"] == code
        assert answer.json()["error"]["message"] == "come back later"


async def test_prompts_of_one_request_are_taken_all_or_none(serve: Serve) -> None:
    async with serve([300] * 500, step_s=0.002) as served:
        taken = served.service.submit

        def submit(job: Job) -> ScriptedGeneration:
            if len(served.service.jobs) == 2:
                raise Refusal(429, "queue_full", "no more", 1)
            return taken(job)

        served.service.submit = submit  # type: ignore[method-assign] # the third is refused
        answer = await served.complete(prompt=[[1], [2], [3]], max_tokens=100)
        assert answer.status_code == 429
        assert (served.service.live, served.service.cancelled) == (0, 2)


async def test_an_unfinished_generation_is_not_taken_for_an_answer(serve: Serve) -> None:
    async with serve([300] * 500, step_s=0.002) as served:
        taken = served.service.submit

        def submit(job: Job) -> ScriptedGeneration:
            generation = taken(job)
            asyncio.get_running_loop().call_later(0.05, generation.cancel)
            return generation

        served.service.submit = submit  # type: ignore[method-assign] # cancelled from outside
        answer = await served.complete(max_tokens=100)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "incomplete"


async def test_an_internal_error_is_told_without_its_innards(serve: Serve) -> None:
    def script(job: Job, index: int) -> Script:
        return [300, 10**9]  # no such token: decoding it raises

    async with serve(script) as served:
        answer = await served.complete()
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        streamed = events((await served.complete(stream=True)).text)
        assert msgspec.json.decode(streamed[-1])["error"]["code"] == "internal_error"
        assert "Traceback" not in answer.text + streamed[-1]
        assert served.service.live == 0


async def test_API_17_a_huge_prompt_stalls_neither_health_nor_streams(serve: Serve) -> None:
    async with serve([300] * 200, step_s=0.01) as served:
        stamps: list[float] = []

        async def stream() -> None:
            async with served.http.stream("POST", "/v1/completions", json=_stream(max_tokens=100)) as answer:
                stamps.extend([time.perf_counter() async for line in answer.aiter_lines() if line])

        async def poll() -> float:
            worst = 0.0
            for _ in range(15):
                start = time.perf_counter()
                assert (await served.http.get("/health")).status_code == 200
                worst = max(worst, time.perf_counter() - start)
                await asyncio.sleep(0.05)
            return worst

        streaming, polling = asyncio.create_task(stream()), asyncio.create_task(poll())
        await asyncio.sleep(0.1)
        body = msgspec.json.encode({"prompt": "word " * 1_000_000})
        answer = await served.http.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert await polling < 0.25 * PATIENCE
        await streaming
        assert max(b - a for a, b in itertools.pairwise(stamps)) < 0.5 * PATIENCE


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_stops_tells_its_clients(serve: Serve, stream: bool) -> None:
    def script(job: Job, index: int) -> Script:
        return [300] * 10_000

    async with serve(script, step_s=0.002, max_model_len=20_000) as served:
        answer = asyncio.create_task(served.complete(stream=stream, max_tokens=10_000))
        await served.eventually(lambda: served.service.tokens_made > 3)
        served.stop(timeout_s=0)
        body = (await answer).text
        error = msgspec.json.decode(events(body)[-1] if stream else body)["error"]
        assert error["code"] == "shutting_down"
        assert (await answer).status_code == (200 if stream else 503)
        assert served.service.live == 0
