"""Fault cases of requests, queue and control socket, against one real daemon with a small pool and a quick model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from kvyard.control.client import Client
from kvyard.control.schema import MAX_LINE

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import quick_model
from tests.e2e.records import recording
from tests.e2e.timing import limit

MIB = 1 << 20
DISCIPLINES = ("kvyard", "recompute-or-swap", "vllm", "sglang", "trtllm-max-utilization", "lmdeploy-turns", "orca")
FLAGS = ("--kv-blocks", "40", "--swap-blocks", "40", "--max-running", "4", "--retention-mib", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick_model(tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[DaemonProcess]:
    """A pool of 40 blocks, 4 at once."""
    with daemon(*FLAGS, model=model) as running:
        running.complete("warm", max_tokens=2)
        yield running


def test_LEAK_02_sequential_requests_leave_nothing_in_any_table(small: DaemonProcess) -> None:
    front, engine = psutil.Process(small.process.pid), psutil.Process(small.engine_pid)
    body = {"model": "smollm2-135m", "prompt": list(range(16)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    held: list[tuple[int, int]] = []
    with Client(small.socket) as client, httpx.Client(base_url=small.base, timeout=limit(10)) as http:
        for number in range(200):
            answer = http.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert client.call("requests", {"limit": 1})["total"] == 0
            if number in (99, 199):
                held.append((front.memory_info().rss, engine.memory_info().rss))
        assert set(client.call("dump")["tables"].values()) == {0}
    idle_again(small)
    growth = [after - before for before, after in zip(*held, strict=True)]
    assert max(growth) < 5 * MIB, growth


def test_CAPACITY_04_no_standstill_when_the_head_needs_what_parked_requests_hold(small: DaemonProcess) -> None:
    """Three outgrow the pool and are parked in turn; then one comes before them all that needs 33 of 40 blocks."""
    with Client(small.socket) as client, recording(small) as records:
        for discipline in DISCIPLINES:
            client.call("policy.swap", {"kind": "discipline", "name": discipline, "params": {}})
            records.clear()
            asyncio.run(_crowded(small))
            idle_again(small)
            passes = [0 if record["ids"] or not record["waiting"] else 1 for record in records.steps]
            longest = max(sum(group) for _, group in itertools.groupby(passes))
            assert longest <= 10, f"{discipline}: so many passes in which nobody who waits or runs got a token"
        client.call("policy.swap", {"kind": "discipline", "name": "kvyard", "params": {}})
    for how in ("recompute", "swap"):
        assert value(small, "kvyard_preemptions_total", how=how) > 0, f"nobody was parked by {how}"


async def _crowded(running: DaemonProcess) -> None:
    async with httpx.AsyncClient(base_url=running.base, timeout=limit(30)) as http:

        async def ask(prompt: int, output: int, priority: int) -> None:
            body = {
                "prompt": [prompt % 200] * prompt,
                "max_tokens": output,
                "priority": priority,
                "ignore_eos": True,
            }
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == output

        growing = [asyncio.create_task(ask(100 + at, 220, 5)) for at in range(3)]
        made = value(running, "kvyard_output_tokens_total")
        await asyncio.to_thread(
            wait_until, lambda: value(running, "kvyard_output_tokens_total") > made + 300, limit(20), "them to grow"
        )
        await asyncio.gather(ask(490, 30, -5), *growing)


class Control:
    """A raw connection to the control socket."""

    def __init__(self, running: DaemonProcess) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(limit(20))
        self.sock.connect(str(running.socket))
        self._reader = self.sock.makefile("rb")

    def line(self) -> dict[str, Any]:
        """The next line."""
        parsed: dict[str, Any] = json.loads(self._reader.readline())
        return parsed

    def close(self) -> None:
        """Hang up."""
        self._reader.close()
        self.sock.close()


def test_LIFECYCLE_09_large_messages_and_replies(small: DaemonProcess) -> None:
    control = Control(small)
    assert "protocol" in control.line()
    control.sock.sendall(b'{"id": 1, "method": "status",' + b" " * 200_000 + b'"params": {}}\n')
    assert control.line()["result"]["model"]
    with Client(small.socket, timeout=limit(30)) as client:
        client.call("pause")
        sockets = [_waiting(small, 125) for _ in range(16)]
        try:
            wait_until(lambda: client.call("requests", {"limit": 1})["total"] == 2000, limit(20), "2,000 to wait")
            control.sock.sendall(b'{"id": 2, "method": "requests", "params": {"limit": 5000}}\n')
            reply = control.line()
            assert len(reply["result"]["rows"]) == 2000
            assert len(json.dumps(reply)) > 64 << 10
            _a_line_of_100_mb(small, client)
        finally:
            for sock in sockets:
                sock.close()
            client.call("resume")
    control.close()
    idle_again(small)


def _waiting(running: DaemonProcess, n: int) -> socket.socket:
    """A client that waits for `n` continuations."""
    url = httpx.URL(running.base)
    sock = socket.create_connection((url.host, url.port or 80))
    body = json.dumps({"prompt": "x", "n": n, "max_tokens": 1})
    sock.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    return sock


def _a_line_of_100_mb(running: DaemonProcess, other: Client) -> None:
    control = Control(running)
    control.line()
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sent < 100 * MIB:
            sent += control.sock.send(b"x" * MIB)
    assert sent > MAX_LINE
    answer = control.line()
    assert answer["error"]["code"] == "too-large"
    assert str(MAX_LINE) in answer["error"]["message"]
    began = time.monotonic()
    other.call("status")
    assert time.monotonic() - began < limit(1)
    control.close()


@pytest.mark.parametrize("kind", ["half a line", "garbage", "no reply awaited", "never reading"])
def test_LIFECYCLE_10_a_hundred_bad_control_connections(small: DaemonProcess, kind: str) -> None:
    front = psutil.Process(small.process.pid)
    base = front.num_fds()
    ask = b'{"id": 1, "method": "dump", "params": {}}\n'
    payload = {"half a line": ask[:20], "garbage": os.urandom(256) + b"\n", "no reply awaited": ask}.get(
        kind, ask * 8
    )
    held: list[socket.socket] = []
    for _ in range(100):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(limit(5))
        sock.connect(str(small.socket))
        with contextlib.suppress(TimeoutError, ConnectionError):
            sock.sendall(payload)
        if kind == "never reading":
            held.append(sock)
        else:
            sock.close()
    assert small.status()["ready"]
    for sock in held:
        sock.close()
    wait_until(lambda: front.num_fds() <= base, limit(10), "the descriptors to come back")
    small.complete("x", max_tokens=1)


class TestLifecycle07:
    """Whatever lies at the control socket's path and is not ours stays, and the daemon does not start."""

    def refused(self, model: Path, path: Path) -> str:
        """Start a daemon at the path; what it says."""
        with daemon("--socket", str(path), model=model, wait=False) as running:
            assert running.process.wait(limit(20)) == 6
            assert "Traceback" not in running.log
            return running.log

    def test_LIFECYCLE_07_a_file_a_folder_and_a_link(self, model: Path, tmp_path: Path) -> None:
        for what in ("file", "folder", "link"):
            path = tmp_path / what
            if what == "folder":
                path.mkdir()
            elif what == "file":
                path.write_text("mine")
            else:
                path.symlink_to(tmp_path / "file")
            before = path.lstat()
            assert f"a {what}, not a socket" in self.refused(model, path)
            after = path.lstat()
            assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (
                before.st_ino,
                before.st_mode,
                before.st_mtime_ns,
            )
        assert (tmp_path / "file").read_text() == "mine"

    def test_LIFECYCLE_07_a_socket_at_which_another_program_answers(self, model: Path, tmp_path: Path) -> None:
        path = tmp_path / "other.sock"
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            inode = path.lstat().st_ino
            assert "another program listens" in self.refused(model, path)
            assert path.lstat().st_ino == inode
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))


