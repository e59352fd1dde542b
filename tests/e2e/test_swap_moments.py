"""Changes of policies at awkward moments on the live daemon: with prompts half computed, sequences swapped out,
groups of several continuations, while it drains, while the engine restarts; and how long a change takes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.streams import Result, Wish, run_all, run_each, wishes
from tests.e2e.test_equality import check_equal
from tests.e2e.timing import limit

FLAGS = (
    *("--deterministic", "--dtype", "float32", "--kv-blocks", "24", "--max-running", "8"),
    *("--max-step-tokens", "32", "--swap-blocks", "40"),
)
DISCIPLINES = (
    "kvyard", "vllm", "vllm-priority", "sarathi", "static", "tgi", "sglang", "orca", "lightllm-peak", "fair-share",
    "recompute-or-swap", "least-recompute", "trtllm-no-evict", "trtllm-max-utilization", "builtin",
)  # fmt: skip
PARTS = (
    ("admission", "whole-life"), ("admission", "vllm"), ("preemption", "fewest-computed"),
    ("preemption", "least-cost"), ("prefill", "decode-first"), ("prefill", "whole-prompts"),
)  # fmt: skip
BYTES = (0, 250)
WANTED = wishes(16, seed=81, prompt=(6, 90), output=(4, 12), ids=BYTES)
HELD, HELD_AT = 251, 100
"""A token of one prompt alone; a step in which that many of its tokens have been computed can be held."""


@pytest.fixture(scope="module")
def go_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; while it is not there, that step does not end."""
    path = tmp_path_factory.mktemp("held") / "go on"
    path.touch()
    return path


@pytest.fixture(scope="module")
def running(quick_model_folder: Path, go_on: Path) -> Iterator[DaemonProcess]:
    """A daemon whose steps take their time, so that changes meet requests under way."""
    held = {"point": "model", "action": "hold", "token": HELD, "computed": HELD_AT, "until": str(go_on)}
    faults = json.dumps([{"point": "model", "action": "sleep", "seconds": 0.01}, held])
    with daemon(*FLAGS, model=quick_model_folder, env={"KVYARD_TEST_FAULTS": faults}) as process:
        yield process


@pytest.fixture(scope="module")
def solo(quick_daemon: DaemonProcess) -> list[Result]:
    return run_each(quick_daemon.base, WANTED)


@pytest.fixture(scope="module")
def client(running: DaemonProcess) -> Iterator[Client]:
    with Client(running.socket, timeout=60) as connected:
        yield connected


def swap(client: Client, kind: str, name: str) -> dict[str, Any]:
    """Put a policy in charge."""
    result: dict[str, Any] = client.call("policy.swap", {"kind": kind, "name": name, "params": {}})
    assert result["ok"]
    return result


def rows(client: Client) -> list[dict[str, Any]]:
    """Unfinished sequences."""
    listed: list[dict[str, Any]] = client.call("requests", {"limit": 1000})["rows"]
    return listed


def swapped_when(
    running: DaemonProcess,
    client: Client,
    wanted: list[Wish],
    moment: Callable[[], object],
    changes: list[tuple[str, str]],
) -> list[Result]:
    """Run all; when the moment has come change the policies, one after the other."""

    def change() -> None:
        wait_until(moment, 60, "the moment")
        for kind, name in changes:
            swap(client, kind, name)

    async def scene() -> list[Result]:
        task = asyncio.create_task(run_all(running.base, wanted))
        await asyncio.to_thread(change)
        return await task

    return asyncio.run(scene())


