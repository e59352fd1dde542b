"""Fault cases step by step on one live daemon: it swaps, its pool is small, its model has two ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import END, quick_model
from tests.e2e.records import recording
from tests.e2e.shapes import Answer, ask, run_alone
from tests.e2e.streams import MODEL
from tests.e2e.timing import limit

FAILS_IN_DECODE, FAILS_COMING_BACK, BEGIN = 250, 251, 256
BIAS = {str(FAILS_IN_DECODE): -100, str(FAILS_COMING_BACK): -100}
"""The tokens that the faults wait for are in prompts alone."""
FAULTS = [
    {"point": "model", "action": "fail", "token": FAILS_IN_DECODE, "computed": 13},
    {"point": "model", "action": "fail", "token": FAILS_COMING_BACK, "restored": True},
]
FLAGS = (
    *("--deterministic", "--dtype", "float32", "--kv-blocks", "32", "--swap-blocks", "32", "--max-running", "48"),
    *("--max-step-tokens", "64"),
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = quick_model(tmp_path_factory.mktemp("two-ends"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, BEGIN]}))
    with daemon(*FLAGS, model=folder, env={"KVYARD_TEST_FAULTS": json.dumps(FAULTS)}) as process:
        yield process


@pytest.fixture
def swapping(running: DaemonProcess) -> Iterator[Client]:
    """Who gives way is swapped out. Both pools are empty when the test is over."""
    with Client(running.socket, timeout=60) as client:
        client.call("policy.swap", {"kind": "preemption", "name": "fewest-computed", "params": {"how": "swap"}})
        yield client
        idle_again(running)
        dump = client.call("dump")["engine"]
        assert (dump["host_blocks_used"], dump["blocks"]["used"], dump["faults"]) == (0, 0, [])
        client.call("policy.swap", {"kind": "discipline", "name": "kvyard", "params": {}})


def body(number: int, prompt: int, output: int, first: int = 1, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    tokens = [first, *((number * 37 + at * at * 11) % 250 for at in range(prompt - 1))]
    shown = {"return_token_ids": True, "return_logits_hash": True, "stream": True}
    asked = {"prompt": tokens, "max_tokens": output, "temperature": 0, "ignore_eos": True, "logit_bias": BIAS}
    return {"model": MODEL, **asked, **shown, "stream_options": {"include_usage": True}, **more}


async def all_at_once(running: DaemonProcess, wanted: list[dict[str, Any]]) -> list[tuple[Answer, float]]:
    """Every answer, and when its end came (monotonic)."""
    limits = httpx.Limits(max_connections=len(wanted))
    async with httpx.AsyncClient(base_url=running.base, timeout=limit(60), limits=limits) as client:

        async def one(asked: dict[str, Any]) -> tuple[Answer, float]:
            return await ask(client, asked), time.monotonic()

        return await asyncio.gather(*(one(asked) for asked in wanted))


def check_one_fails(running: DaemonProcess, wanted: list[dict[str, Any]], bad: dict[str, Any]) -> float:
    """The bad one ends in an error within a second, the others as they would alone; when the bad one's end came."""
    alone = run_alone(running.base, wanted)
    with recording(running) as records:
        records.clear()
        *others, (failed, at) = asyncio.run(all_at_once(running, [*wanted, bad]))
        assert "model_error" in failed.error
        assert [answer.same(solo) for (answer, _), solo in zip(others, alone, strict=True)] == [True] * len(wanted)
        last = max(end for _, end in others)
        undone = [
            record for record in records.steps if not record["ids"] and "error" in dict(record["finished"]).values()
        ]
        (step,) = undone
    assert 0 < at - step["at"] < limit(1)
    assert at < last, "the others were still running"
    return at


def test_LEAK_10_a_fault_in_a_decode_step_ends_one_of_four(running: DaemonProcess, swapping: Client) -> None:
    bad = body(9, 10, 60, first=FAILS_IN_DECODE)
    check_one_fails(running, [body(number, 10, 60) for number in range(3)], bad)


def test_PREEMPT_15_a_swap_in_that_fails_ends_its_request_alone(running: DaemonProcess, swapping: Client) -> None:
    """Four outgrow the pool together with it; when one has ended it comes back, which fails, beside three."""
    wanted = [body(number, 80, output) for number, output in enumerate((40, 110, 111, 112))]
    swapped = value(running, "kvyard_preemptions_total", how="swap")
    check_one_fails(running, wanted, body(9, 30, 80, first=FAILS_COMING_BACK))
    assert value(running, "kvyard_preemptions_total", how="swap") > swapped


def test_PREEMPT_14_groups_that_are_swapped_out_come_before_new_prompts(
    running: DaemonProcess, swapping: Client
) -> None:
    wanted = [body(number, 40, 100, n=4, temperature=1.0, seed=number) for number in range(10)]
    with recording(running) as records:
        records.clear()
        answers = [answer for answer, _ in asyncio.run(all_at_once(running, wanted))]
        for answer in answers:
            assert answer.error == ""
            assert [choice.finish for choice in answer.choices.values()] == ["length"] * 4
            assert [len(choice.tokens) for choice in answer.choices.values()] == [100] * 4
        check_nobody_is_passed(list(records.steps), of=4)


def check_nobody_is_passed(steps: list[dict[str, Any]], of: int) -> None:
    """While one is swapped out no new group comes in, and nobody of a group that came later."""
    first = min(sequence for record in steps for sequence, _ in record["admitted"])
    seen: set[int] = set()
    out: set[int] = set()
    swaps = 0
    for record in steps:
        came = {sequence for sequence, _ in record["admitted"]}
        waiting = out - came
        groups = {(sequence - first) // of for sequence in seen}
        for newcomer in came - seen:
            assert not waiting or (newcomer - first) // of in groups, f"a new group before {waiting}"
            assert all(newcomer < other for other in waiting), f"{newcomer} before {waiting}"
        seen |= came
        out = waiting | {gone["id"] for gone in record["preempted"] if gone["how"] == "swap"}
        swaps += len(out - waiting)
        assert len(out) == record["swapped"]
    assert len(seen) == 10 * of
    assert swaps > of
