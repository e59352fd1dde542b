"""Deaths: an engine that dies is replaced and every stream ends whole; a front that dies leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlparse

import httpx
import psutil
import pytest
from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.streams import Result, Wish, run_all, run_each, stream, wishes
from tests.e2e.test_equality import check_equal
from tests.e2e.timing import limit

DETERMINISTIC = ("--deterministic", "--dtype", "float32", "--kv-blocks", "512")
BYTES = (0, 250)
"""Token ids of the quick model's prompts: the first, and the first beyond."""
POISON = 251
"""A token id; an engine with the fault hook dies in any step with a sequence that has it."""


def kill_engine(running: DaemonProcess, killed: Collection[int] = ()) -> int:
    """`kill -9` of the engine, of the next one when there is none at this moment but one killed before; its id."""
    found: list[int] = []

    def there() -> bool:
        pid = running.status()["engine"]["pid"]
        found[:] = [pid] if pid and pid not in killed else []
        return bool(found)

    wait_until(there, 30, "an engine")
    with contextlib.suppress(ProcessLookupError):
        os.kill(found[0], signal.SIGKILL)
    return found[0]


def some_tokens(results: list[Result]) -> int:
    """Tokens that the streams have got so far."""
    return sum(len(result.tokens) for result in results)


async def killed_while_streaming(running: DaemonProcess, wanted: list[Wish], kills: list[int]) -> list[Result]:
    """Run all; kill the engine whenever that many tokens have come, each time another one."""
    seen: dict[int, Result] = {}
    come = asyncio.Event()

    def on_token(result: Result) -> None:
        seen[id(result)] = result
        come.set()

    async def kill() -> None:
        killed: list[int] = []
        for due in kills:
            while some_tokens(list(seen.values())) < due:
                come.clear()
                await come.wait()
            killed.append(await asyncio.to_thread(kill_engine, running, killed))

    results, _ = await asyncio.gather(run_all(running.base, wanted, on_token), kill())
    return results


@pytest.mark.timeout(180)
def test_kill_minus_nine_of_the_engine_under_eight_streams(default_model: Path) -> None:
    wanted = wishes(8, seed=11, prompt=(4, 20), output=(8, 12))
    with daemon(*DETERMINISTIC, model=default_model) as running:
        solo = run_each(running.base, wanted)
        before = running.engine_pid
        began = 0.0

        async def scene() -> list[Result]:
            nonlocal began
            task = asyncio.create_task(killed_while_streaming(running, wanted, [30]))
            await asyncio.to_thread(wait_until, lambda: running.get("/ready").status_code == 503, 60, "the death")
            began = time.monotonic()
            assert running.get("/health").status_code == 200
            assert "kvyard_engine_restarts_total" in running.get("/metrics").text
            await asyncio.to_thread(running.wait_ready)
            assert time.monotonic() - began < limit(5), "the engine must be back within 5 s"
            return await task

        check_equal(asyncio.run(scene()), solo, wanted)
        assert running.engine_pid != before
        assert value(running, "kvyard_engine_restarts_total") == 1
        idle_again(running)


def kills_under_thirty_streams(running: DaemonProcess, wanted: list[Wish], kills: int, seed: int) -> None:
    total = sum(wish.max_tokens for wish in wanted)
    moments = sorted(random.Random(seed).sample(range(1, int(total * 0.7)), kills))
    restarts = value(running, "kvyard_engine_restarts_total")
    solo = run_each(running.base, wanted)
    got = asyncio.run(killed_while_streaming(running, wanted, moments))
    check_equal(got, solo, wanted)
    wait_until(lambda: running.get("/ready").status_code == 200, 30, "the last engine")
    idle_again(running)
    assert value(running, "kvyard_engine_restarts_total") == restarts + kills