def test_with_a_half_computed_prompt(
    running: DaemonProcess, client: Client, quick_daemon: DaemonProcess, go_on: Path
) -> None:
    long = [Wish(prompt=(HELD, *(number % 250 for number in range(299))), max_tokens=4)]
    alone = run_each(quick_daemon.base, long)
    go_on.unlink()

    def half() -> bool:
        if not any(0 < row["computed_tokens"] < row["prompt_tokens"] for row in rows(client)):
            return False
        threading.Timer(0.2, go_on.touch).start()  # the change is asked for meanwhile, and made when the step ends
        return True

    try:
        got = swapped_when(running, client, long, half, [("discipline", "sarathi"), ("discipline", "vllm")])
    finally:
        go_on.touch()
    check_equal(got, alone, long)
    swap(client, "discipline", "kvyard")
    idle_again(running)


def test_with_a_swapped_out_sequence(running: DaemonProcess, client: Client, quick_daemon: DaemonProcess) -> None:
    growing = wishes(10, seed=83, prompt=(30, 32), output=(80, 90), ids=BYTES)
    alone = run_each(quick_daemon.base, growing)
    swap(client, "preemption", "fewest-computed")
    client.call("policy.set", {"kind": "preemption", "params": {"how": "swap"}})
    before = value(running, "kvyard_preemptions_total")

    def swapped() -> bool:
        return any(row["state"] == "swapped" for row in rows(client))

    got = swapped_when(running, client, growing, swapped, [("discipline", "vllm"), ("discipline", "builtin")])
    check_equal(got, alone, growing)
    assert value(running, "kvyard_preemptions_total") > before
    swap(client, "discipline", "kvyard")
    idle_again(running)


def test_with_a_group_of_several_continuations(
    running: DaemonProcess, client: Client, quick_daemon: DaemonProcess
) -> None:
    body = WANTED[0].body(n=3, max_tokens=60, temperature=1.0)
    alone = hashes(quick_daemon.post("/v1/completions", body))

    async def scene() -> httpx.Response:
        async with httpx.AsyncClient(base_url=running.base, timeout=120) as http:
            task = asyncio.create_task(http.post("/v1/completions", json=body))
            for name in ("sarathi", "tgi", "kvyard"):
                await asyncio.sleep(0.05)
                await asyncio.to_thread(swap, client, "discipline", name)
            return await task

    assert hashes(asyncio.run(scene())) == alone
    idle_again(running)


def hashes(answer: httpx.Response) -> list[list[str]]:
    """Logits hashes of each choice."""
    assert answer.status_code == 200, answer.text
    return [choice["logits_hashes"] for choice in answer.json()["choices"]]


def random_changes(running: DaemonProcess, client: Client, solo: list[Result], count: int, seed: int) -> None:
    """Changes of whole disciplines and of parts at random while requests come and go."""
    rng = random.Random(seed)
    before = client.call("status")["generation"]
    made = 0
    over = threading.Event()

    def change() -> None:
        nonlocal made
        while made < count and not over.is_set():
            kind, name = rng.choice(PARTS) if rng.random() < 0.5 else ("discipline", rng.choice(DISCIPLINES))
            swap(client, kind, name)
            made += 1

    async def scene() -> None:
        changes = asyncio.create_task(asyncio.to_thread(change))
        try:
            while not changes.done():
                check_equal(await run_all(running.base, WANTED), solo, WANTED)
        finally:
            over.set()
        await changes

    asyncio.run(scene())
    assert client.call("status")["generation"] == before + count
    swap(client, "discipline", "kvyard")
    idle_again(running)


