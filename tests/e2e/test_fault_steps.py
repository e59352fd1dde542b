"""Fault cases step by step on one live daemon: it swaps, its pool is small, its model has two ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from kvyard.control.client import Client
from kvyard.engine.random import derive

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import END, VOCABULARY, quick_model
from tests.e2e.records import recording
from tests.e2e.shapes import Answer, ask, run_alone
from tests.e2e.streams import MODEL
from tests.e2e.timing import limit

FAILS_IN_DECODE, FAILS_COMING_BACK, BEGIN = 250, 251, 256
SEED = 46
"""Its three choices end by themselves, at different lengths."""
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


def whole(running: DaemonProcess, **asked: Any) -> list[list[int]]:  # noqa: ANN401 - any JSON value
    """Token ids of each choice."""
    (answer,) = run_alone(running.base, [{"model": MODEL, "prompt": [1, 2, 3], "return_token_ids": True, **asked}])
    return [choice.tokens for _, choice in sorted(answer.choices.items())]


def test_SAMPLING_14_min_tokens_holds_back_each_of_two_ends(running: DaemonProcess) -> None:
    for end in (END, BEGIN):
        bias = {str(end): 100}
        assert len(*whole(running, max_tokens=40, logit_bias=bias)) == 1, "it is an end"
        (tokens,) = whole(running, max_tokens=40, logit_bias=bias, min_tokens=10)
        assert len(tokens) == 11
        assert not {END, BEGIN} & set(tokens[:10])
        assert tokens[10] == end


@pytest.mark.parametrize("stream", [False, True])
def test_TOKENIZER_06_each_of_two_ends_stops_and_shows_no_marker(running: DaemonProcess, stream: bool) -> None:
    for end in (END, BEGIN):
        for hidden in (True, False):
            asked = body(1, 10, 40, ignore_eos=False, min_tokens=3, skip_special_tokens=hidden)
            asked["logit_bias"] = {str(end): 100}
            if stream:
                ((answer, _),) = asyncio.run(all_at_once(running, [asked]))
            else:
                (answer,) = run_alone(running.base, [asked])
            (choice,) = answer.choices.values()
            assert (choice.finish, choice.tokens[3:]) == ("stop", [end])
            assert "<end>" not in choice.text
            assert "<begin>" not in choice.text


def test_SAMPLING_03_top_k_at_and_beyond_the_vocabulary(running: DaemonProcess) -> None:
    seeded = {"temperature": 1, "seed": 5, "max_tokens": 16, "ignore_eos": True, "logit_bias": BIAS}
    free = whole(running, **seeded)
    for top_k in (VOCABULARY, VOCABULARY + 1, 10**9, 0, -1):
        assert whole(running, **seeded, top_k=top_k) == free, top_k
    assert len(*whole(running, **seeded, top_k=VOCABULARY - 1)) == 16
    assert whole(running, **seeded, top_k=1) == whole(running, **{**seeded, "temperature": 0})
    assert running.post("/v1/completions", {"prompt": [1], "top_k": -2}).status_code == 400
    mixed = [body(1, 10, 16), body(2, 10, 16, temperature=1.0, seed=5, top_k=3)] * 2
    together = [answer for answer, _ in asyncio.run(all_at_once(running, mixed))]
    assert [a.same(b) for a, b in zip(together, run_alone(running.base, mixed), strict=True)] == [True] * 4


def test_SAMPLING_09_without_a_seed_answers_differ(running: DaemonProcess) -> None:
    asked = body(1, 10, 16, temperature=1.0)
    one_by_one = {tuple(answer.choices[0].tokens) for answer in run_alone(running.base, [asked] * 5)}
    at_once = {tuple(answer.choices[0].tokens) for answer, _ in asyncio.run(all_at_once(running, [asked] * 5))}
    assert len(one_by_one) >= 2
    assert len(at_once) >= 2


def test_API_11_choices_of_different_lengths_are_their_own_runs(running: DaemonProcess) -> None:
    asked = {"temperature": 1, "max_tokens": 100, "stop_token_ids": list(range(0, 256, 32)), "logit_bias": BIAS}
    streamed = {"model": MODEL, "prompt": [1, 2, 3], "return_token_ids": True, "stream": True, "n": 3, "seed": SEED}
    ((answer, _),) = asyncio.run(all_at_once(running, [{**asked, **streamed}]))  # two ends of a choice would raise
    assert [choice.finish for _, choice in sorted(answer.choices.items())] == ["stop"] * 3
    got = [choice.tokens for _, choice in sorted(answer.choices.items())]
    assert len({len(tokens) for tokens in got}) == 3, "they end one after the other"
    assert got == [*(whole(running, **asked, seed=derive(SEED, index))[0] for index in range(3))]


async def left_by(running: DaemonProcess, wanted: list[dict[str, Any]], when: Callable[[int], object]) -> float:
    """Send all, leave them all when `when(chunks so far)` holds; the moment of it."""
    chunks = 0

    async def one(client: httpx.AsyncClient, asked: dict[str, Any]) -> None:
        nonlocal chunks
        async with client.stream("POST", "/v1/completions", json=asked) as reply:
            async for line in reply.aiter_lines():
                chunks += line.startswith("data: {")

    async with httpx.AsyncClient(base_url=running.base, timeout=limit(30)) as client:
        tasks = [asyncio.create_task(one(client, asked)) for asked in wanted]
        await asyncio.to_thread(wait_until, lambda: when(chunks), limit(20), "the moment to leave")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return time.monotonic()


async def test_DISCONNECT_03_who_leaves_the_queue_is_not_prefilled(running: DaemonProcess, swapping: Client) -> None:
    """One holds nearly the whole pool; five wait, whose clients go: none of them comes in, no prompt is computed."""

    def total() -> int:
        return int(swapping.call("requests", {"limit": 1})["total"])

    with recording(running) as records:
        busy = asyncio.create_task(all_at_once(running, [body(0, 450, 50)]))
        await asyncio.to_thread(wait_until, lambda: total() == 1, limit(5), "the first")
        records.clear()
        swapping.call("pause")
        gone = await left_by(running, [body(n, 200, 50) for n in range(5)], lambda chunks: total() == 6)
        await asyncio.to_thread(wait_until, lambda: total() == 1, limit(5), "the queue to be empty")
        assert time.monotonic() - gone < limit(1)
        swapping.call("resume")
        ((answer, _),) = await busy
        assert answer.counted == (450, 50)
        admitted = records.admissions()
        assert len(set(admitted)) <= 1
        assert sum(record["prompt_tokens"] for record in records.steps) <= 450


async def test_DISCONNECT_04_all_choices_of_a_stream_end_with_its_client(
    running: DaemonProcess, swapping: Client
) -> None:
    cancelled = value(running, "kvyard_sequences_total", outcome="cancelled")
    gone = await left_by(running, [body(1, 10, 400, n=4)], lambda chunks: chunks >= 10)

    def count() -> float:
        return value(running, "kvyard_sequences_total", outcome="cancelled") - cancelled

    await asyncio.to_thread(wait_until, lambda: count() == 4, limit(5), "four cancelled sequences")
    assert value(running, "kvyard_sequences_running") == 0
    assert time.monotonic() - gone < limit(1)