@pytest.fixture(scope="module")
def mortal(quick_model_folder: Path) -> Iterator[DaemonProcess]:
    """The quick model in steps that take their time, and its engine dies of the poison."""
    poisoned = {"point": "model", "action": "segv", "token": POISON}
    env = {"KVYARD_TEST_FAULTS": json.dumps([{"point": "model", "action": "sleep", "seconds": 0.02}, poisoned])}
    with daemon(*DETERMINISTIC, model=quick_model_folder, env=env) as running:
        yield running


def harmless(wanted: list[Wish]) -> list[Wish]:
    """The same, which do not come upon the poison by themselves."""
    return [dataclasses.replace(wish, banned=(POISON,)) for wish in wanted]


@pytest.mark.timeout(240)
def test_random_kills_lose_and_repeat_nothing(mortal: DaemonProcess) -> None:
    wanted = harmless(wishes(30, seed=21, prompt=(4, 20), output=(4, 10), ids=BYTES))
    kills_under_thirty_streams(mortal, wanted, kills=2, seed=21)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_random_kills_lose_and_repeat_nothing(default_model: Path) -> None:
    with daemon(*DETERMINISTIC, model=default_model) as running:
        kills_under_thirty_streams(running, wishes(30, seed=22, output=(8, 20)), kills=20, seed=22)


@pytest.mark.timeout(180)
def test_only_the_request_that_kills_the_engine_alone_is_failed(mortal: DaemonProcess) -> None:
    wanted = harmless(wishes(5, seed=31, output=(14, 20), ids=BYTES))
    wanted.insert(2, Wish(prompt=(100, POISON, 200), max_tokens=10))
    restarts = value(mortal, "kvyard_engine_restarts_total")
    got = asyncio.run(run_all(mortal.base, wanted))
    assert "engine_killed" in got[2].error
    assert "while it ran alone" in got[2].error
    for number, (result, wish) in enumerate(zip(got, wanted, strict=True)):
        if number != 2:
            assert (result.error, result.finishes) == ("", ["length"]), f"stream {number}"
            assert len(result.tokens) == wish.max_tokens
    assert value(mortal, "kvyard_engine_restarts_total") == restarts + 3
    assert len(mortal.complete([100, 101], max_tokens=3, ignore_eos=True)["choices"]) == 1
    idle_again(mortal)


def port_is_free(base: str) -> bool:
    """Somebody else could listen there now."""
    parts = urlparse(base)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parts.hostname, parts.port))
        except OSError:
            return False
    return True


def test_kill_minus_nine_of_the_front_leaves_no_engine_and_no_busy_port(quick_model_folder: Path) -> None:
    with daemon("--kv-blocks", "40", model=quick_model_folder) as running:
        engine = psutil.Process(running.engine_pid)
        running.process.kill()
        running.process.wait()
        wait_until(partial(has_ended, engine), limit(2), "the engine's end")
        assert port_is_free(running.base)


