"""What one request asks of the real daemon with the real model: ranges, ends, log-probabilities, bodies, streams."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.timing import limit

MODEL = "smollm2-135m"
VOCABULARY = 49152
END_OF_TURN = 2
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def running(shared_daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    yield shared_daemon
    idle_again(shared_daemon)
    assert "Traceback" not in shared_daemon.log
    assert "engine.test_hook" not in shared_daemon.log


def ask(running: DaemonProcess, **fields: Any) -> httpx.Response:  # noqa: ANN401 - any JSON value
    """A completion of eight greedy tokens, but for `fields`."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    return running.post("/v1/completions", body)


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def chat(running: DaemonProcess, **fields: Any) -> httpx.Response:  # noqa: ANN401 - any JSON value
    messages = [{"role": "user", "content": "Say a word."}]
    return running.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "temperature": 0, **fields})


def refused(answer: httpx.Response, status: int = 400) -> str:
    """The text of a refusal in the API's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return str(error["message"])


def events(running: DaemonProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which has to end with [DONE]."""
    with httpx.stream(
        "POST", running.base + path, json={**body, "stream": True}, timeout=120, verify=False
    ) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- sampling ------------------------------------------------------------------------------------------------


def test_SAMPLING_02_top_p_at_its_edges(running: DaemonProcess) -> None:
    greedy = texts(ask(running))
    for top_p in (1e-4, 1e-9, 0):
        assert texts(ask(running, temperature=1, top_p=top_p, seed=3)) == greedy
    assert ask(running, temperature=1, top_p=1).status_code == 200
    for top_p in (1.0001, -0.1):
        assert "top_p" in refused(ask(running, top_p=top_p))


def test_SAMPLING_04_penalties_at_their_edges(running: DaemonProcess) -> None:
    for bad in (
        {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"presence_penalty": 2.1}, {"frequency_penalty": 2.1}
    ):  # fmt: skip
        assert next(iter(bad)) in refused(ask(running, **bad))
    for good in (0.01, 1, 2):
        assert ask(running, repetition_penalty=good).status_code == 200
    for good in (-2, 2):
        assert ask(running, presence_penalty=good, frequency_penalty=good).status_code == 200
    raw = b'{"model":"smollm2-135m","prompt":"a","presence_penalty":NaN}'
    refused(httpx.post(running.base + "/v1/completions", content=raw, verify=False))
    assert running.status()["engine"]["restarts"] == 0


def test_SAMPLING_08_choices_differ_and_a_seed_repeats_them(running: DaemonProcess) -> None:
    shape = {"n": 8, "temperature": 1.2, "max_tokens": 32, "ignore_eos": True}
    assert len(set(texts(ask(running, **shape)))) >= 2
    first = texts(ask(running, **shape, seed=7))
    assert len(set(first)) == 8
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda _: texts(ask(running, **shape, seed=7)), range(2)))
    assert together == [first, first]


def test_SAMPLING_11_a_bias_on_an_added_token(running: DaemonProcess) -> None:
    never = ask(running, max_tokens=60, logit_bias={str(END_OF_TURN): -100}, return_token_ids=True)
    made = never.json()["choices"][0]["token_ids"]
    assert made and END_OF_TURN not in made
    always = ask(running, max_tokens=60, logit_bias={str(END_OF_TURN): 100}).json()
    assert always["choices"][0]["finish_reason"] == "stop"
    assert always["usage"]["completion_tokens"] == 1


def test_SAMPLING_12_a_token_that_is_none_harms_no_neighbour(running: DaemonProcess) -> None:
    alone = texts(ask(running, max_tokens=24))
    with ThreadPoolExecutor(3) as pool:
        neighbours = [pool.submit(ask, running, max_tokens=24) for _ in range(3)]
        for ids in ([VOCABULARY + 5], [-1]):
            refused(ask(running, stop_token_ids=ids, min_tokens=4))
        assert [texts(one.result()) for one in neighbours] == [alone] * 3


def test_SAMPLING_15_ends_are_ignored_when_asked(running: DaemonProcess) -> None:
    answer = ask(running, ignore_eos=True, max_tokens=50, logit_bias={"0": 5, str(END_OF_TURN): 5}).json()
    assert answer["usage"]["completion_tokens"] == 50
    assert answer["choices"][0]["finish_reason"] == "length"


def test_SAMPLING_16_every_choice_stops_at_the_models_ends(running: DaemonProcess) -> None:
    (alone,) = chat(running, max_tokens=None).json()["choices"]
    both = chat(running, n=2, max_tokens=None).json()["choices"]
    assert [one["finish_reason"] for one in both] == [alone["finish_reason"]] * 2 == ["stop"] * 2
    assert [one["message"]["content"] for one in both] == [alone["message"]["content"]] * 2


