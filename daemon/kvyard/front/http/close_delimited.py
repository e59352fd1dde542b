"""Responses of unknown length to clients before HTTP/1.1, who know no chunks: the connection ends with them."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_CLOSE: Final = (b"connection", b"close")


def close_delimited(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app`, whose responses without a length go out unchunked."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, _Sender(cycle, send))

    return served


class _Sender:
    """Takes the place of uvicorn's own `send`, which chunks, for one response."""

    def __init__(self, cycle: RequestResponseCycle, send: Send) -> None:
        self._cycle = cycle
        self._send = send
        self._own = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
            self._own = not sized and self._cycle.scope["method"] != "HEAD"
        if not self._own:
            await self._send(message)
            return
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if message["type"] == "http.response.start":
            self._start(message)
        else:
            cycle.transport.write(message.get("body", b""))
            if not message.get("more_body", False):
                self._end()

    def _start(self, message: Message) -> None:
        cycle = self._cycle
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        lines = [b"%s: %s\r\n" % header for header in (*cycle.default_headers, *message["headers"], _CLOSE)]
        cycle.transport.write(b"".join([STATUS_LINE[message["status"]], *lines, b"\r\n"]))

    def _end(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        cycle.transport.close()
        cycle.on_response()