def test_random_changes_lose_nothing_and_change_no_logit(
    running: DaemonProcess, client: Client, solo: list[Result]
) -> None:
    random_changes(running, client, solo, 100, seed=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_random_changes(running: DaemonProcess, client: Client, solo: list[Result]) -> None:
    random_changes(running, client, solo, 1000, seed=6)


@pytest.mark.alone
def test_the_pause_over_fifty_changes(default_model: Path) -> None:
    """The gap before the first step of a new generation, the change itself included, against a step's length."""
    with daemon(*FLAGS, model=default_model) as running, Client(running.socket, timeout=60) as client:
        check_pauses(running, client)


def check_pauses(running: DaemonProcess, client: Client) -> None:
    """Fifty changes between steps of the default model."""
    wanted = wishes(8, seed=82, prompt=(8, 12), output=(30, 30))
    records: list[dict[str, Any]] = []
    with Client(running.socket) as listener:

        def keep() -> None:
            with contextlib.suppress(ControlError, OSError):
                for event in listener.subscribe(["steps"]):
                    if "step" in event.data:
                        records.append(event.data)  # noqa: PERF401 - one by one, as they come

        threading.Thread(target=keep, daemon=True).start()
        made = 0
        over = threading.Event()

        def change() -> None:
            nonlocal made
            # A change between two rounds of requests meets no step, and shows no pause.
            while len(pauses_of(list(records))[0]) < 50 and made < 200 and not over.is_set():
                swap(client, "discipline", ("vllm", "sarathi", "kvyard")[made % 3])
                made += 1
                over.wait(0.05)

        async def scene() -> None:
            changes = asyncio.create_task(asyncio.to_thread(change))
            try:
                while not changes.done():
                    await run_all(running.base, wanted)
            finally:
                over.set()
            await changes

        asyncio.run(scene())
    swap(client, "discipline", "kvyard")
    pauses, steps = pauses_of(records)
    assert len(pauses) >= 50
    step = statistics.median(steps)
    middle = statistics.median(pauses)
    print(f"median step {step / 1e6:.1f} ms, pause median {middle / 1e6:.2f} max {max(pauses) / 1e6:.2f}")
    assert middle < 0.2 * step
    assert max(pauses) < step


def pauses_of(records: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Nanoseconds of the pauses in which policies changed, and of the steps."""
    pauses, steps = [], []
    for before, after in itertools.pairwise(records):
        timings = after["timings"]
        steps.append(sum(timings[part] for part in ("schedule", "model", "sample", "outputs")))
        if after["generation"] != before["generation"] and after["step"] == before["step"] + 1:
            pauses.append(timings["gap"] + timings["inbox"])
    return pauses, steps


def test_while_the_engine_restarts(running: DaemonProcess, client: Client, solo: list[Result]) -> None:
    """A change asked for while there is no engine is done by the next one, or refused; never half."""

    def change() -> None:
        pid = client.call("status")["engine"]["pid"]
        wait_until(lambda: any(row["output_tokens"] for row in rows(client)), 60, "tokens")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), 10, "its end")
        with contextlib.suppress(ControlError):
            swap(client, "discipline", "sarathi")

    async def scene() -> list[Result]:
        task = asyncio.create_task(run_all(running.base, WANTED))
        await asyncio.to_thread(change)
        return await task

    check_equal(asyncio.run(scene()), solo, WANTED)
    status = client.call("status")
    names = {row["kind"]: row["name"] for row in status["policies"]}
    expected = {"sarathi": "decode-first", "kvyard": "vllm"}[status["discipline"]]
    assert names["prefill"] == expected, "what is named is what is in charge"
    swap(client, "discipline", "kvyard")
    idle_again(running)


def test_while_draining(running: DaemonProcess, client: Client, quick_daemon: DaemonProcess) -> None:
    """The last here: a daemon that drains takes up nothing any more."""
    wanted = wishes(16, seed=84, prompt=(6, 60), output=(20, 30), ids=BYTES)
    alone = run_each(quick_daemon.base, wanted)

    async def scene() -> list[Result]:
        client.call("pause")
        task = asyncio.create_task(run_all(running.base, wanted))
        await asyncio.to_thread(wait_until, lambda: len(rows(client)) == len(wanted), limit(20), "all to be there")
        client.call("resume")
        client.call("drain", {"stop": False})
        for name in ("vllm", "sarathi"):
            await asyncio.to_thread(swap, client, "discipline", name)
        return await task

    check_equal(asyncio.run(scene()), alone, wanted)
    assert client.call("status")["discipline"] == "sarathi"
    idle_again(running)