@pytest.mark.timeout(300)
def test_LIFECYCLE_14_a_long_first_prompt_is_no_hang(default_model: Path) -> None:
    """The first request ever of an engine, 4,096 tokens long, with 5 s for a step."""
    flags = ("--step-timeout-s", str(limit(5)), "--kv-blocks", "300", "--max-model-len", "4200")
    with daemon(*flags, model=default_model) as running:
        engine = running.engine_pid
        body = {"prompt": [1000 + at % 30000 for at in range(4096)], "max_tokens": 2, "ignore_eos": True}
        answer = running.post("/v1/completions", body, timeout=limit(40))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"] == {
            "prompt_tokens": 4096,
            "completion_tokens": 2,
            "total_tokens": 4098,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert running.engine_pid == engine
        assert value(running, "kvyard_engine_restarts_total") == 0
        assert "engine.hangs" not in running.log


def test_LIFECYCLE_16_an_engine_that_does_not_leave_is_killed_before_another_starts(model: Path) -> None:
    """A stopped process heeds neither a message nor SIGTERM; the front ends it by force, and does not outlast it."""
    for _ in range(2):  # stop, start, stop
        with daemon("--kv-blocks", "40", model=model) as running:
            front = psutil.Process(running.process.pid)
            engine = psutil.Process(running.engine_pid)
            assert [child.pid for child in front.children()] == [engine.pid]
            engine.suspend()
            began = time.monotonic()
            assert running.stop(timeout=limit(15)) == 0
            assert time.monotonic() - began < limit(12)
            assert not engine.is_running()
            assert not running.socket.exists()
