"""One connection to the control socket, with a daemon that behaves and one that does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from kvyard.control.client import ControlError, NotRunning
from kvyard.control.schema import PROTOCOL, Event, Hello, RequestPage, Status
from kvyard_tui import connection as module
from kvyard_tui.connection import Connection

from tests.tui.screen import serving, socket_dir
from tests.tui.yard import row

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def strange(talk: Talk) -> AsyncIterator[Path]:
    """A socket behind which something else talks."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await talk(reader, writer)
        writer.close()

    with socket_dir() as folder:
        server = await asyncio.start_unix_server(serve, folder / "s")
        try:
            yield folder / "s"
        finally:
            server.close()


def says(*lines: bytes, then_wait: bool = False) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for line in lines:
            writer.write(line)
        await writer.drain()
        if then_wait:
            await reader.read()

    return talk


HELLO = msgspec.json.encode(Hello(PROTOCOL, "0.1.0", "admin", 1)) + b"\n"


async def test_call_gives_the_typed_result() -> None:
    async with serving() as daemon:
        connection = await Connection.open(daemon.path)
        assert connection.hello.role == "admin"
        status = await connection.call("status", Status)
        assert status.model.id == "SmolLM2-135M-Instruct"
        await connection.close()
        assert daemon.sessions == set() or await settled(lambda: not daemon.sessions)


async def settled(so: Callable[[], bool]) -> bool:
    for _ in range(100):
        if so():
            return True
        await asyncio.sleep(0.01)
    return False


async def test_calls_are_matched_by_id_in_any_order() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        asked = [msgspec.json.decode(await reader.readline()) for _ in range(3)]
        for request in reversed(asked):
            writer.write(
                msgspec.json.encode({"type": "response", "id": request["id"], "result": request["method"]}) + b"\n"
            )
        await writer.drain()
        await reader.read()

    async with strange(talk) as path:
        connection = await Connection.open(path)
        assert await asyncio.gather(*(connection.call(name, str) for name in "abc")) == ["a", "b", "c"]
        await connection.close()


async def test_an_error_of_the_daemon_keeps_its_code_and_hint() -> None:
    async with serving(role="viewer") as daemon:
        connection = await Connection.open(daemon.path)
        with pytest.raises(ControlError) as caught:
            await connection.call("pause", object)
        assert (caught.value.code, caught.value.hint) == ("forbidden", "ask for the operator group")
        assert not connection.closed.is_set()
        await connection.close()


async def test_a_reply_of_megabytes_arrives() -> None:
    async with serving() as daemon:
        daemon.rows = [row(i, request_id="x" * 2000) for i in range(2000)]
        connection = await Connection.open(daemon.path)
        page = await connection.call("requests", RequestPage, {"limit": 2000})
        assert len(page.rows) == 2000
        await connection.close()


async def test_events_are_handed_on_as_they_come() -> None:
    seen: list[Event] = []
    async with serving() as daemon:
        connection = await Connection.open(daemon.path, seen.append)
        await connection.call("subscribe", object, {"topics": ["status", "events"], "interval": 0.05})
        await daemon.event("swap", "one")
        assert await settled(lambda: {event.topic for event in seen} == {"status", "events"})
        await connection.close()


async def test_nobody_there() -> None:
    with socket_dir() as folder:
        with pytest.raises(NotRunning, match="no daemon answers at"):
            await Connection.open(folder / "none")
        with pytest.raises(NotRunning):
            await Connection.open(folder)


async def test_a_socket_left_over_after_a_kill() -> None:
    async with serving() as daemon:
        await daemon.stop()
        with pytest.raises(NotRunning, match="left-over"):
            await Connection.open(daemon.path)


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        (says(), "closed the connection"),
        (says(b"HTTP/1.1 400 Bad Request\r\n"), "does not know"),
        (says(b'{"type":"event","topic":"x","at":1,"data":{}}\n'), "does not greet"),
        (says(msgspec.json.encode(Hello(9, "2.0", "admin", 1)) + b"\n"), "control protocol 9"),
        (says(b"\xff\xfe\n"), "does not know"),
    ],
)
async def test_what_is_no_kvyard_daemon_is_named(talk: Talk, words: str) -> None:
    async with strange(talk) as path:
        with pytest.raises(ControlError, match=words):
            await Connection.open(path)


async def test_a_daemon_that_does_not_greet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT", 0.2)
    async with strange(says(then_wait=True)) as path:
        with pytest.raises(ControlError, match="did not greet"):
            await Connection.open(path)


async def test_a_daemon_that_does_not_answer() -> None:
    async with strange(says(HELLO, then_wait=True)) as path:
        connection = await Connection.open(path)
        with pytest.raises(ControlError, match="did not answer status within"):
            await connection.call("status", Status, limit_s=0.2)
        await connection.close()


@pytest.mark.parametrize("line", [b"garbage\n", b'{"type":"response"}\n', b"[1,2]\n"])
async def test_garbage_ends_the_connection_with_a_reason(line: bytes) -> None:
    async with strange(says(HELLO, line, then_wait=True)) as path:
        connection = await Connection.open(path)
        await asyncio.wait_for(connection.closed.wait(), 5)
        with pytest.raises(ControlError, match="does not know"):
            await connection.call("status", Status)
        await connection.close()


async def test_a_call_under_way_when_the_daemon_dies_is_told() -> None:
    async with serving() as daemon:
        daemon.silent = True
        connection = await Connection.open(daemon.path)
        call = asyncio.create_task(connection.call("status", Status))
        await asyncio.sleep(0.1)
        await daemon.stop()
        with pytest.raises(ControlError):
            await call
        await connection.close()


async def test_an_answer_of_another_shape_is_told() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        await reader.readline()
        writer.write(b'{"type":"response","id":1,"result":{"version":7}}\n')
        await writer.drain()
        await reader.read()

    async with strange(talk) as path:
        connection = await Connection.open(path)
        with pytest.raises(ControlError, match="the answer to status was not understood"):
            await connection.call("status", Status)
        await connection.close()


async def test_an_answer_nobody_waits_for_is_dropped() -> None:
    async with strange(says(HELLO, b'{"type":"response","id":77}\n', then_wait=True)) as path:
        connection = await Connection.open(path)
        await asyncio.sleep(0.1)
        assert not connection.closed.is_set()
        await connection.close()
        await connection.close()
