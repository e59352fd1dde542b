"""The control server: accepts connections on the Unix socket and gives each a session."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec
import structlog

from kvyard.control.schema import MAX_LINE, ErrorBody, Response
from kvyard.front.control.listener import Listener, claim
from kvyard.front.control.peer import belongs_to, identify
from kvyard.front.control.session import Session
from kvyard.front.operations import Operations

MAX_SESSIONS = 128
"""Connections at once; the next is told so and closed."""
GOODBYE = 1.0
"""Seconds for answers under way when the server closes."""

_log = structlog.get_logger("kvyard.control")


class ControlServer:
    """Owns the socket from construction on, so that a second daemon stops before it loads a model.

    server = ControlServer(path, version)    # raises SocketError
    await server.start(operations)
    ...
    await server.close()
    """

    def __init__(self, path: Path, version: str, operator_group: str | None = None) -> None:
        """Take the path. Raises SocketError when it cannot be taken; nothing is changed then."""
        self.path = path
        self._version = version
        self._operator_group = operator_group
        self._listener: Listener = claim(path, operator_group)
        self._server: asyncio.Server | None = None
        self._operations: Operations | None = None
        self._sessions: dict[asyncio.Task[None], Session | None] = {}
        self._mutations: set[asyncio.Task[None]] = set()

    @property
    def sessions(self) -> int:
        """Open connections."""
        return len(self._sessions)

    async def start(self, operations: Operations) -> None:
        """Answer from now on; connections made before wait in the backlog."""
        self._operations = operations
        self._server = await asyncio.start_unix_server(self._accept, sock=self._listener.socket, limit=MAX_LINE)

    async def close(self) -> None:
        """Stop answering, give the path up. Safe to call twice."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(session.finish(GOODBYE) for session in self._sessions.values() if session))
        tasks = [*self._sessions, *self._mutations]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # a coroutine always runs in one
        self._sessions[task] = None
        try:
            await self._converse(task, reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        except Exception:
            _log.exception("control session failed")
        finally:
            del self._sessions[task]
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _converse(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        operations = self._operations
        assert operations is not None  # `start` sets it before anybody is accepted
        who = identify(writer.get_extra_info("socket"), self._operator_group)
        if len(self._sessions) > MAX_SESSIONS:
            _refuse(writer, "busy", f"there are {MAX_SESSIONS} control connections already", "close some")
        elif any(belongs_to(who.pid, pid) for pid in operations.policy_pids):
            told = f"refused {who}: what runs policies may not operate the daemon"
            operations.log.add("control", told, pid=who.pid)
            _refuse(writer, "forbidden", "processes that run policies may not use the control socket", "")
        else:
            session = Session(operations, who, self._version, os.getpid(), reader, writer, self._keep)
            self._sessions[task] = session
            await session.run()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._mutations.add(task)
        task.add_done_callback(self._mutations.discard)


def _refuse(writer: asyncio.StreamWriter, code: str, message: str, hint: str) -> None:
    writer.write(msgspec.json.encode(Response(0, None, ErrorBody(code, message, hint))) + b"\n")
