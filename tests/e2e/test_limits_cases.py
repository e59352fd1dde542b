"""Pool, queue and window at their edges on live daemons with a quick model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import quick_model
from tests.e2e.timing import limit

BLOCKS, WINDOW = 45, 640
TIGHT = (
    *("--deterministic", "--dtype", "float32", "--kv-blocks", str(BLOCKS), "--max-running", "16"),
    *("--max-model-len", str(WINDOW), "--prefix-cache"),
)
QUEUE = ("--dtype", "float32", "--kv-blocks", "256", "--max-running", "4", "--max-waiting", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick_model(tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def tight(model: Path) -> Iterator[DaemonProcess]:
    with daemon(*TIGHT, model=model) as process:
        yield process


@pytest.fixture(scope="module")
def go_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; while it is not there, no step of `queue` with a sequence of `HELD_AT` tokens ends."""
    path = tmp_path_factory.mktemp("held") / "go on"
    path.touch()
    return path


HELD_AT = 20


@pytest.fixture(scope="module")
def queue(model: Path, go_on: Path) -> Iterator[DaemonProcess]:
    held = {"point": "model", "action": "hold", "computed": HELD_AT, "until": str(go_on)}
    with daemon(*QUEUE, model=model, env={"KVYARD_TEST_FAULTS": json.dumps([held])}) as process:
        yield process


@pytest.fixture
def held(go_on: Path) -> Iterator[Callable[[], None]]:
    """Nobody ends before this is called."""
    go_on.unlink()
    yield go_on.touch
    go_on.touch()


def body(prompt: list[int], max_tokens: int | None, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    return {
        "model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0,
        "return_logits_hash": True, **more,
    }  # fmt: skip


def prompt(seed: int, length: int) -> list[int]:
    return [seed % 250, *((seed * 31 + 7 * i) % 250 for i in range(length - 1))]


async def at_once(running: DaemonProcess, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=running.base, timeout=120, limits=limits) as http:
        return await asyncio.gather(*(http.post("/v1/completions", json=one) for one in bodies))


def hashes(answer: httpx.Response) -> list[list[str]]:
    assert answer.status_code == 200, answer.text
    return [choice["logits_hashes"] for choice in answer.json()["choices"]]


async def test_PREEMPT_04_and_METRICS_03_preempted_ones_end_at_their_length(tight: DaemonProcess) -> None:
    """Ten of 200 tokens where three fit; each is observed once in every histogram, however often it is preempted."""
    bodies = [body(prompt(seed, 8), 200) for seed in range(10)]
    alone = [hashes(tight.post("/v1/completions", one)) for one in bodies]
    names = ("kvyard_queue_seconds", "kvyard_time_to_first_token_seconds", "kvyard_e2e_seconds")
    before = {name: value(tight, f"{name}_count") for name in names}
    preempted = value(tight, "kvyard_preemptions_total")
    with Client(tight.socket) as client:
        client.call("pause")
        sent = asyncio.create_task(at_once(tight, bodies))
        await asyncio.to_thread(
            wait_until,
            lambda: client.call("requests", {"limit": 1})["total"] == len(bodies),
            limit(10),
            "all to wait",
        )
        client.call("resume")
        answers = await sent
    assert [hashes(answer) for answer in answers] == alone
    for answer in answers:
        assert answer.json()["usage"]["completion_tokens"] == 200
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert value(tight, "kvyard_preemptions_total") - preempted >= 5
    assert {name: value(tight, f"{name}_count") - count for name, count in before.items()} == dict.fromkeys(names, 10)
    idle_again(tight)


def test_CAPACITY_02_and_BOUNDARY_03_the_limit_is_exact(tight: DaemonProcess) -> None:
    """The last token of the window that is told can be used; one more is refused at once with the numbers."""
    assert tight.get("/v1/models").json()["data"][0]["max_model_len"] == WINDOW
    full = tight.post("/v1/completions", body(prompt(1, WINDOW - 1), 1))
    assert full.status_code == 200
    assert full.json()["usage"]["completion_tokens"] == 1
    rest = tight.post("/v1/completions", body(prompt(2, 600), WINDOW - 600))
    assert rest.json()["usage"]["completion_tokens"] == WINDOW - 600
    for length, wanted in ((WINDOW + 1, 1), (600, WINDOW - 599)):
        began = time.monotonic()
        refused = tight.post("/v1/completions", body(prompt(3, length), wanted))
        assert refused.status_code == 400
        assert all(str(number) in refused.text for number in (WINDOW, length, wanted))
        assert time.monotonic() - began < limit(1)


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (17, 16), (32, 16), (48, 32)])
def test_PREFIX_07_and_PREFIX_08_a_whole_cached_prompt_leaves_a_token(
    tight: DaemonProcess, length: int, cached: int
) -> None:
    asked = body(prompt(100 + length, length), 5)
    first, second = (tight.post("/v1/completions", asked) for _ in range(2))
    assert hashes(first) == hashes(second)
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_PREFIX_03_an_evicted_prefix_is_no_hit(tight: DaemonProcess) -> None:
    asked = body(prompt(201, 64), 5)
    first = tight.post("/v1/completions", asked)
    hashes(tight.post("/v1/completions", body(prompt(202, WINDOW - 4), 4)))
    hashes(tight.post("/v1/completions", body(prompt(203, WINDOW - 4), 4)))
    again = tight.post("/v1/completions", asked)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert hashes(again) == hashes(first)


