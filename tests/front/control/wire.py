"""The protocol by hand, so that tests can also break it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any


class Wire:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.number = 0

    async def send(self, method: str, **params: object) -> int:
        """Send a request, return its id."""
        self.number += 1
        await self.raw(json.dumps({"id": self.number, "method": method, "params": params}).encode() + b"\n")
        return self.number

    async def raw(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def line(self) -> dict[str, Any]:
        """The next line as JSON; empty at the end of the connection."""
        async with asyncio.timeout(10):
            line = await self.reader.readline()
        value: dict[str, Any] = json.loads(line) if line else {}
        return value

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """The response to a request, events passed over."""
        number = await self.send(method, **params)
        while True:
            message = await self.line()
            if not message or message["type"] == "response":
                assert not message or message["id"] in (number, 0)
                return message

    async def event(self, topic: str) -> dict[str, Any]:
        """The next event of a topic."""
        while True:
            message = await self.line()
            assert message, "the connection ended"
            if message["type"] == "event" and message["topic"] == topic:
                return message

    async def at_end(self) -> bool:
        """Whether the server has closed the connection (waits for it)."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                return not await self.reader.read(1)
        return True


@contextlib.asynccontextmanager
async def wire(path: Path, greeting: bool = True) -> AsyncIterator[Wire]:
    """Connect, and read the greeting unless a test wants to."""
    reader, writer = await asyncio.open_unix_connection(str(path), limit=64 << 20)
    try:
        connection = Wire(reader, writer)
        if greeting:
            hello = await connection.line()
            assert hello["type"] == "hello", hello
        yield connection
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
