"""/v1/completions: prompts of every form, choices, echo, finish reasons, usage."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from kvyard.front.service import Job

from tests.front.http.conftest import Serve, events
from tests.front.http.scripted import Script, digest

EOS = 2

Given = str | list[str] | list[int] | list[list[int]]


async def test_a_text_prompt(serve: Serve) -> None:
    async with serve(" world, it is me") as served:
        answer = await served.complete(prompt="Hello", max_tokens=3, seed=5)
        assert answer.status_code == 200
        body = answer.json()
        tokenizer = served.text.tokenizer
        expected = tokenizer.decode(tokenizer.encode(" world, it is me")[:3])
        assert body["object"] == "text_completion"
        assert body["model"] == "smollm2-135m"
        assert body["choices"] == [
            {"index": 0, "text": expected, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ]
        prompt = tokenizer.encode("Hello")
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 3,
            "total_tokens": len(prompt) + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        job = served.service.jobs[0]
        assert (job.prompt, job.max_new, job.n, job.sampling.seed) == (prompt, 3, 1, 5)
        assert job.request_id == body["id"]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Hello", 1), (["Hello", "Good day"], 2), ([504, 3575], 1), ([[504], [3575, 282]], 2), (["one"], 1)],
)
async def test_prompts_of_every_form(serve: Serve, prompt: Given, count: int) -> None:
    async with serve(" and so on") as served:
        body = (await served.complete(prompt=prompt, n=2)).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
        assert len(served.service.jobs) == count
        ids = [served.text.tokenizer.encode(each) if isinstance(each, str) else each for each in _as_list(prompt)]
        assert [job.prompt for job in served.service.jobs] == ids
        assert body["usage"]["prompt_tokens"] == sum(len(each) for each in ids)
        assert len({job.request_id for job in served.service.jobs}) == count


def _as_list(prompt: Given) -> list[Any]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


async def test_several_prompts_answer_each_their_own(serve: Serve) -> None:
    def script(job: Job, index: int) -> Script:
        return [*reversed(job.prompt), EOS]

    async with serve(script, step_s=0.001) as served:
        prompts = [[101, 102, 103], [104], [105, 106]]
        body = (await served.complete(prompt=prompts, return_token_ids=True)).json()
        assert [choice["token_ids"] for choice in body["choices"]] == [
            [103, 102, 101, EOS],
            [104, EOS],
            [106, 105, EOS],
        ]
        assert [choice["prompt_token_ids"] for choice in body["choices"]] == prompts
        assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}


async def test_the_default_limit_is_sixteen_and_never_more_than_the_window(serve: Serve) -> None:
    async with serve(" x" * 40, max_model_len=20) as served:
        assert len((await served.complete(prompt=[5], return_token_ids=True)).json()["choices"][0]["token_ids"]) == 16
        body = (await served.complete(prompt=[5] * 12)).json()
        assert body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("limit", [1, 5, 20])
async def test_BOUNDARY_04_as_many_tokens_as_asked_for(serve: Serve, limit: int) -> None:
    async with serve([EOS] * 30) as served:
        usage = (await served.complete(max_tokens=limit, ignore_eos=True)).json()["usage"]
        assert usage["completion_tokens"] == limit
        assert usage["total_tokens"] == usage["prompt_tokens"] + limit


async def test_BOUNDARY_05_the_refusal_names_the_numbers(serve: Serve) -> None:
    async with serve(max_model_len=2048) as served:
        answer = await served.complete(prompt=[9] * 8, max_tokens=2045)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert all(number in error["message"] for number in ("2048", " 8 ", "2045"))
        assert served.service.jobs == []
        assert (await served.complete(prompt=[9] * 8, max_tokens=2040)).status_code == 200


async def test_a_prompt_that_fills_the_window_is_refused(serve: Serve) -> None:
    async with serve(max_model_len=64) as served:
        answer = await served.complete(prompt=[9] * 64)
        assert answer.status_code == 400
        assert "64" in answer.json()["error"]["message"]
        assert (await served.complete(prompt=[9] * 63)).status_code == 200


async def test_echo_puts_the_prompt_before_the_text(serve: Serve) -> None:
    async with serve(" world") as served:
        body = (await served.complete(prompt="Hello", echo=True)).json()
        assert body["choices"][0]["text"] == "Hello world"
        body = (await served.complete(prompt=served.text.tokenizer.encode("Good day"), echo=True)).json()
        assert body["choices"][0]["text"] == "Good day world"


async def test_echo_without_output_scores_a_prompt(serve: Serve) -> None:
    async with serve(" world") as served:
        body = (await served.complete(prompt="Hello there", echo=True, max_tokens=0, logprobs=1)).json()
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("Hello there", "length")
        assert body["usage"]["completion_tokens"] == 0
        assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
        assert choice["logprobs"]["token_logprobs"][0] is None


async def test_best_of_keeps_the_likeliest(serve: Serve) -> None:
    def script(job: Job, index: int) -> Script:
        return [300 + index, EOS]

    scores = {300: -3.0, 301: -0.1, 302: -2.0, 303: -0.7, EOS: -0.1}
    async with serve(script, logprob=lambda token: scores[token]) as served:
        body = (await served.complete(n=2, best_of=4, return_token_ids=True)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert [choice["token_ids"][0] for choice in body["choices"]] == [301, 303]
        assert body["choices"][0]["logprobs"] is None
        assert body["usage"]["completion_tokens"] == 8


async def test_cached_tokens_are_part_of_the_usage(serve: Serve) -> None:
    async with serve(" x", cached_tokens=16) as served:
        usage = (await served.complete()).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_API_16_ids_are_distinct(serve: Serve) -> None:
    async with serve(" x") as served:
        answers = await asyncio.gather(*(served.complete() for _ in range(50)))
        assert len({answer.json()["id"] for answer in answers}) == 50
        assert all(answer.status_code == 200 for answer in answers)


async def test_API_15_a_callers_id_is_given_back_and_names_nothing_inside(serve: Serve) -> None:
    def script(job: Job, index: int) -> Script:
        return job.prompt * 10

    async with serve(script, step_s=0.001) as served:
        headers = {"X-Request-Id": "same-id"}
        asked = [{"prompt": [prompt], "max_tokens": 10, "return_token_ids": True} for prompt in (400, 500)]
        answers = await asyncio.gather(
            *(served.http.post("/v1/completions", json=each, headers=headers) for each in asked)
        )
        for answer, token in zip(answers, (400, 500), strict=True):
            assert answer.headers["x-request-id"] == "same-id"
            assert answer.json()["choices"][0]["token_ids"] == [token] * 10
        assert len({job.request_id for job in served.service.jobs}) == 2


async def test_without_a_callers_id_the_answers_own_is_sent(serve: Serve) -> None:
    async with serve(" x") as served:
        answer = await served.complete()
        assert answer.headers["x-request-id"] == answer.json()["id"]
        for unfit in ("x" * 200, "a\tb"):
            answer = await served.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": unfit})
            assert answer.headers["x-request-id"] == answer.json()["id"]


async def test_token_ids_and_logits_hashes_on_demand(serve: Serve) -> None:
    async with serve([300, 301, EOS]) as served:
        choice = (await served.complete()).json()["choices"][0]
        assert not {"token_ids", "prompt_token_ids", "logits_hashes"} & choice.keys()
        choice = (await served.complete(return_token_ids=True, return_logits_hash=True)).json()["choices"][0]
        assert choice["token_ids"] == [300, 301, EOS]
        assert choice["prompt_token_ids"] == served.text.tokenizer.encode("Hello")
        assert choice["logits_hashes"] == [f"{digest(token):016x}" for token in (300, 301, EOS)]


async def test_a_stream_joins_to_the_whole_answer(serve: Serve) -> None:
    text = " the quick brown fox \u2013 and 🙂🙂 emoji"
    async with serve(text) as served:
        whole = (await served.complete(max_tokens=100)).json()
        stream = await served.complete(max_tokens=100, stream=True)
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        data = events(stream.text)
        assert data[-1] == "[DONE]"
        chunks = [msgspec.json.decode(each) for each in data[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"] == text
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


async def test_TEXT_08_empty_stop_strings_change_nothing(serve: Serve) -> None:
    async with serve(" one two three END four") as served:
        plain = (await served.complete(max_tokens=3)).json()["choices"]
        for stop in ("", [""], ["", "END"], None, []):
            assert (await served.complete(max_tokens=3, stop=stop)).json()["choices"] == plain


async def test_TEXT_05_a_stop_string_ends_the_engines_work_at_its_token(serve: Serve) -> None:
    async with serve(" the red blue green yellow and more", step_s=0.005) as served:
        choice = (await served.complete(max_tokens=100, stop=["d bl"], return_token_ids=True)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" the re", "stop", "d bl")
        assert served.service.stopped == 1
        assert served.service.live == 0
        assert len(choice["token_ids"]) <= served.service.tokens_made <= len(choice["token_ids"]) + 1


async def test_TEXT_03_impossible_bytes_are_no_reason_to_fail(serve: Serve) -> None:
    async with serve() as served:
        tokenizer = served.text.tokenizer
        by_bytes = {tokenizer.token_bytes(token): token for token in range(17, 300)}
        byte_tokens = [by_bytes[bytes([byte])] for byte in (0xE2, 0xE2, ord("A"))]
        served.service.script = lambda job, index: [*byte_tokens, EOS]
        answer = await served.complete()
        choice = answer.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("\ufffd\ufffdA", "stop")


async def test_TEXT_09_a_special_stop_token_leaves_the_text_whole(serve: Serve) -> None:
    async with serve() as served:
        tokenizer = served.text.tokenizer
        served.service.script = lambda job, index: [*tokenizer.encode("foo"), *tokenizer.encode("bar"), 7, 300]
        choice = (await served.complete(stop_token_ids=[7], skip_special_tokens=True)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("foobar", "stop", 7)


async def test_include_stop_str_in_output(serve: Serve) -> None:
    async with serve(" it is Paris and more") as served:
        choice = (await served.complete(stop="Paris", include_stop_str_in_output=True)).json()["choices"][0]
        assert choice["text"] == " it is Paris"


async def test_skip_special_tokens_may_be_turned_off(serve: Serve) -> None:
    async with serve([300, 1, 301]) as served:
        tokenizer = served.text.tokenizer
        hidden = (await served.complete(ignore_eos=True)).json()["choices"][0]["text"]
        shown = (await served.complete(ignore_eos=True, skip_special_tokens=False)).json()["choices"][0]["text"]
        assert hidden == tokenizer.decode([300, 301])
        assert shown == tokenizer.decode([300, 1, 301])
