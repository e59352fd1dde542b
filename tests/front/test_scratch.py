"""Scratch processes: what they are given, that they may not operate the daemon, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from kvyard.front import policy_listing, scratch
from kvyard.front.control.server import ControlServer
from kvyard.front.daemon import Daemon, Served
from kvyard.front.keys import KeyRing
from kvyard.front.operations import OperationError
from kvyard.front.policy_listing import describe_installed
from kvyard.front.settings import Settings

from tests.policy.distributions import install

LONG_S = 60.0
SPAWNER = """
    import pathlib, subprocess, sys, time

    child = subprocess.Popen(["sleep", "300"])
    file = pathlib.Path(sys.argv[1])
    file.with_suffix(".new").write_text(str(child.pid))
    file.with_suffix(".new").rename(file)
    time.sleep(float(sys.argv[2]))
"""
"""Starts another process, tells its pid in a file, and lives on for so many seconds."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a scratch process finds modules."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def spawner(site: Path) -> Path:
    """The module `spawner` is there; the file in which it tells its child."""
    (site / "spawner.py").write_text(dedent(SPAWNER))
    return site / "pid"


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.02)


def number_in(file: Path) -> int:
    """The pid in a file, 0 while there is none."""
    return int(file.read_text() or 0) if file.exists() else 0


def gone(pid: int) -> bool:
    """Ended; who reaps an orphan is not ours to say."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_nothing_secret_is_in_its_environment(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NOTIFY_SOCKET", "WATCHDOG_USEC", "HARMLESS"):
        monkeypatch.setenv(name, "here")
    (site / "tells.py").write_text("import json, os; print(json.dumps(dict(os.environ)))")
    output, status = await scratch.output_of("tells", limit_s=LONG_S)
    seen = json.loads(output)
    assert (status, seen["HARMLESS"]) == (0, "here")
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(seen)


async def test_what_it_started_ends_with_it(spawner: Path) -> None:
    await scratch.output_of("spawner", str(spawner), "0", limit_s=LONG_S)
    child = number_in(spawner)
    await until(lambda: gone(child))
    assert not scratch.running()


async def test_what_it_started_ends_with_a_call_that_is_given_up(spawner: Path) -> None:
    call = asyncio.create_task(scratch.output_of("spawner", str(spawner), "300", limit_s=LONG_S))
    await until(spawner.exists)
    (leader,) = scratch.running()
    assert os.getsid(leader) == leader, "Ctrl-C is for the front"
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    child = number_in(spawner)
    await until(lambda: gone(child) and gone(leader))
    assert not scratch.running()


async def test_the_limit_ends_it(site: Path) -> None:
    (site / "endless.py").write_text("while True: pass")
    with pytest.raises(TimeoutError):
        await scratch.output_of("endless", limit_s=0.2)
    assert not scratch.running()
    assert not [child for child in psutil.Process().children() if "endless" in child.cmdline()]


async def test_a_policy_that_does_not_load_in_time(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        site, "slow", "[kvyard.admission]\nslow = slow_plugin:Slow\n", modules={"slow_plugin": "while True: pass"}
    )
    monkeypatch.setattr(policy_listing, "SCRATCH_LIMIT_S", 0.2)
    with pytest.raises(OperationError, match="admission/slow did not load within") as refusal:
        await describe_installed("admission", "slow")
    assert refusal.value.code == "hung"
    assert "in a process of its own; nothing changed" in refusal.value.message
    assert "docs/plugins.md" in refusal.value.hint


ASK = """
import os, socket
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["KVYARD_TEST_SOCKET"])
lines = s.makefile("rw")
said = lines.readline()
if '"hello"' in said:
    print('{"id":1,"method":"drain","params":{"stop":true}}', file=lines, flush=True)
    said = lines.readline()
print(said)
"""
CALLER = """
    import subprocess, sys
    from kvyard.policy import AdmissionPolicy


    class Caller(AdmissionPolicy):
        pass


    ask = [sys.executable, "-m", "asks"]
    Caller.__doc__ = subprocess.run(ask, capture_output=True, text=True, start_new_session={apart}).stdout
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvyard-") as name:
        yield Path(name)


@pytest.mark.parametrize("apart", [False, True])
async def test_a_policy_that_is_only_looked_at_may_not_operate_the_daemon(
    site: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """While it is imported a child of it asks for a drain, perhaps from another session."""
    monkeypatch.setenv("STATE_DIRECTORY", str(site))
    monkeypatch.setenv("KVYARD_TEST_SOCKET", str(folder / "s"))
    modules = {"caller_plugin": CALLER.replace("{apart}", str(apart)), "asks": ASK}
    install(site, "caller", "[kvyard.admission]\ncaller = caller_plugin:Caller\n", modules=modules)
    daemon = Daemon(Settings(), Served("m", "m.gguf", "llama"), "http://x", KeyRing(None))
    server = ControlServer(folder / "s", "1")
    await server.start(daemon)
    try:
        shown = await daemon.policy_show("admission", "caller")
    finally:
        await server.close()
    told = json.loads(shown["doc"])
    assert told["error"]["code"] == "forbidden"
    assert "processes that run policies" in told["error"]["message"]
    assert not daemon.serving.draining
    assert "what runs policies may not operate the daemon" in daemon.log.last(1)[0].data["message"]


async def test_it_ends_with_the_front(site: Path) -> None:
    endless = "import os, pathlib\npathlib.Path(os.environ['TOLD']).write_text(str(os.getpid()))\nwhile True: pass"
    install(site, "stuck", "[kvyard.admission]\nstuck = stuck_plugin:S\n", modules={"stuck_plugin": endless})
    code = (
        "import asyncio\nfrom kvyard.front.policy_listing import describe_installed\n"
        "asyncio.run(describe_installed('admission', 'stuck'))"
    )
    environment = {**os.environ, "TOLD": str(site / "pid")}
    front = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environment)
    try:
        await until(lambda: number_in(site / "pid") > 0)
        pid = number_in(site / "pid")
        assert not gone(pid)
    finally:
        front.kill()
        await front.wait()
    await until(lambda: gone(pid))
