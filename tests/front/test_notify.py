"""systemd's notify protocol: what is sent, when, and nothing where nobody listens."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvyard.front.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.settimeout(2)
    yield sock
    sock.close()


def environ(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(manager.getsockname()), **more}


def test_fields_are_lines(manager: socket.socket) -> None:
    Notifier(environ(manager)).send(READY=1, STATUS="serving")
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving"


def test_an_abstract_address() -> None:
    name = f"kvyard-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(2)
        Notifier({"NOTIFY_SOCKET": "@" + name}).send(READY=1)
        assert sock.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "relative", "/no/such/socket"])
def test_nobody_there_is_no_reason_to_fail(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address})
    notifier.send(READY=1)
    assert notifier._late == {}, "nobody will ever take it"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"WATCHDOG_USEC": "4000000"}, 4.0),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_interval_is_the_managers(given: dict[str, str], expected: float | None) -> None:
    assert Notifier(given).watchdog_s == expected


async def test_pings_come_in_time_and_only_while_alive(manager: socket.socket) -> None:
    notifier = Notifier(environ(manager, WATCHDOG_USEC="150000"))
    alive = True
    task = asyncio.create_task(notifier.watch(lambda: alive, lambda: "serving"))
    await asyncio.sleep(0.3)
    alive = False
    await asyncio.sleep(0.06)
    seen = drain(manager)
    assert seen.count(b"WATCHDOG=1") >= 3
    assert seen.count(b"STATUS=serving") == 1
    await asyncio.sleep(0.2)
    assert drain(manager) == []
    task.cancel()


async def test_a_manager_that_does_not_read_is_not_waited_for_and_learns_the_rest_later(
    manager: socket.socket,
) -> None:
    notifier = Notifier(environ(manager, WATCHDOG_USEC="90000"))
    began = time.monotonic()
    for number in range(2000):  # more than the kernel keeps for anybody
        notifier.send(STATUS=number)
    assert time.monotonic() - began < 5
    notifier.send(READY=1)
    notifier.send(WATCHDOG=1)
    assert b"READY=1" not in b"\n".join(drain(manager))
    task = asyncio.create_task(notifier.watch(lambda: False, lambda: ""))
    await asyncio.sleep(0.1)
    task.cancel()
    assert drain(manager) == [b"STATUS=1999\nREADY=1"]


def drain(manager: socket.socket) -> list[bytes]:
    manager.setblocking(False)
    seen = []
    try:
        while True:
            seen.append(manager.recv(4096))
    except BlockingIOError:
        return seen