# ---- lengths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 20])
def test_BOUNDARY_04_as_many_tokens_as_asked(running: DaemonProcess, length: int) -> None:
    usage = ask(running, max_tokens=length, ignore_eos=True).json()["usage"]
    assert usage["completion_tokens"] == length
    assert usage["total_tokens"] == usage["prompt_tokens"] + length


def test_BOUNDARY_05_a_refusal_has_the_numbers(running: DaemonProcess) -> None:
    window = running.get("/v1/models").json()["data"][0]["max_model_len"]
    said = refused(ask(running, prompt=[5] * 8, max_tokens=window - 3))
    assert all(str(number) in said for number in (window, 8, window - 3)), said


# ---- log-probabilities ---------------------------------------------------------------------------------------


def strict(answer: httpx.Response) -> Any:  # noqa: ANN401 - any JSON value
    def no(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    assert answer.status_code == 200, answer.text
    return json.loads(answer.content, parse_constant=no)


def test_LOGPROB_06_every_value_is_a_number_or_null(running: DaemonProcess) -> None:
    for shape in ({"temperature": 1, "top_k": 1}, {"logit_bias": {"5": -100}}):
        (choice,) = strict(ask(running, echo=True, logprobs=5, **shape))["choices"]
        told = choice["logprobs"]["token_logprobs"]
        assert told[0] is None
        assert all(math.isfinite(one) and one <= 0 for one in told[1:])


def test_LOGPROB_07_no_alternatives_are_no_alternatives(running: DaemonProcess) -> None:
    (choice,) = strict(ask(running, logprobs=0))["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == 8
    assert choice["logprobs"]["top_logprobs"] == [{}] * 8
    (choice,) = strict(chat(running, logprobs=True, max_tokens=5, ignore_eos=True))["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]] * 5


def test_LOGPROB_09_the_end_among_the_best(running: DaemonProcess) -> None:
    end = "<|im_end|>"
    said = [{"role": "user", "content": "Say a word."}, {"role": "assistant", "content": "Hello."}]
    on = {"messages": said, "add_generation_prompt": False, "continue_final_message": True}
    answer = strict(chat(running, **on, logprobs=True, top_logprobs=5, max_tokens=2))
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [5] * len(entries)
    assert end in [each["token"] for each in entries[0]["top_logprobs"]]
    prompt = "<|im_start|>user\nSay a word.<|im_end|>\n<|im_start|>assistant\nHello."
    told = strict(ask(running, prompt=prompt, logprobs=5, max_tokens=1))["choices"][0]["logprobs"]
    assert len(told["top_logprobs"][0]) == 5
    assert end in told["top_logprobs"][0]


# ---- bodies --------------------------------------------------------------------------------------------------


def test_API_04_bodies_that_are_none(running: DaemonProcess) -> None:
    bodies = (
        b"{x", b"", b"[]", b"3", b'"a"', b"\xff\xfe", b"[" * 10_000 + b"]" * 10_000,
        b'{"model":"smollm2-135m","prompt":"a","prompt":"b"}', b" " * 20_000_000,
    )  # fmt: skip
    for raw in bodies:
        answer = httpx.post(running.base + "/v1/completions", content=raw, verify=False, timeout=30)
        refused(answer, 413 if len(raw) > 10_000_000 else 400)
    assert ask(running).status_code == 200


def test_API_05_halves_of_signs(running: DaemonProcess) -> None:
    for half in ("\\ud83d", "\\ude00"):
        for field in (f'"prompt":"{half}"', f'"prompt":"a","stop":["{half}"]'):
            raw = f'{{"model":"{MODEL}","max_tokens":2,{field}}}'.encode()
            refused(httpx.post(running.base + "/v1/completions", content=raw, verify=False))
        raw = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"{half}"}}]}}'.encode()
        refused(httpx.post(running.base + "/v1/chat/completions", content=raw, verify=False))
    raw = f'{{"model":"{MODEL}","max_tokens":2,"prompt":"\\ud83d\\ude00"}}'.encode()
    assert httpx.post(running.base + "/v1/completions", content=raw, verify=False, timeout=60).status_code == 200


# ---- streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"include_usage": False}, {}, None])
def test_API_07_no_usage_unless_asked(running: DaemonProcess, options: dict[str, bool] | None) -> None:
    body = {"model": MODEL, "max_tokens": 4, "stream_options": options}
    messages = [{"role": "user", "content": "Count."}]
    for path, prompt in (("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": messages})):
        assert all(event.get("usage") is None for event in events(running, f"/v1/{path}", {**body, **prompt}))


