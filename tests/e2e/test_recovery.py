"""Deaths: an engine that dies is replaced and every stream ends whole; a front that dies leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import tempfile
import time
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
POISON = 31337
"""A token id; an engine with the fault hook dies in any step with a sequence whose prompt has it."""


def kill_engine(running: DaemonProcess) -> None:
    """`kill -9` of the engine, of the next one when none is there at this moment."""
    found: list[int] = []

    def there() -> bool:
        found[:] = filter(None, [running.status()["engine"]["pid"]])
        return bool(found)

    wait_until(there, 30, "an engine")
    with contextlib.suppress(ProcessLookupError):
        os.kill(found[0], signal.SIGKILL)


def some_tokens(results: list[Result]) -> int:
    """Tokens that the streams have got so far."""
    return sum(len(result.tokens) for result in results)


async def killed_while_streaming(running: DaemonProcess, wanted: list[Wish], kills: list[int]) -> list[Result]:
    """Run all; kill the engine whenever that many tokens have come."""
    seen: dict[int, Result] = {}
    moments = iter(kills)
    due = next(moments, None)
    tasks: list[asyncio.Task[None]] = []

    def on_token(result: Result) -> None:
        nonlocal due
        seen[id(result)] = result
        if due is not None and some_tokens(list(seen.values())) >= due:
            due = next(moments, None)
            tasks.append(asyncio.create_task(asyncio.to_thread(kill_engine, running)))

    results = await run_all(running.base, wanted, on_token)
    await asyncio.gather(*tasks)
    return results


@pytest.mark.timeout(180)
def test_kill_minus_nine_of_the_engine_under_eight_streams(default_model: Path) -> None:
    wanted = wishes(8, seed=11, output=(14, 22))
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


def kills_under_thirty_streams(model: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    wanted = wishes(30, seed=seed, output=(8, 20))
    total = sum(wish.max_tokens for wish in wanted)
    moments = sorted(rng.sample(range(1, int(total * 0.9)), kills))
    with daemon(*DETERMINISTIC, model=model) as running:
        solo = run_each(running.base, wanted)
        got = asyncio.run(killed_while_streaming(running, wanted, moments))
        check_equal(got, solo, wanted)
        wait_until(lambda: running.get("/ready").status_code == 200, 30, "the last engine")
        idle_again(running)
        assert value(running, "kvyard_engine_restarts_total") >= min(kills, 2)


@pytest.mark.timeout(240)
def test_random_kills_lose_and_repeat_nothing(default_model: Path) -> None:
    kills_under_thirty_streams(default_model, kills=3, seed=21)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_random_kills_lose_and_repeat_nothing(default_model: Path) -> None:
    kills_under_thirty_streams(default_model, kills=20, seed=22)


@pytest.mark.timeout(180)
def test_only_the_request_that_kills_the_engine_alone_is_failed(default_model: Path) -> None:
    faults = json.dumps([{"point": "model", "action": "segv", "token": POISON}])
    wanted = wishes(5, seed=31, output=(14, 20))
    wanted.insert(2, Wish(prompt=(1000, POISON, 2000), max_tokens=10))
    with daemon("--kv-blocks", "512", model=default_model, env={"KVYARD_TEST_FAULTS": faults}) as running:
        got = asyncio.run(run_all(running.base, wanted))
        assert "engine_killed" in got[2].error
        assert "while it ran alone" in got[2].error
        for number, (result, wish) in enumerate(zip(got, wanted, strict=True)):
            if number != 2:
                assert (result.error, result.finishes) == ("", ["length"]), f"stream {number}"
                assert len(result.tokens) == wish.max_tokens
        assert value(running, "kvyard_engine_restarts_total") == 3
        assert len(running.complete([1000, 1001], max_tokens=3, ignore_eos=True)["choices"]) == 1
        idle_again(running)


def test_LEAK_10_an_error_of_one_sequence_leaves_the_others_alone(default_model: Path) -> None:
    faults = json.dumps([{"point": "model", "action": "fail", "token": POISON}])
    wanted = wishes(3, seed=41, output=(10, 16))
    with daemon(*DETERMINISTIC, model=default_model, env={"KVYARD_TEST_FAULTS": faults}) as running:
        solo = run_each(running.base, wanted)
        bad = Wish(prompt=(POISON, 5, 6), max_tokens=10)
        got = asyncio.run(run_all(running.base, [*wanted, bad]))
        check_equal(got[:3], solo, wanted)
        assert "model_error" in got[3].error
        idle_again(running)


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


def test_kill_minus_nine_of_the_front_leaves_no_engine_and_no_busy_port(default_model: Path) -> None:
    with daemon(model=default_model) as running:
        engine = psutil.Process(running.engine_pid)
        running.process.kill()
        running.process.wait()
        time.sleep(limit(2))
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        assert port_is_free(running.base)


def test_LIFECYCLE_05_a_left_over_socket_does_not_prevent_the_next_start(quick_model_folder: Path) -> None:
    """Killed five times as soon as its socket answers; whoever comes next has it, and the last one serves."""
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


def answers(path: Path, pid: int) -> bool:
    """The process with this id greets at the socket."""
    with contextlib.suppress(OSError, ControlError), Client(path, timeout=5) as client:
        return client.hello.pid == pid
    return False


async def start_streams(base: str, wanted: list[Wish]) -> list[asyncio.Task[Result]]:
    client = httpx.AsyncClient(base_url=base, timeout=60)
    tasks = [asyncio.create_task(stream(client, wish)) for wish in wanted]
    await asyncio.sleep(1.0)
    return tasks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_zero(default_model: Path, number: signal.Signals) -> None:
    wanted = wishes(4, seed=51, output=(40, 60))

    async def scene(running: DaemonProcess) -> list[Result]:
        tasks = await start_streams(running.base, wanted)
        running.process.send_signal(number)
        await asyncio.sleep(0.3)
        refused = await asyncio.to_thread(running.post, "/v1/completions", wanted[0].body())
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert running.get("/ready").status_code == 503
        return await asyncio.gather(*tasks)

    with daemon(model=default_model) as running:
        for result, wish in zip(asyncio.run(scene(running)), wanted, strict=True):
            assert (result.error, result.finishes, len(result.tokens)) == ("", ["length"], wish.max_tokens)
        assert running.process.wait(10) == 0
        assert not running.socket.exists()


def test_a_second_signal_forces(default_model: Path) -> None:
    async def scene(running: DaemonProcess) -> list[Result]:
        tasks = await start_streams(running.base, wishes(2, seed=52, output=(1500, 1500)))
        began = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        results = await asyncio.gather(*tasks)
        assert time.monotonic() - began < limit(6)
        return results

    with daemon(model=default_model) as running:
        for result in asyncio.run(scene(running)):
            assert "shutting_down" in result.error
        running.process.wait(10)


def test_the_drain_limit_ends_what_is_left_with_an_error(default_model: Path) -> None:
    async def scene(running: DaemonProcess) -> list[Result]:
        tasks = await start_streams(running.base, wishes(1, seed=53, output=(1500, 1500)))
        running.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    with daemon(model=default_model, env={"KVYARD_DRAIN_TIMEOUT_S": "1"}) as running:
        (result,) = asyncio.run(scene(running))
        assert "shutting_down" in result.error
        assert running.process.wait(10) == 0


def test_LIFECYCLE_03_an_idle_daemon_leaves_within_two_seconds(default_model: Path) -> None:
    with daemon(model=default_model) as running:
        began = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began < limit(2)