def has_ended(process: psutil.Process) -> bool:
    """It is gone, or only to be waited for by its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def test_LIFECYCLE_05_a_left_over_socket_is_taken_over_and_LIFECYCLE_03_an_idle_daemon_leaves_soon(
    quick_model_folder: Path,
) -> None:
    """Killed five times as soon as its socket answers; whoever comes next has it. The last one serves, and when it
    is told to, it leaves within two seconds."""
    with tempfile.TemporaryDirectory(prefix="kvyard-e2e-") as name:
        path = Path(name) / "kvyard.sock"
        flags = ("--kv-blocks", "40", "--socket", str(path))
        for _ in range(5):
            with daemon(*flags, model=quick_model_folder, wait=False) as killed:
                wait_until(partial(answers, path, killed.process.pid), limit(20), "its socket to answer")
                killed.process.kill()
                killed.process.wait()
                assert path.is_socket(), "the kill left it behind"
        with daemon(*flags, model=quick_model_folder) as last:
            last.socket = path
            assert last.status()["ready"]
            last.complete([1, 2, 3], max_tokens=2)
            idle_again(last)
            began = time.monotonic()
            assert last.stop() == 0
            assert time.monotonic() - began < limit(2)


def answers(path: Path, pid: int) -> bool:
    """The process with this id greets at the socket."""
    with contextlib.suppress(OSError, ControlError), Client(path, timeout=5) as client:
        return client.hello.pid == pid
    return False


@contextlib.contextmanager
def streaming(model: Path, folder: Path, **env: str) -> Iterator[tuple[DaemonProcess, Path]]:
    """A daemon whose streams stop when they are half through, until that file exists."""
    go_on = folder / "go on"
    held = {"point": "model", "action": "hold", "computed": HELD_AT, "until": str(go_on)}
    env |= {"KVYARD_TEST_FAULTS": json.dumps([held])}
    with daemon("--dtype", "float32", "--kv-blocks", "64", model=model, env=env) as running:
        yield running, go_on


HELD_AT = 30
"""Tokens of a sequence in KV."""


async def start_streams(running: DaemonProcess, wanted: list[Wish]) -> list[asyncio.Task[Result]]:
    """Start them; each has some tokens when this returns."""
    client = httpx.AsyncClient(base_url=running.base, timeout=60, verify=False)
    begun = [asyncio.Event() for _ in wanted]
    tasks = [
        asyncio.create_task(stream(client, wish, lambda _, event=event: event.set()))  # type: ignore[misc]  # bound now
        for wish, event in zip(wanted, begun, strict=True)
    ]
    async with asyncio.timeout(limit(20)):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_zero(
    quick_model_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    wanted = wishes(4, seed=51, prompt=(8, 8), output=(40, 60), ids=BYTES)

    async def scene(running: DaemonProcess, go_on: Path) -> list[Result]:
        tasks = await start_streams(running, wanted)
        running.process.send_signal(number)
        await asyncio.to_thread(
            wait_until, lambda: running.get("/ready").status_code == 503, limit(5), "the signal to be heeded"
        )
        refused = await asyncio.to_thread(running.post, "/v1/completions", wanted[0].body())
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert not any(task.done() for task in tasks)
        await asyncio.to_thread(go_on.touch)
        return await asyncio.gather(*tasks)

    with streaming(quick_model_folder, tmp_path) as (running, go_on):
        for result, wish in zip(asyncio.run(scene(running, go_on)), wanted, strict=True):
            assert (result.error, result.finishes, len(result.tokens)) == ("", ["length"], wish.max_tokens)
        assert running.process.wait(limit(10)) == 0
        assert not running.socket.exists()


def test_a_second_signal_forces(quick_model_folder: Path, tmp_path: Path) -> None:
    async def scene(running: DaemonProcess) -> list[Result]:
        tasks = await start_streams(running, wishes(2, seed=52, prompt=(8, 8), output=(100, 100), ids=BYTES))
        running.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(
            wait_until, lambda: running.get("/ready").status_code == 503, limit(5), "the signal to be heeded"
        )
        assert running.process.poll() is None
        began = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        results = await asyncio.gather(*tasks)
        assert time.monotonic() - began < limit(6)
        return results

    with streaming(quick_model_folder, tmp_path) as (running, _):
        for result in asyncio.run(scene(running)):
            assert "shutting_down" in result.error
        running.process.wait(limit(10))


def test_the_drain_limit_ends_what_is_left_with_an_error(quick_model_folder: Path, tmp_path: Path) -> None:
    async def scene(running: DaemonProcess) -> list[Result]:
        tasks = await start_streams(running, wishes(1, seed=53, prompt=(8, 8), output=(100, 100), ids=BYTES))
        running.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    with streaming(quick_model_folder, tmp_path, KVYARD_DRAIN_TIMEOUT_S="1") as (running, _):
        (result,) = asyncio.run(scene(running))
        assert "shutting_down" in result.error
        assert running.process.wait(limit(10)) == 0