def test_API_09_one_role_and_one_end(running: DaemonProcess) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 20, "ignore_eos": True}
    choices = [event["choices"][0] for event in events(running, "/v1/chat/completions", body)]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)


def test_API_12_a_stream_that_cannot_be_is_refused_before_it_begins(running: DaemonProcess) -> None:
    refused(ask(running, stream=True, n=0))
    refused(ask(running, stream=True, prompt=[5] * 100_000))


def test_API_14_what_a_template_cannot_say_is_told(running: DaemonProcess) -> None:
    for messages in ([{"role": 3, "content": "a"}], [{"content": "a"}], [{"role": "user"}], []):
        said = refused(running.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 2}))
        assert said
    for second in ("user", "wizard"):
        two = [{"role": "user", "content": "a"}, {"role": second, "content": "b"}]
        answer = running.post("/v1/chat/completions", {"model": MODEL, "messages": two, "max_tokens": 2})
        assert answer.status_code == 200, "this model's template allows two user turns and any role"


def test_API_15_equal_ids_of_clients_are_no_ids_of_ours(running: DaemonProcess) -> None:
    def one(prompt: str) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        return httpx.post(
            running.base + "/v1/completions",
            json=body,
            headers={"X-Request-Id": "the-same"},
            timeout=limit(60),
            verify=False,
        )

    alone = texts(one("One"))
    with ThreadPoolExecutor(2) as pool, Client(running.socket) as client:
        kept, gone = pool.submit(one, "One"), pool.submit(one, "Two")
        until = time.monotonic() + limit(20)
        while len(rows := client.call("requests")["rows"]) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        other = next(row for row in rows if row["prompt_tokens"] and not kept.done())
        ids = sorted(row["request_id"] for row in rows)
        assert len(set(ids)) == 2
        # Requests are numbered in the order of their arrival, which two threads do not settle: cancel either.
        client.call("cancel", {"request_id": other["request_id"]})
        answers = [kept.result(), gone.result()]
    assert sorted(answer.status_code == 200 for answer in answers) == [False, True]
    if answers[0].status_code == 200:
        assert texts(answers[0]) == alone


def test_API_16_ids_are_never_equal(running: DaemonProcess) -> None:
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: ask(running, max_tokens=1), range(50)))
    assert len({answer.json()["id"] for answer in answers}) == 50


def test_API_17_a_huge_prompt_disturbs_nobody(running: DaemonProcess) -> None:
    """Neither the health checks nor a stream that runs meanwhile."""
    slow: list[float] = []
    stamps: list[float] = []
    over = threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=running.base, verify=False) as http:
            while not over.is_set():
                began = time.monotonic()
                assert http.get("/health").status_code == 200
                slow.append(time.monotonic() - began)
                time.sleep(0.05)

    def stream() -> None:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", running.base + "/v1/completions", json=body, timeout=limit(20), verify=False
        ) as answer:
            for line in answer.iter_lines():
                stamps.extend([time.monotonic()] if line else [])
                if over.is_set():
                    return

    with ThreadPoolExecutor(2) as pool:
        try:
            streaming = pool.submit(stream)
            wait_until(lambda: stamps, limit(20), "the stream to run")
            polling = pool.submit(poll)
            refused(ask(running, prompt="word " * 1_000_000))
        finally:
            over.set()
        for each in (streaming, polling):
            each.result()
    assert max(slow) < limit(0.25)
    assert max(after - before for before, after in pairwise(stamps)) < limit(0.5)


# ---- clients that leave --------------------------------------------------------------------------------------


def test_DISCONNECT_05_reset_and_sent_again(running: DaemonProcess) -> None:
    host, port = running.base.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True})
    lines = ("POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", ""))
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=limit(20)) as client:
            client.sendall((head + body).encode())
            assert client.recv(1000)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert ask(running, max_tokens=2).json()["usage"]["completion_tokens"] == 2
    idle_again(running)


def test_METRICS_09_changed_three_times_in_one_process(running: DaemonProcess) -> None:
    before = value(running, "kvyard_sequences_total")
    with Client(running.socket) as client:
        for name in ("vllm", "sarathi", "kvyard"):
            client.call("policy.swap", {"kind": "discipline", "name": name, "params": {}})
            assert ask(running, max_tokens=2).status_code == 200
    assert value(running, "kvyard_sequences_total") == before + 3


async def test_SAMPLING_09_without_a_seed_answers_differ_also_together(running: DaemonProcess) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 1}
    async with httpx.AsyncClient(base_url=running.base, timeout=limit(60), verify=False) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(5)))
    assert len({text for answer in answers for text in texts(answer)}) >= 2
