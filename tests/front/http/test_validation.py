"""Every field: null is its default, a wrong type or value is a 400 in OpenAI's shape, never a 500."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import structlog.testing
from kvyard.front.http.requests import ChatRequest, CompletionRequest
from kvyard.front.http.sampling import HOTTEST
from kvyard.front.http.unsupported import HARMLESS, UNSUPPORTED

from tests.front.http.conftest import PATIENCE, Serve, Served

COMPLETION_FIELDS = sorted(set(CompletionRequest.__struct_fields__) - {"prompt"})
CHAT_FIELDS = sorted(set(ChatRequest.__struct_fields__) - {"messages"})


def refused(answer: httpx.Response, param: str | None = None) -> dict[str, Any]:
    """The error of a 400, checked for its shape."""
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"].partition("[")[0] == param
        assert param in error["message"]
    return error


async def post(served: Served, body: bytes, path: str = "/v1/completions") -> httpx.Response:
    return await served.http.post(path, content=body, headers={"content-type": "application/json"})


async def test_API_03_null_is_the_same_as_leaving_a_field_out(serve: Serve) -> None:
    async with serve(" same text") as served:
        plain = (await served.complete(seed=1)).json()["choices"]
        for name in COMPLETION_FIELDS:
            answer = await served.complete(**{"seed": 1, name: None})
            assert answer.status_code == 200, name
            assert answer.json()["choices"] == plain, name
        everything = await served.complete(**dict.fromkeys(COMPLETION_FIELDS))
        assert everything.json()["choices"] == plain
        chat = (await served.chat()).json()["choices"]
        for name in CHAT_FIELDS:
            answer = await served.chat(**{name: None})
            assert answer.status_code == 200, name
            assert answer.json()["choices"] == chat, name
        nothing = await served.chat(**dict.fromkeys([*CHAT_FIELDS, *UNSUPPORTED]))
        assert nothing.json()["choices"] == chat
        first, *others = served.service.jobs
        assert all((job.n, job.priority, job.tenant) == (first.n, first.priority, first.tenant) for job in others)


@pytest.mark.parametrize(
    "body",
    [
        b"{x",
        b"",
        b"[]",
        b"3",
        b'"a"',
        b"null",
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"prompt":' + b"[" * 10_000,
        b'{"z":' + b"[" * 100_000,
        b'{"prompt":"a","prompt":"b"}',
        b'{"prompt":"a","stream_options":{"include_usage":true,"include_usage":false},"stream":true,"stream":true}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"a"} {"prompt":"b"}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b"{}",
        b'{"prompt":null}',
    ],
)
async def test_API_04_malformed_bodies_are_the_clients_fault(serve: Serve, body: bytes) -> None:
    async with serve(" x") as served:
        refused(await post(served, body))
        refused(await post(served, body, "/v1/chat/completions"))
        refused(await post(served, body, "/tokenize"))
        refused(await post(served, body, "/detokenize"))
        assert (await served.complete()).status_code == 200


async def test_numbers_that_no_float_holds(serve: Serve) -> None:
    async with serve(" x") as served:
        for number in (b"1e999", b"-1e999"):
            refused(await post(served, b'{"prompt":"a","temperature":%s}' % number), "temperature")


async def test_API_04_a_body_that_is_too_large(serve: Serve) -> None:
    async with serve(" x") as served:
        answer = await post(served, b'{"prompt":"' + b"x" * 20_000_000 + b'"}')
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert (await served.complete()).status_code == 200


@pytest.mark.parametrize(
    ("escape", "good"),
    [(r"\ud83d", False), (r"\ude00", False), (r"\ud83dx", False), (r"\ud83d\ude00", True), (r"\u0000", True)],
)
async def test_API_05_lone_surrogates_are_refused_and_pairs_are_not(serve: Serve, escape: str, good: bool) -> None:
    async with serve(" x") as served:
        for path, body in (
            ("/v1/completions", '{"prompt":"a%sb"}'),
            ("/v1/completions", '{"prompt":"a","stop":["%s"]}'),
            ("/v1/chat/completions", '{"messages":[{"role":"user","content":"%s"}]}'),
        ):
            answer = await post(served, (body % escape).encode(), path)
            if good:
                assert answer.status_code == 200
            else:
                refused(answer)


WRONG: list[tuple[str, Any]] = [
    ("prompt", 5),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", [[]]),
    ("prompt", ["a", 1]),
    ("prompt", [1, [2]]),
    ("prompt", [-1]),
    ("prompt", [49_152]),
    ("prompt", [2**80]),
    ("prompt", {"text": "a"}),
    ("model", 5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_tokens", 2147483647),
    ("max_tokens", 2147483640),
    ("max_tokens", 1e18),
    ("max_tokens", 10**18),
    ("max_tokens", 10**30),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("top_p", 1.0001),
    ("top_p", -0.1),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 5_000_000),
    ("best_of", 0),
    ("best_of", 5_000_000),
    ("logprobs", 10**6),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("prompt_logprobs", 21),
    ("seed", 2**63),
    ("seed", 0.5),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ["x"] * 65),
    ("stop", ["x" * 1025]),
    ("stop_token_ids", [49_157]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("logit_bias", {"49152": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"\u0661": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", {"5": 1, "05": 1}),
    ("logit_bias", [1]),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", 1),
    ("user", 5),
    ("user", "x" * 257),
    ("priority", 2**31),
    ("priority", "high"),
    ("deadline_ms", 0),
    ("queue_timeout_ms", -5),
    ("echo", "no"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
async def test_values_out_of_range_are_refused_by_name(serve: Serve, name: str, value: object) -> None:
    async with serve(" x") as served:
        error = refused(await served.complete(**{name: value}))
        assert error["param"] == name or error["param"].startswith(f"{name}[")
        assert served.service.jobs == []


@pytest.mark.parametrize(
    ("name", "value"), [("n", 5_000_000), ("n", 0), ("n", -1), ("top_logprobs", 10**9), ("logprobs", 10**6)]
)
async def test_SAMPLING_17_huge_numbers_cost_nothing(serve: Serve, name: str, value: int) -> None:
    async with serve(" x") as served:
        await served.complete()
        before = psutil.Process().memory_info().rss
        start = time.perf_counter()
        answer = await (served.chat if name == "top_logprobs" else served.complete)(**{name: value})
        assert time.perf_counter() - start < 0.2 * PATIENCE
        refused(answer, name)
        assert psutil.Process().memory_info().rss - before < 20 << 20


@pytest.mark.parametrize(("value", "greedy"), [(1e-4, False), (1e-9, False), (0, True), (1, False)])
async def test_SAMPLING_02_a_tiny_nucleus(serve: Serve, value: float, greedy: bool) -> None:
    async with serve(" x") as served:
        assert (await served.complete(top_p=value, temperature=0.7)).status_code == 200
        sampling = served.service.jobs[0].sampling
        assert (sampling.temperature == 0.0) == greedy
        assert sampling.top_p == (1.0 if greedy else value)


async def test_SAMPLING_03_every_way_to_turn_top_k_off(serve: Serve) -> None:
    async with serve(" x") as served:
        size = served.text.tokenizer.vocab_size
        for value, expected in ((size - 1, size - 1), (size, 0), (size + 1, 0), (10**9, 0), (0, 0), (-1, 0), (1, 1)):
            assert (await served.complete(top_k=value, seed=5)).status_code == 200
            assert served.service.jobs[-1].sampling.top_k == expected
        refused(await served.complete(top_k=-2), "top_k")


async def test_SAMPLING_04_penalties(serve: Serve) -> None:
    async with serve(" x") as served:
        for value in (0.01, 1, 2):
            assert (await served.complete(repetition_penalty=value)).status_code == 200
            assert served.service.jobs[-1].sampling.repetition_penalty == value
        for name in ("presence_penalty", "frequency_penalty"):
            for value in (-2, 2):
                assert (await served.complete(**{name: value})).status_code == 200
                assert getattr(served.service.jobs[-1].sampling, name) == value


@pytest.mark.parametrize(
    ("given", "used"), [(0, 0.0), (1e-5, 1e-5), (9e-6, 0.0), (1e-40, 0.0), (2.5, 2.5), (1e300, HOTTEST)]
)
async def test_temperatures_an_engine_can_divide_by(serve: Serve, given: float, used: float) -> None:
    async with serve(" x") as served:
        assert (await served.complete(temperature=given)).status_code == 200
        assert served.service.jobs[0].sampling.temperature == used


async def test_SAMPLING_09_no_seed_means_another_one_each_time(serve: Serve) -> None:
    async with serve(" x") as served:
        await asyncio.gather(*(served.complete() for _ in range(5)))
        await served.complete(prompt=["a", "b"])
        seeds = [job.sampling.seed for job in served.service.jobs]
        assert len(set(seeds)) == 7
        assert all(0 <= seed < 2**63 for seed in seeds)


async def test_SAMPLING_08_a_seed_is_used_as_it_is(serve: Serve) -> None:
    async with serve(" x") as served:
        for seed, used in ((7, 7), (0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (-(2**63), 0)):
            assert (await served.complete(seed=seed, n=8)).status_code == 200
            assert (served.service.jobs[-1].sampling.seed, served.service.jobs[-1].n) == (used, 8)


async def test_SAMPLING_11_a_bias_on_an_added_token(serve: Serve) -> None:
    async with serve(" x") as served:
        for bias in (-100, 100):
            assert (await served.complete(logit_bias={"2": bias, "49151": 0.5})).status_code == 200
            assert served.service.jobs[-1].sampling.logit_bias == ((2, float(bias)), (49_151, 0.5))


async def test_SAMPLING_12_stop_ids_outside_the_vocabulary(serve: Serve) -> None:
    async with serve(" x") as served:
        for wrong in ([served.text.tokenizer.vocab_size + 5], [-1]):
            refused(await served.complete(stop_token_ids=wrong, min_tokens=4), "stop_token_ids")
        assert (await served.complete(stop_token_ids=[5, 5, 6])).status_code == 200
        assert served.service.jobs[-1].sampling.stop_token_ids == (5, 6)


async def test_SAMPLING_14_15_min_tokens_and_ignored_ends_reach_the_engine(serve: Serve) -> None:
    async with serve([2] * 60, max_model_len=100) as served:
        body = (await served.complete(min_tokens=10, max_tokens=50)).json()
        assert body["usage"]["completion_tokens"] == 11
        body = (await served.complete(ignore_eos=True, max_tokens=50)).json()
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (50, "length")


async def test_SAMPLING_16_all_choices_have_the_same_rules(serve: Serve) -> None:
    async with serve([300, 301, 7, 302]) as served:
        one = (await served.complete(stop_token_ids=[7])).json()["choices"][0]
        two = (await served.complete(stop_token_ids=[7], n=2)).json()["choices"]
        assert [{**choice, "index": 0} for choice in two] == [one, one]


async def test_SAMPLING_18_limits_that_overflow(serve: Serve) -> None:
    async with serve(" x") as served:
        for value in (2147483647, 2147483640, 10**18, 0, -1, 1.5, "5"):
            refused(await served.complete(max_tokens=value), "max_tokens")
            refused(await served.chat(max_tokens=value), "max_tokens")
        assert (await served.http.get("/health")).status_code == 200


async def test_contradictions(serve: Serve) -> None:
    async with serve(" x") as served:
        refused(await served.complete(best_of=2, n=3), "best_of")
        refused(await served.complete(best_of=2, stream=True), "best_of")
        refused(await served.complete(stream=True, prompt_logprobs=1), "prompt_logprobs")
        refused(await served.chat(top_logprobs=3), "top_logprobs")
        refused(await served.complete(min_tokens=5, max_tokens=4), "min_tokens")


async def test_scheduling_fields_reach_the_job(serve: Serve) -> None:
    async with serve(" x") as served:
        now = time.monotonic()
        fields = {"priority": -3, "cache_salt": "s", "user": "alice", "deadline_ms": 5000, "queue_timeout_ms": 250}
        assert (await served.complete(**fields)).status_code == 200
        job = served.service.jobs[0]
        assert (job.priority, job.cache_salt, job.tenant, job.queue_timeout) == (-3, "s", "alice", 0.25)
        assert job.deadline is not None
        assert now + 4.9 < job.deadline < now + 6


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
async def test_what_is_not_supported_is_said_so(serve: Serve, name: str) -> None:
    async with serve(" x") as served:
        asked: dict[str, Any] = {"tools": [{"type": "function"}], "response_format": {"type": "json_object"}}
        ask = served.chat if name in CompletionRequest.__struct_fields__ else served.complete
        error = refused(await ask(**{name: asked.get(name, "something")}), name)
        assert error["code"] == "unsupported_parameter"
        assert "not supported" in error["message"]
        for calm in UNSUPPORTED[name].neutral:
            assert (await served.complete(**{name: calm})).status_code == 200


async def test_unknown_fields_are_ignored_with_one_line(serve: Serve) -> None:
    async with serve(" x") as served:
        with structlog.testing.capture_logs() as lines:
            assert (await served.complete(colour="blue", speed=3, **dict.fromkeys(HARMLESS, "x"))).status_code == 200
        about = [line for line in lines if "unknown" in line["event"]]
        assert [line["fields"] for line in about] == [["colour", "speed"]]
        with structlog.testing.capture_logs() as lines:
            await served.complete(**dict.fromkeys(HARMLESS, "x"))
        assert lines == []


async def test_text_that_quotes_a_fields_name_is_no_duplicate(serve: Serve) -> None:
    async with serve(" x") as served:
        body = msgspec.json.encode({"messages": [{"role": "user", "content": 'the "user" said'}], "user": "user"})
        assert (await post(served, body, "/v1/chat/completions")).status_code == 200


async def test_another_model_is_not_found(serve: Serve) -> None:
    async with serve(" x") as served:
        answer = await served.complete(model="gpt-9")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert (await served.complete(model="smollm2-135m")).status_code == 200
