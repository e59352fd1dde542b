"""Log-probabilities in both forms: as many as tokens, strict JSON, each token with its own text."""

from __future__ import annotations

import json
import math

import msgspec
from kvyard.front.http.logprobs import IMPOSSIBLE

from tests.front.http.conftest import Serve, events

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
