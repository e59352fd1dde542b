"""Asyncio client of the control socket, for the TUI: concurrent calls and subscriptions on one connection.

client = await AsyncClient.connect(path)
status = await client.call("status")
await client.call("subscribe", {"topics": ["status"], "interval": 0.5})
async for event in client.events(): ...
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Self

import msgspec

from kvyard.control.client import (
    MAX_REPLY,
    ControlError,
    Json,
    NotRunning,
    check_hello,
    decode_line,
    encode_request,
    unreachable,
)
from kvyard.control.schema import Event, Hello, Response, Status

QUEUED_EVENTS = 1024
"""Events kept for a reader that is behind; older ones go first and are counted in `dropped`."""


class AsyncClient:
    """One connection; every method raises ControlError, NotRunning once the daemon is gone."""

    def __init__(self, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello) -> None:
        self.path = path
        self.hello = hello
        self.dropped = 0
        self._reader = reader
        self._writer = writer
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._events: asyncio.Queue[Event | None] = asyncio.Queue(QUEUED_EVENTS)
        self._gone: ControlError | None = None
        self._pump = asyncio.create_task(self._read_lines(), name="control-client")

    @classmethod
    async def connect(cls, path: Path, timeout_s: float = 5.0) -> Self:
        """Connect and read the greeting within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_REPLY)
                try:
                    hello = check_hello(decode_line(await reader.readline()))
                except BaseException:
                    writer.close()
                    raise
        except TimeoutError as error:
            raise ControlError("timeout", f"the daemon at {path} did not greet within {timeout_s:g} s") from error
        except OSError as error:
            raise unreachable(path, error) from error
        return cls(path, reader, writer, hello)

    @property
    def connected(self) -> bool:
        """The daemon has not gone away yet."""
        return self._gone is None

    async def call(self, method: str, params: Mapping[str, Json] | None = None, timeout_s: float = 10.0) -> Json:
        """The result of a method; calls may overlap."""
        if self._gone is not None:
            raise self._gone
        self._number += 1
        number = self._number
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._writer.write(encode_request(number, method, params))
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
                return await future
        except TimeoutError as error:
            raise ControlError("timeout", f"`{method}` had no answer within {timeout_s:g} s") from error
        except OSError as error:
            raise NotRunning(self.path, "it closed the connection") from error
        finally:
            del self._waiting[number]

    async def status(self) -> Status:
        """What the first screen shows."""
        return msgspec.convert(await self.call("status"), Status)

    async def events(self) -> AsyncIterator[Event]:
        """Events of the subscriptions and of streaming calls, until the connection ends."""
        while (event := await self._events.get()) is not None:
            yield event

    async def close(self) -> None:
        """End the connection; safe to call twice."""
        self._pump.cancel()
        self._writer.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pump
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read_lines(self) -> None:
        gone: ControlError = NotRunning(self.path, "it closed the connection")
        try:
            while line := await self._reader.readline():
                self._take(decode_line(line))
        except ControlError as error:
            gone = error
        except (OSError, ValueError):
            pass  # a reset, or a line beyond MAX_REPLY: the connection is of no use any more
        finally:
            self._end(gone)

    def _take(self, message: Hello | Response | Event) -> None:
        if isinstance(message, Event):
            self._put(message)
        elif isinstance(message, Response):
            future = self._waiting.get(message.id)
            if future is not None and not future.done():
                if message.error is None:
                    future.set_result(message.result)
                else:
                    future.set_exception(ControlError.of(message.error))

    def _put(self, event: Event | None) -> None:
        while self._events.full():
            self._events.get_nowait()
            self.dropped += 1
        self._events.put_nowait(event)

    def _end(self, gone: ControlError) -> None:
        self._gone = gone
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(gone)
        self._put(None)
        self._writer.close()
