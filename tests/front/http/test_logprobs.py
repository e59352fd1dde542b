"""Log-probabilities in both forms: as many as tokens, strict JSON, each token with its own text."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from functools import partial, partialmethod
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from kvyard.front.http import order
from kvyard.front.http.logprobs import IMPOSSIBLE, LogprobFormat
from kvyard.front.http.order import MOST_SCORES
from kvyard.front.service import Job

from tests.front.http.conftest import PATIENCE, Serve, Served, events
from tests.front.http.scripted import Script, Wait

EOS = 2


def check_strict(text: str) -> None:
    """Fail when the JSON holds NaN or Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)


def near(token: int) -> list[tuple[int, float]]:
    return [(token, -0.5), *((token + i, -0.5 - i) for i in range(1, 20))]


async def test_LOGPROB_07_zero_and_true_give_one_entry_per_token_without_alternatives(serve: Serve) -> None:
    async with serve([300, 301, 302]) as served:
        logprobs = (await served.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        text = served.text.tokenizer.token_text
        assert logprobs["tokens"] == [text(300), text(301), text(302)]
        assert logprobs["token_logprobs"] == [-0.5] * 3
        assert logprobs["top_logprobs"] == [{}] * 3
        content = (await served.chat(logprobs=True, max_tokens=3)).json()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [text(300), text(301), text(302)]
        assert [entry["top_logprobs"] for entry in content] == [[], [], []]
        assert bytes(content[0]["bytes"]).decode() == text(300)


async def test_without_them_there_are_none(serve: Serve) -> None:
    async with serve([300, 301]) as served:
        assert (await served.complete()).json()["choices"][0]["logprobs"] is None
        assert (await served.chat()).json()["choices"][0]["logprobs"] is None
        for asked in (False, None):
            assert (await served.chat(logprobs=asked, top_logprobs=0)).json()["choices"][0]["logprobs"] is None
        assert {job.sampling.logprobs for job in served.service.jobs} == {-1}


async def test_LOGPROB_09_special_tokens_among_the_alternatives(serve: Serve) -> None:
    async with serve([300], alternatives=lambda token: [(token, -0.1), *((i, -1.0 - i) for i in range(5))]) as served:
        top = (await served.chat(logprobs=True, top_logprobs=5, max_tokens=1)).json()["choices"][0]["logprobs"]
        assert [each["token"] for each in top["content"][0]["top_logprobs"]] == [
            served.text.tokenizer.token_text(300),
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<repo_name>",
        ]
        top = (await served.complete(logprobs=5)).json()["choices"][0]["logprobs"]["top_logprobs"]
        assert len(top[0]) == 5


async def test_the_chosen_token_stands_among_the_alternatives_even_if_it_was_unlikely(serve: Serve) -> None:
    async with serve([300], alternatives=lambda token: [(400, -0.1), (401, -0.2)]) as served:
        top = (await served.complete(logprobs=2)).json()["choices"][0]["logprobs"]["top_logprobs"][0]
        text = served.text.tokenizer.token_text
        assert top == {text(400): -0.1, text(401): -0.2, text(300): -0.5}


async def test_parts_of_characters_do_not_hide_each_other(serve: Serve) -> None:
    async with serve() as served:
        tokenizer = served.text.tokenizer
        parts = [token for token in range(300) if tokenizer.token_text(token) == "\ufffd"][:5]
        assert len(parts) == 5
        served.service.script = lambda job, index: [parts[0]]
        served.service.alternatives = lambda token: [(part, -float(i)) for i, part in enumerate(parts, 1)]
        top = (await served.complete(logprobs=5)).json()["choices"][0]["logprobs"]["top_logprobs"][0]
        assert sorted(top.values(), reverse=True) == [-1.0, -2.0, -3.0, -4.0, -5.0]


@pytest.mark.parametrize("chosen", range(4))
async def test_the_chosen_token_has_one_name_in_all_lists(serve: Serve, chosen: int) -> None:
    async with serve() as served:
        tokenizer = served.text.tokenizer
        parts = [token for token in range(300) if tokenizer.token_text(token) == "\ufffd"][:4]
        served.service.script = lambda job, index: [parts[chosen]]
        served.service.logprob = lambda token: -1.0 - parts.index(token) if token in parts else -9.0
        served.service.alternatives = lambda token: [(part, -1.0 - i) for i, part in enumerate(parts[:3])]
        logprobs = (await served.complete(logprobs=3)).json()["choices"][0]["logprobs"]
        top = logprobs["top_logprobs"][0]
        assert top[logprobs["tokens"][0]] == logprobs["token_logprobs"][0] == -1.0 - chosen
        assert sorted(top.values(), reverse=True) == [-1.0, -2.0, -3.0, *([-4.0] if chosen == 3 else [])]


async def test_LOGPROB_06_what_has_no_chance_is_finite(serve: Serve) -> None:
    hopeless = [(300, 0.0), (301, -math.inf), (302, math.nan)]
    async with serve([300, 300], alternatives=lambda token: hopeless) as served:
        for answer in (
            await served.complete(logprobs=5, echo=True, prompt="Hello there"),
            await served.chat(logprobs=True, top_logprobs=5, max_tokens=2),
            await served.complete(prompt_logprobs=3),
        ):
            assert answer.status_code == 200
            check_strict(answer.text)
        top = (await served.complete(logprobs=3)).json()["choices"][0]["logprobs"]["top_logprobs"][0]
        assert sorted(top.values()) == [IMPOSSIBLE, IMPOSSIBLE, 0.0]


async def test_LOGPROB_08_entries_are_those_of_the_tokens_accepted(serve: Serve) -> None:
    async with serve(" a red door opens wide") as served:
        plain = (await served.complete(stop="red door", logprobs=1, return_token_ids=True)).json()["choices"][0]
        data = events((await served.complete(stop="red door", logprobs=1, return_token_ids=True, stream=True)).text)
        chunks = [msgspec.json.decode(each)["choices"][0] for each in data[:-1]]
        text = served.text.tokenizer.token_text
        for chunk in chunks:
            assert chunk["logprobs"]["tokens"] == [text(token) for token in chunk["token_ids"]]
        joined = [token for chunk in chunks for token in chunk["logprobs"]["tokens"]]
        assert joined == plain["logprobs"]["tokens"] == [text(token) for token in plain["token_ids"]]
        assert plain["text"] == " a "


async def test_echo_scores_the_prompt_too(serve: Serve) -> None:
    async with serve([300, 301], alternatives=near) as served:
        prompt = "The quick brown fox"
        choice = (await served.complete(prompt=prompt, echo=True, logprobs=2)).json()["choices"][0]
        tokenizer, logprobs = served.text.tokenizer, choice["logprobs"]
        ids = [*tokenizer.encode(prompt), 300, 301]
        assert logprobs["tokens"] == [tokenizer.token_text(token) for token in ids]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert all(value is not None for value in logprobs["token_logprobs"][1:])
        for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"][at : at + len(token)] == token


@pytest.mark.parametrize(("echoed", "by_id"), [(3, 0), (3, 1), (1, 3), (0, 2)])
async def test_an_echo_has_its_own_number_of_alternatives(serve: Serve, echoed: int, by_id: int) -> None:
    async with serve([300], alternatives=near) as served:
        body = {"prompt": [500, 600, 700], "echo": True, "logprobs": echoed, "prompt_logprobs": by_id}
        choice = (await served.complete(max_tokens=1, **body)).json()["choices"][0]
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [echoed] * 3
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [max(by_id, 1)] * 2


async def test_prompt_logprobs_by_token_id(serve: Serve) -> None:
    async with serve([300], alternatives=near) as served:
        prompt = [500, 600, 700]
        choice = (await served.complete(prompt=prompt, prompt_logprobs=2)).json()["choices"][0]
        assert choice["prompt_logprobs"][0] is None
        assert [next(iter(entry)) for entry in choice["prompt_logprobs"][1:]] == ["600", "700"]
        assert choice["prompt_logprobs"][1]["601"] == {
            "logprob": -1.5,
            "rank": 2,
            "decoded_token": served.text.tokenizer.token_text(601),
        }
        body = (await served.chat(prompt_logprobs=0, max_tokens=1)).json()
        assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


async def test_offsets_count_from_the_echoed_prompt_in_a_stream_too(serve: Serve) -> None:
    async with serve([300, 301, 302]) as served:
        body: dict[str, object] = {"prompt": [500, 600, 700], "echo": True, "logprobs": 1}
        whole = (await served.complete(**body)).json()["choices"][0]
        data = events((await served.complete(stream=True, **body)).text)[:-1]
        parts = [msgspec.json.decode(each)["choices"][0] for each in data]
        offsets = [at for part in parts for at in part["logprobs"]["text_offset"]]
        tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
        assert (tokens, offsets) == (whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"])
        assert [whole["text"][at:].startswith(token) for token, at in zip(tokens, offsets, strict=True)] == [True] * 6


async def test_scoring_a_prompt_without_any_output(serve: Serve) -> None:
    async with serve([300]) as served:
        prompt = [500, 600, 700]
        answer = (await served.complete(prompt=prompt, echo=True, logprobs=2, max_tokens=0)).json()
        choice = answer["choices"][0]
        assert choice["text"] == served.text.tokenizer.decode(prompt)
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0


async def slowest_health(served: Served, until: asyncio.Task[Any]) -> float:
    """The longest that /health took until a task had ended, seconds."""
    slowest = 0.0
    while not until.done():
        began = time.monotonic()
        assert (await served.http.get("/health")).status_code == 200
        slowest = max(slowest, time.monotonic() - began)
        await asyncio.sleep(0.005)
    return slowest


@pytest.mark.parametrize(
    ("fields", "each"),
    [
        ({"prompt_logprobs": 20}, 21),
        ({"echo": True, "logprobs": 20}, 21),
        ({"echo": True, "logprobs": 4, "prompt_logprobs": 5}, 11),
        ({"prompt_logprobs": 0}, 1),
    ],
)
async def test_no_answer_has_more_scores_of_its_prompts_than_fit(
    serve: Serve, fields: dict[str, Any], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_SCORES * 64 < 16e6
    monkeypatch.setattr(order, "MOST_SCORES", 6000)
    async with serve([300], max_model_len=1 << 20, alternatives=near) as served:
        of_output = fields.get("logprobs", -1) + 1
        fits = (6000 // 2 - of_output) // each
        assert (await served.complete(prompt=[5] * fits, n=2, max_tokens=1, **fields)).status_code == 200
        for wrong in ({"prompt": [5] * (fits + 2), "n": 2}, {"prompt": [[5] * fits, [5, 6]], "n": 2}):
            answer = await served.complete(max_tokens=1, **wrong, **fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_value")
            assert "; 6000 is the most" in error["message"]
            assert error["param"] == ("prompt_logprobs" if "prompt_logprobs" in fields else "logprobs")
        assert len(served.service.jobs) == 1


@pytest.mark.parametrize(
    ("path", "fields", "most"),
    [
        ("completions", {"prompt": [5], "logprobs": 2, "n": 2}, 1000),
        ("completions", {"prompt": [5], "logprobs": 2, "n": 1, "best_of": 2}, 1000),
        ("completions", {"prompt": [[5], [6, 7]], "logprobs": 2, "n": 1}, 1000),
        ("completions", {"prompt": [5] * 1000, "logprobs": 2, "echo": True}, 1000),
        ("completions", {"prompt": [5] * 1000, "logprobs": 2, "prompt_logprobs": 2}, 1000),
        ("chat/completions", {"logprobs": True, "top_logprobs": 2, "n": 2}, 1000),
        ("chat/completions", {"logprobs": True, "n": 2}, 3000),
    ],
)
async def test_no_answer_has_more_scores_of_its_output_than_fit(
    serve: Serve, path: str, fields: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "MOST_SCORES", 6000)
    async with serve([300], max_model_len=8192) as served:
        body = {**({"messages": [{"role": "user", "content": "Hi"}]} if path.startswith("chat") else {}), **fields}
        answer = await served.http.post(f"/v1/{path}", json={**body, "max_tokens": most})
        assert answer.status_code == 200
        jobs = len(served.service.jobs)
        wrong = [{"max_tokens": most + 1}, *([{}] if path.startswith("chat") else [])]  # all that the window holds
        for more in wrong:
            answer = await served.http.post(f"/v1/{path}", json={**body, **more})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "logprobs")
            assert "; 6000 is the most in one answer. Lower max_tokens" in error["message"]
        assert len(served.service.jobs) == jobs, "it was let in"
        if "best_of" not in fields and "prompt_logprobs" not in fields:
            answer = await served.http.post(f"/v1/{path}", json={**body, "max_tokens": most + 1, "stream": True})
            assert answer.status_code == 200, "of a stream nothing is kept"


async def test_candidates_are_compared_without_bound_where_no_scores_are_shown(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "MOST_SCORES", 10)
    async with serve([300]) as served:
        assert (await served.complete(best_of=4, max_tokens=50)).status_code == 200


async def test_continuations_that_are_not_shown_are_scored_too(serve: Serve) -> None:
    async with serve([300], max_model_len=4096) as served:
        answer = await served.complete(prompt=[5] * 2000, best_of=64, prompt_logprobs=20, max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        assert "64 choices are 2688000" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_largest_scores_stall_nobody(serve: Serve, stream: bool) -> None:
    async with serve([300], max_model_len=1 << 20, alternatives=near) as served:
        fields = {"echo": True, "logprobs": 20} if stream else {"prompt_logprobs": 20}
        asked = asyncio.create_task(
            served.complete(prompt=[500] * (MOST_SCORES // 21), max_tokens=1, stream=stream, **fields)
        )
        slowest = await slowest_health(served, asked)
        assert asked.result().status_code == 200
        assert slowest < 0.3 * PATIENCE


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}])
async def test_a_prompt_is_encoded_once_for_all_its_choices(
    serve: Serve, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def counted(real: Callable[..., Any], *given: Any) -> Any:  # noqa: ANN401 - whatever the real one has
        made.append(given)
        return real(*given)

    for name in ("prompt", "echoed"):
        monkeypatch.setattr(LogprobFormat, name, partialmethod(partial(counted, getattr(LogprobFormat, name))))
    async with serve([300, 301], alternatives=near) as served:
        prompts = [[500, 600], [700, 800, 900]]
        choices = (await served.complete(prompt=prompts, n=3, max_tokens=2, **fields)).json()["choices"]
        assert len(made) == 2
        for at, choice in enumerate(choices):
            ids = prompts[at // 3]
            if "echo" in fields:
                logprobs = choice["logprobs"]
                text = served.text.tokenizer.token_text
                assert logprobs["tokens"] == [text(token) for token in [*ids, 300, 301]]
                assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(ids) + 1)
                assert [None if top is None else len(top) for top in logprobs["top_logprobs"]] == [None] + [2] * (
                    len(ids) + 1
                )
                assert all(one <= two for one, two in pairwise(logprobs["text_offset"]))
            else:
                assert [each and next(iter(each)) for each in choice["prompt_logprobs"]] == [None, *map(str, ids[1:])]


async def test_scoring_needs_room_for_one_token_and_says_so(serve: Serve) -> None:
    async with serve([300], max_model_len=64) as served:
        asked: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 0}
        assert (await served.complete(prompt=[5] * 63, **asked)).status_code == 200
        error = (await served.complete(prompt=[5] * 64, **asked)).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "has 64 and scoring it (max_tokens 0) computes one token more" in error["message"]
        answer = await served.complete(prompt=[5], min_tokens=1, **asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
        assert (await served.complete(prompt=[5], min_tokens=0, **asked)).status_code == 200
        assert len(served.service.jobs) == 2


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 3, "stream": True}, {"n": 1, "best_of": 3}])
async def test_scoring_alone_takes_one_sequence_a_prompt(serve: Serve, fields: dict[str, Any]) -> None:
    async with serve([300], most=2) as served:
        prompts = [[500, 600], [700, 800, 900]]
        answer = await served.complete(prompt=prompts, echo=True, logprobs=0, max_tokens=0, **fields)
        assert answer.status_code == 200
        assert [job.n for job in served.service.jobs] == [1, 1]
        parts = (
            [msgspec.json.decode(each) for each in events(answer.text)[:-1]]
            if "stream" in fields
            else [answer.json()]
        )
        choices = {choice["index"]: choice for part in parts for choice in part["choices"]}
        keep = fields["n"]
        assert sorted(choices) == list(range(2 * keep))
        for index, choice in choices.items():
            prompt = prompts[index // keep]
            assert choice["text"] == served.text.tokenizer.decode(prompt)
            assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * (len(prompt) - 1)]
            assert choice["finish_reason"] == "length"
        await served.eventually(lambda: served.service.live == 0)


async def test_a_stream_begins_no_choice_before_its_prompt_is_scored(serve: Serve) -> None:
    scored = asyncio.Event()

    def script(job: Job, index: int) -> Script:
        return [Wait(scored), 300] if index == 0 else [301, 302]

    async with serve(script, max_model_len=4096) as served:
        asked = {"prompt": [500, 600], "n": 2, "echo": True, "logprobs": 0, "max_tokens": 2, "stream": True}
        answer = asyncio.create_task(served.complete(**asked))
        await served.eventually(lambda: served.service.tokens_made == 2 and served.service.live == 1)
        assert not answer.done()
        scored.set()
        data = [msgspec.json.decode(each) for each in events((await answer).text)[:-1]]
        echoed = served.text.tokenizer.decode([500, 600])
        for index in (0, 1):
            parts = [choice for part in data for choice in part["choices"] if choice["index"] == index]
            assert parts[0]["text"].startswith(echoed)
            assert parts[0]["logprobs"]["token_logprobs"][:2] == [None, -0.5]
            assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
