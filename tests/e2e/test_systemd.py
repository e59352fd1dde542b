"""Under a service manager: ready when it serves, pings while it makes progress, a notice before it stops."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvyard.control.client import Client
from kvyard.front.serve import GOODBYE_S
from kvyard.front.settings import Settings

from tests.e2e.daemon import daemon
from tests.e2e.timing import limit

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "kvyard.service"
PAGE = (ROOT / "docs" / "systemd.md").read_text()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.settimeout(30)
    yield sock
    sock.close()


def until(manager: socket.socket, wanted: str, seconds: float) -> list[str]:
    """Lines received up to the wanted one."""
    lines: list[str] = []
    end = time.monotonic() + seconds
    while wanted not in lines:
        assert time.monotonic() < end, f"no {wanted} within {seconds} s: {lines}"
        lines += manager.recv(4096).decode().splitlines()
    return lines


def test_LIFECYCLE_12_LIFECYCLE_13_ready_pings_and_stopping(quick_model_folder: Path, manager: socket.socket) -> None:
    """A completion is sent in the moment of READY=1; pings come twice as often as is asked for."""
    env = {"NOTIFY_SOCKET": str(manager.getsockname()), "WATCHDOG_USEC": "1500000"}
    with daemon("--kv-blocks", "40", model=quick_model_folder, env=env, wait=False) as running:
        until(manager, "READY=1", limit(30))
        with Client(running.socket) as client:
            running.base = client.status().address
        running.complete("x", max_tokens=1)
        began = time.monotonic()
        for _ in range(3):
            until(manager, "WATCHDOG=1", limit(2))
        assert time.monotonic() - began < 3 * limit(0.75)
        running.process.terminate()
        until(manager, "STOPPING=1", limit(5))
        assert running.process.wait(limit(10)) == 0


def test_LIFECYCLE_12_a_broken_model_is_never_ready(manager: socket.socket, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with daemon(model=broken, env={"NOTIFY_SOCKET": str(manager.getsockname())}, wait=False) as running:
        assert running.process.wait(limit(20)) != 0
        assert "Traceback" not in running.log
        manager.setblocking(False)
        said = b""
        try:
            while True:
                said += manager.recv(4096)
        except BlockingIOError:
            pass
        assert b"READY=1" not in said


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_tight() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    # It wants the program to be there.
    unit.write_text(UNIT.read_text().replace("/usr/bin/kvyard ", "/bin/true "))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_page_names_the_folders_and_times_of_the_unit() -> None:
    unit = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    assert (unit["WatchdogSec"], unit["TimeoutStopSec"], unit["TimeoutStartSec"]) == ("30", "60", "15min")
    names = re.findall(r"(KVYARD_\w+|\w+_CACHE_DIR)=", UNIT.read_text())
    devices = re.findall(r"DeviceAllow=(\S+) rw", UNIT.read_text())
    assert names and devices
    assert [name for name in [*names, *devices] if f"`{name}`" not in PAGE] == []
    assert Settings().drain_timeout_s + GOODBYE_S < int(unit["TimeoutStopSec"]), "running requests would be cut off"
