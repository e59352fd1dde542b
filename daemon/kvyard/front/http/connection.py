"""The client's connection while its request is served: is it still there, does it read, how is it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = structlog.get_logger()

EXTENSION: Final = "kvyard.connection"
"""Key of a `ConnectionHandle` in the ASGI scope's extensions; ASGI itself cannot drop a connection."""

T = TypeVar("T")


class ConnectionHandle(Protocol):
    """What the server lets an application know of the connection of a request, and do with it."""

    @property
    def unsent(self) -> int:
        """Bytes written that wait in this process, because the client does not read and the kernel is full."""
        ...

    @property
    def taken(self) -> int:
        """Bytes of all responses so far that left this process."""
        ...

    @property
    def lost(self) -> bool:
        """The connection is gone, with whatever was unsent."""
        ...

    def allow_unsent(self, size: int) -> None:
        """Let `send` wait for the client only above that many unsent bytes."""
        ...

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
    """A `send` that knows how far the response is, and gives a stream up whose client is too far behind."""

    __slots__ = ("_cut", "_handle", "_most", "_send", "ended", "started")

    def __init__(
        self, send: Send, handle: ConnectionHandle | None, most_unsent: int, cut: Callable[[], None]
    ) -> None:
        """`cut` is called when more than `most_unsent` bytes wait for the client and more are to come."""
        self._send = send
        self._handle = handle
        self._most = most_unsent
        self._cut = cut
        self.started = self.ended = False

    async def __call__(self, message: Message) -> None:
        self.ended = self.started and not message.get("more_body", False)
        self.started = True
        if self._handle is not None and self._handle.unsent > self._most:
            await self._too_far_behind(self._handle)
        await self._send(message)

    async def _too_far_behind(self, handle: ConnectionHandle) -> None:
        # Events that were ready together are written within one turn of the loop: give them one to leave.
        await asyncio.sleep(0)
        if handle.unsent > self._most:
            self._cut()


@dataclass(slots=True)
class _Watch:
    """One connection under watch: requests in service, bytes taken when last looked at, and since when no more."""

    requests: int
    taken: int
    since: float


class StallGuard:
    """Cuts clients off that take nothing of what waits for them. One timer for all, none while nobody is watched."""

    def __init__(self, timeout_s: float, cut: Callable[[str], None] = lambda reason: None) -> None:
        """`cut` is told the reason of every cut."""
        self._timeout_s = timeout_s
        self._told = cut
        self._watched: dict[ConnectionHandle, _Watch] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def armed(self) -> bool:
        """Whether the timer runs."""
        return self._timer is not None

    def enter(self, handle: ConnectionHandle) -> None:
        """A request of this connection is served."""
        watch = self._watched.get(handle)
        if watch is None:
            self._watched[handle] = _Watch(1, handle.taken, asyncio.get_running_loop().time())
        else:
            watch.requests += 1
        if self._timer is None:
            self._arm()

    def leave(self, handle: ConnectionHandle) -> None:
        """It has been served; what is unsent stays under watch."""
        watch = self._watched.get(handle)
        if watch is not None:
            watch.requests -= 1

    def cut(self, handle: ConnectionHandle, reason: str) -> None:
        """Drop a connection for a client that does not read."""
        log.warning("client.cut", reason=reason, unsent_bytes=handle.unsent, hint="it does not read its answer")
        self._watched.pop(handle, None)
        handle.abort()
        self._told(reason)

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(1.0, self._timeout_s / 4), self._check)

    def _check(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for handle, watch in list(self._watched.items()):
            if handle.lost or (not watch.requests and not handle.unsent):
                del self._watched[handle]
            elif not handle.unsent or handle.taken != watch.taken:
                watch.taken, watch.since = handle.taken, now
            elif now - watch.since > self._timeout_s:
                self.cut(handle, "stalled")
        if self._watched:
            self._arm()


class Watching:
    """ASGI middleware: every request's connection under the guard's watch."""

    def __init__(self, app: ASGIApp, guard: StallGuard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = handle_of(scope)
        if handle is None:
            await self._app(scope, receive, send)
            return
        self._guard.enter(handle)
        try:
            await self._app(scope, receive, send)
        finally:
            self._guard.leave(handle)
