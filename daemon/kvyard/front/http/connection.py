"""The client's connection while its request is served: is it still there, does it read, how is it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import structlog
from starlette.types import Message, Receive, Scope, Send

log = structlog.get_logger()

EXTENSION: Final = "kvyard.connection"
"""Key of a `ConnectionHandle` in the ASGI scope's extensions; ASGI itself cannot drop a connection."""

T = TypeVar("T")


class ConnectionHandle(Protocol):
    """What the server lets an application do with the connection of a request."""

    def abort(self) -> None:
        """Drop the connection with what it has not sent; a stuck reader would never take it."""
        ...

    def close_after_response(self) -> None:
        """Close the connection behind the response instead of keeping it for another request."""
        ...


def handle_of(scope: Scope) -> ConnectionHandle | None:
    """The connection's handle, where the server offers one."""
    handle: ConnectionHandle | None = scope.get("extensions", {}).get(EXTENSION)
    return handle


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], gone: Callable[[], None]) -> T | None:
    """The result of `work`; None when the client went away first.

    Then `gone` was called at once, and `work` is cancelled. The request's body must have been read: the next
    thing that `receive` tells is the end of the connection.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            gone()
            return None
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait({task, watcher})


class WatchedSend:
    """A `send` that knows how far the response is, and since when it waits for the client to read."""

    __slots__ = ("_cut", "_loop", "_send", "ended", "started", "waiting_since")

    def __init__(self, send: Send, cut: Callable[[], None]) -> None:
        self._send = send
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self.waiting_since: float | None = None
        self.started = self.ended = False

    async def __call__(self, message: Message) -> None:
        self.waiting_since = self._loop.time()
        self.ended = self.started and not message.get("more_body", False)
        self.started = True
        await self._send(message)
        self.waiting_since = None

    def cut(self) -> None:
        """Give the client up."""
        self._cut()


class StallGuard:
    """Cuts clients off that do not read. One timer for all of them, none while there is nobody to watch."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._watched: set[WatchedSend] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def armed(self) -> bool:
        """Whether the timer runs."""
        return self._timer is not None

    def watch(self, send: WatchedSend) -> None:
        """Watch until `forget`."""
        self._watched.add(send)
        if self._timer is None:
            self._arm()

    def forget(self, send: WatchedSend) -> None:
        """The response is complete, or its client gone."""
        self._watched.discard(send)

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(1.0, self._timeout_s / 4), self._check)

    def _check(self) -> None:
        self._timer = None
        late = asyncio.get_running_loop().time() - self._timeout_s
        for send in list(self._watched):
            if send.waiting_since is not None and send.waiting_since < late:
                log.warning("client cut off: it took nothing while its buffers were full", after_s=self._timeout_s)
                self._watched.discard(send)
                send.cut()
        if self._watched:
            self._arm()
