"""Requests that begin and end around each other: every one is what it would be alone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.e2e.daemon import DaemonProcess
from tests.e2e.shapes import Answer, run_alone, run_at_once
from tests.e2e.streams import MODEL


def body(first: int, max_tokens: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """A greedy request with a prompt of its own, everything that can be compared shown."""
    prompt = [(first * 37 + i * i * 11) % 256 for i in range(9 + first)]
    shown = {"return_token_ids": True, "return_logits_hash": True, "logprobs": 1, "stream": False}
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, **asked, **shown, **more}


def check(running: DaemonProcess, wanted: list[dict[str, Any]]) -> list[Answer]:
    """All in one batch, in this order, and each alone: the same answers."""
    alone = run_alone(running.base, wanted)
    together = asyncio.run(run_at_once(running, wanted))
    for number, (mine, solo) in enumerate(zip(together, alone, strict=True)):
        assert mine.error == ""
        assert mine.same(solo), f"request {number} differs from its solo run"
    return together


def test_INVARIANCE_03_parameters_stay_with_their_requests(quick_daemon: DaemonProcess) -> None:
    """Rows of two kinds of sampling in turn, half of them with penalties."""
    sampled = {"temperature": 1.0}
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.5}
    wanted = [
        body(1, 40),
        body(1, 40, **sampled, seed=1),
        body(1, 40, **penalties),
        body(1, 40, **sampled, **penalties, seed=2),
    ]
    answers = check(quick_daemon, wanted)
    assert len({tuple(answer.choices[0].tokens) for answer in answers}) == 4, "all of it shows"


def test_INVARIANCE_05_a_plain_row_that_ends_takes_nobodys_processors_along(quick_daemon: DaemonProcess) -> None:
    plain = body(1, 5)
    shaped = body(2, 40, min_tokens=20, presence_penalty=1.0, ignore_eos=False, stop_token_ids=list(range(0, 256, 3)))
    _, with_processors, _ = check(quick_daemon, [plain, shaped, body(3, 30)])
    assert len(with_processors.choices[0].tokens) >= 20


def test_INVARIANCE_06_seeds_follow_the_request_not_its_row(quick_daemon: DaemonProcess) -> None:
    wanted = [body(4, length, temperature=1.0, seed=seed) for seed, length in ((1, 5), (2, 20), (3, 40))]
    answers = check(quick_daemon, wanted)
    assert [len(answer.choices[0].tokens) for answer in answers] == [5, 20, 40]
    assert len({tuple(answer.choices[0].tokens[:5]) for answer in answers}) == 3, "the seeds are told apart"


def test_INVARIANCE_07_who_ends_early_leaves_the_others_as_they_are(quick_daemon: DaemonProcess) -> None:
    answers = check(quick_daemon, [body(first, 2**first) for first in range(8)])
    assert [len(answer.choices[0].tokens) for answer in answers] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_several_sequences_of_one_request_are_what_each_would_be_alone(quick_daemon: DaemonProcess) -> None:
    """They share their prompt's KV; sequence 0 has the request's seed itself."""
    many = body(6, 12, n=4, temperature=1.0, seed=11)
    (answer,) = check(quick_daemon, [many])
    (alone,) = run_alone(quick_daemon.base, [{**many, "n": 1}])
    assert answer.choices[0] == alone.choices[0]
    assert len({tuple(choice.tokens) for choice in answer.choices.values()}) == 4
    best = httpx.post(quick_daemon.base + "/v1/completions", json={**many, "n": 1, "best_of": 4}).json()["choices"][0]
    assert best["token_ids"] in [choice.tokens for choice in answer.choices.values()]