def test_PREFIX_09_no_field_can_pose_as_another(tight: DaemonProcess) -> None:
    """The same prompt under fields that join to the same text: a first use is never a hit."""
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("", "smollm2-135m")]
    for user, salt in pairs:
        fields = {name: text for name, text in (("user", user), ("cache_salt", salt)) if text}
        answer = tight.post("/v1/completions", body(prompt(77, 64), 1, **fields))
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (user, salt)


def test_METRICS_07_blocks_of_requests_and_cached_ones_are_apart(tight: DaemonProcess) -> None:
    for seed in range(24):
        hashes(tight.post("/v1/completions", body(prompt(seed, 32), 2)))
    idle_again(tight)
    used, cached, free = (value(tight, "kvyard_kv_blocks", state=state) for state in ("used", "cached", "free"))
    assert used == 0
    assert cached > 0
    assert used + cached + free == BLOCKS


async def test_CAPACITY_05_a_burst_is_refused_at_once_and_what_is_accepted_ends(
    queue: DaemonProcess, held: Callable[[], None]
) -> None:
    """Four run and sixteen wait: of a hundred, twenty are served and eighty refused within a second."""
    refused_after: list[float] = []

    async def one(http: httpx.AsyncClient, seed: int) -> httpx.Response:
        began = time.monotonic()
        answer = await http.post("/v1/completions", json=body(prompt(seed, 8), 300))
        if answer.status_code != 200:
            refused_after.append(time.monotonic() - began)
            assert int(answer.headers["retry-after"]) >= 1
            if len(refused_after) == 80:
                held()
        return answer

    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=queue.base, timeout=120, limits=limits) as http:
        answers = await asyncio.gather(*(one(http, seed) for seed in range(100)))
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) == 20
    assert codes.count(429) == 80
    assert max(refused_after) < limit(1)
    served = [answer.json() for answer in answers if answer.status_code == 200]
    assert all(answer["usage"]["completion_tokens"] == 300 for answer in served)
    idle_again(queue)


async def test_CAPACITY_07_a_group_has_places_for_all_or_is_refused(
    queue: DaemonProcess, held: Callable[[], None]
) -> None:
    """Twenty places: of seven groups of four, five come in whole, two are refused; no orphan is left."""
    async with httpx.AsyncClient(base_url=queue.base, timeout=120) as http:
        bodies = [body(prompt(seed, 8), 60, n=4) for seed in range(7)]
        sent = [asyncio.create_task(http.post("/v1/completions", json=one)) for one in bodies]
        await asyncio.to_thread(wait_until, lambda: sum(task.done() for task in sent) == 2, limit(10), "two refusals")
        held()
        answers = await asyncio.gather(*sent)
    codes = [answer.status_code for answer in answers]
    assert (codes.count(200), codes.count(429)) == (5, 2)
    assert all(len(answer.json()["choices"]) == 4 for answer in answers if answer.status_code == 200)
    idle_again(queue)


@pytest.mark.parametrize("wrong", [{"n": 5_000_000}, {"n": 0}, {"n": -1}, {"logprobs": 10**6}, {"max_tokens": 2**31}])
def test_SAMPLING_17_and_18_huge_numbers_are_refused_at_once(queue: DaemonProcess, wrong: dict[str, Any]) -> None:
    began = time.monotonic()
    refused = queue.post("/v1/completions", {**body([1, 2, 3], 4), **wrong})
    assert refused.status_code == 400
    assert time.monotonic() - began < limit(0.2)
    assert queue.get("/health").status_code == 200


async def test_PREFIX_05_hits_count_when_it_comes_in_not_when_it_was_refused(tight: DaemonProcess) -> None:
    """Two fill the pool; a third whose 96 tokens are cached has to wait; they grow over its prefix meanwhile."""
    shared = prompt(205, 97)
    asked = body([*shared, *prompt(206, 63)], 4)
    cold = tight.post("/v1/completions", {**asked, "cache_salt": "cold"})
    for seed in (207, 208):  # nothing else is left in the cache
        hashes(tight.post("/v1/completions", body(prompt(seed, WINDOW - 4), 4)))
    hashes(tight.post("/v1/completions", body(shared, 1)))
    wanted = [body(prompt(209, 300), 50), body(prompt(210, 320), 60), asked]
    with Client(tight.socket, timeout=60) as client:
        client.call("pause")
        sent = []
        for number, one in enumerate(wanted, 1):
            sent.append(asyncio.create_task(asyncio.to_thread(tight.post, "/v1/completions", one)))
            there = partial(lambda count: client.call("requests", {"limit": 1})["total"] == count, number)
            await asyncio.to_thread(wait_until, there, limit(5), "it to wait")
        client.call("resume")
        *_, late = await asyncio.gather(*sent)
    found = late.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found == 0, "all of it had been evicted"
    assert hashes(late) == hashes(cold)
