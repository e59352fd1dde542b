"""Log-probabilities of prompts over HTTP: the right numbers, in every form, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import VOCABULARY
from tests.e2e.records import recording
from tests.e2e.streams import MODEL
from tests.e2e.test_recovery import kill_engine
from tests.engine.tiny import LLAMA, dense_logits, random_tensors

SETTINGS = LLAMA | {"vocab_size": VOCABULARY}


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first * 31 + i * i * 7 + 3 * i) % 256 for i in range(length)]


def body_of(prompt: list[int], **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """A greedy request with everything that can be shown."""
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, **asked, **more}


async def chunks_of(base: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of each chunk of a stream, as they come."""
    found: list[dict[str, Any]] = []
    async with (
        httpx.AsyncClient(base_url=base, timeout=120, verify=False) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"]
    return found


def scores(running: DaemonProcess, prompt: list[int], **more: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
    """Log-probabilities of a prompt's tokens."""
    answer = running.post("/v1/completions", body_of(prompt, echo=True, logprobs=3, max_tokens=0, **more))
    assert answer.status_code == 200, answer.text
    found: list[Any] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found


@pytest.mark.parametrize("length", [1, 2, 16, 17, 100])
def test_echo_scores_the_prompt_as_a_dense_float64_decoder_does(quick_daemon: DaemonProcess, length: int) -> None:
    prompt = prompt_of(length)
    found = scores(quick_daemon, prompt)
    expected = torch.log_softmax(dense_logits(SETTINGS, random_tensors(SETTINGS, seed=3), prompt), dim=1)
    assert found[0] is None
    wanted = [float(expected[at, token]) for at, token in enumerate(prompt[1:])]
    assert found[1:] == pytest.approx(wanted, abs=1e-4)


def test_the_forms_agree(quick_daemon: DaemonProcess) -> None:
    prompt = prompt_of(40)
    answer = quick_daemon.post("/v1/completions", body_of(prompt, echo=True, logprobs=2, prompt_logprobs=4)).json()
    choice = answer["choices"][0]
    logprobs, by_id = choice["logprobs"], choice["prompt_logprobs"]
    assert len(logprobs["tokens"]) == len(prompt) + 5 == len(logprobs["text_offset"])
    assert by_id[0] is logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for at, token in enumerate(prompt[1:], 1):
        own = by_id[at][str(token)]
        assert own["logprob"] == logprobs["token_logprobs"][at]
        assert len(by_id[at]) == (4 if own["rank"] <= 4 else 5)
        assert len(logprobs["top_logprobs"][at]) in (2, 3)
    assert answer["usage"]["prompt_tokens"] == 40
    plain = quick_daemon.post("/v1/completions", body_of(prompt, return_logits_hash=True)).json()["choices"][0]
    again = quick_daemon.post("/v1/completions", body_of(prompt, return_logits_hash=True, prompt_logprobs=0)).json()
    assert again["choices"][0]["logits_hashes"] == plain["logits_hashes"]


def test_scoring_alone_shows_no_output(quick_daemon: DaemonProcess) -> None:
    answer = quick_daemon.complete("Hello", echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello"
    assert choice["logprobs"]["tokens"] == list("Hello")
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    refused = quick_daemon.post("/v1/completions", body_of([1, 2], max_tokens=0))
    assert refused.status_code == 400
    assert "echo" in refused.json()["error"]["message"]


def test_several_sequences_and_prompts(quick_daemon: DaemonProcess) -> None:
    prompts = [prompt_of(20), prompt_of(33, 5)]
    alone = [scores(quick_daemon, prompt) for prompt in prompts]
    asked = {"echo": True, "logprobs": 3, "n": 2, "temperature": 1, "seed": 5, "max_tokens": 3}
    choices = quick_daemon.post("/v1/completions", {**body_of([]), **asked, "prompt": prompts}).json()["choices"]
    for choice, expected in zip(choices, [alone[0], alone[0], alone[1], alone[1]], strict=True):
        assert choice["logprobs"]["token_logprobs"][: len(expected)] == expected
    assert choices[0]["token_ids"] != choices[1]["token_ids"]


@pytest.mark.parametrize(("max_tokens", "prompt_tokens", "decoded"), [(0, 50, 0), (3, 50 + 3, 4 * 2)])
def test_the_choices_of_a_request_share_the_scores_of_its_prompt(
    quick_daemon: DaemonProcess, max_tokens: int, prompt_tokens: int, decoded: int
) -> None:
    name = "kvyard_computed_tokens_total"
    prompt = prompt_of(50, 9)
    alone = scores(quick_daemon, prompt)
    idle_again(quick_daemon)
    before = [value(quick_daemon, name, phase=phase) for phase in ("prompt", "decode")]
    asked = {"echo": True, "logprobs": 3, "n": 4, "temperature": 1, "seed": 5, "max_tokens": max_tokens}
    answer = quick_daemon.post("/v1/completions", {**body_of(prompt), **asked}).json()
    assert [choice["logprobs"]["token_logprobs"][:50] for choice in answer["choices"]] == [alone] * 4
    assert answer["usage"]["completion_tokens"] == 4 * max_tokens
    idle_again(quick_daemon)
    after = [value(quick_daemon, name, phase=phase) for phase in ("prompt", "decode")]
    # The prompt once, and its last token for each of the others, whose first output token comes from it.
    assert [now - then for now, then in zip(after, before, strict=True)] == [prompt_tokens, decoded]


@pytest.mark.parametrize("echo", [False, True])
def test_LOGPROB_02_no_delta_before_the_whole_prompt_is_computed(quick_daemon: DaemonProcess, echo: bool) -> None:
    prompt = prompt_of(100)
    whole = quick_daemon.post("/v1/completions", body_of(prompt, echo=echo)).json()["choices"][0]
    with recording(quick_daemon) as records:
        records.clear()
        chunks = asyncio.run(chunks_of(quick_daemon.base, body_of(prompt, echo=echo)))
        wait_until(lambda: any(record["finished"] for record in records.steps), 5, "the last step's record")
        granted = [record["granted"] for record in records.steps if record["ids"]]
    # The prompt takes seven steps; were one of them told of, there would be more tokens than four more steps give.
    assert granted == [[16]] * 6 + [[4]] + [[1]] * 4
    assert all(chunk["token_ids"] for chunk in chunks if chunk["finish_reason"] is None)
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    assert len(whole["token_ids"]) == 5
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]


def test_a_stream_with_echo_brings_the_prompts_scores_first_and_once(quick_daemon: DaemonProcess) -> None:
    prompt = prompt_of(50)
    body = body_of(prompt, echo=True, logprobs=2)
    whole = quick_daemon.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    chunks = asyncio.run(chunks_of(quick_daemon.base, body))
    assert len(chunks[0]["logprobs"]["tokens"]) >= len(prompt) + 1
    for name, values in whole.items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values


def test_LOGPROB_05_a_neighbour_that_leaves_during_prefill_takes_nothing_along(quick_daemon: DaemonProcess) -> None:
    """Four prompts share every step; the second one's client goes away in the middle of them."""
    prompts = [prompt_of(length, length) for length in (20, 30, 40, 50)]
    alone = [scores(quick_daemon, prompt) for prompt in prompts]
    with Client(quick_daemon.socket) as control:
        assert control.call("policy.swap", {"kind": "discipline", "name": "sarathi"})["ok"]
        try:
            for repeat in range(12):
                asyncio.run(one_leaves(quick_daemon, control, prompts, alone, after=0.004 * repeat))
        finally:
            control.call("policy.swap", {"kind": "discipline", "name": "kvyard"})
    idle_again(quick_daemon)


async def one_leaves(
    running: DaemonProcess, control: Client, prompts: list[list[int]], alone: list[list[Any]], after: float
) -> None:
    async with httpx.AsyncClient(base_url=running.base, timeout=60, verify=False) as client:
        await asyncio.to_thread(control.call, "pause")
        wanted = [body_of(prompt, echo=True, logprobs=3, max_tokens=2) for prompt in prompts]
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in wanted]
        await asyncio.to_thread(
            wait_until, lambda: value(running, "kvyard_sequences_waiting") == 4, 10, "all to wait"
        )
        await asyncio.to_thread(control.call, "resume")
        await asyncio.sleep(after)
        tasks[1].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    for at in (0, 2, 3):
        answer = answers[at]
        assert isinstance(answer, httpx.Response)
        found = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert found[: len(prompts[at])] == alone[at], f"prompt {at}"


KILLER = 251
"""A token id that is in no other prompt."""


def test_an_engine_that_dies_before_and_after_the_first_token_repeats_and_loses_nothing(
    quick_model_folder: Path, tmp_path: Path
) -> None:
    fault = {"point": "sample", "action": "kill", "token": KILLER, "once": str(tmp_path / "once")}
    faults = {"KVYARD_TEST_FAULTS": json.dumps([fault])}
    flags = ("--deterministic", "--dtype", "float32", "--kv-blocks", "512", "--max-step-tokens", "16")
    prompt = [*prompt_of(60), KILLER, *prompt_of(20)]
    body = body_of(prompt, echo=True, logprobs=2, max_tokens=400, return_logits_hash=True)
    with daemon(*flags, model=quick_model_folder, env=faults) as running:
        died = asyncio.run(chunks_of(running.base, body))
        assert (tmp_path / "once").exists()
        undisturbed = asyncio.run(chunks_of(running.base, body))

        async def killed() -> list[dict[str, Any]]:
            task = asyncio.create_task(chunks_of(running.base, body))
            await asyncio.to_thread(
                wait_until, lambda: value(running, "kvyard_sequences_running") == 1, 20, "the stream to run"
            )
            await asyncio.sleep(0.2)
            await asyncio.to_thread(kill_engine, running)
            return await task

        killed_later = asyncio.run(killed())
        assert value(running, "kvyard_engine_restarts_total") == 2
    for chunks in (died, killed_later):
        for name in ("logprobs", "logits_hashes"):
            assert gathered(chunks, name) == gathered(undisturbed, name)


def gathered(chunks: list[dict[str, Any]], name: str) -> Any:  # noqa: ANN401 - any JSON value
    """All values of a field, whatever chunks they came in."""
    if name != "logprobs":
        return [value for chunk in chunks for value in chunk[name]]
    return {key: [v for chunk in chunks for v in chunk["logprobs"][key]] for key in chunks[0]["logprobs"]}
