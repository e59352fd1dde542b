"""uvicorn's HTTP protocol, with a handle on each request's connection that ASGI itself does not give.

What is no HTTP at all is answered here, in the shape of all errors, because no application ever sees it.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable
from typing import Any, Final

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvyard.front.http.connection import EXTENSION
from kvyard.front.http.errors import JSON, ApiError, error_body, invalid

KEEP_ALIVE_S: Final = 75
"""Longer than clients and proxies keep idle connections, so that it is they who close them, without a race."""
MOST_HEAD_BYTES: Final = 64 << 10
"""Of a request's line and headers together."""

ARRIVAL_S = 120.0
"""Seconds in which a request has to be here whole, from the connection or its first byte on."""
FIRST_PROBE_S: Final = 0.005
"""A client that has closed its sending side is left in peace for this long: most small answers are out by then."""
PROBE_S: Final = 1.0
LINGER_S: Final = 5.0
"""How long the rest of a refused body is thrown away: closed at once, the kernel would answer what still comes by a
reset, and a client that is still sending would lose the answer."""
_PROBE: Final = b"HTTP/1.1 102 Processing\r\n\r\n"

log = structlog.get_logger()
# Its warnings are about requests that are answered with an error here, or advice on installing packages.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class _Counting:
    """A transport that counts what is written to it, and asks before it closes."""

    __slots__ = ("_lingers", "_transport", "written")

    def __init__(self, transport: asyncio.Transport, lingers: Callable[[], bool]) -> None:
        """`lingers` tells whether it takes care of the closing itself."""
        self._transport = transport
        self._lingers = lingers
        self.written = 0

    def close(self) -> None:
        if not self._lingers():
            self._transport.close()

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the transport has
        return getattr(self._transport, name)


def _reset(transport: asyncio.Transport) -> bool:
    """Whether the connection has ended in both directions; nobody reads it any more who would notice."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))


class _Handle:
    """`ConnectionHandle` of one connection."""

    __slots__ = ("_protocol", "_transport", "lost")

    def __init__(self, protocol: HttpToolsProtocol, transport: _Counting) -> None:
        self._protocol = protocol
        self._transport = transport
        self.lost = False

    @property
    def unsent(self) -> int:
        return 0 if self.lost else int(self._transport.get_write_buffer_size())

    @property
    def taken(self) -> int:
        return self._transport.written - self.unsent

    def allow_unsent(self, size: int) -> None:
        self._transport.set_write_buffer_limits(high=size)

    def abort(self) -> None:
        self._transport.abort()

    def close_after_response(self) -> None:
        self._protocol.cycle.keep_alive = False


class ConnectionProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose scopes carry a `ConnectionHandle`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as its parent has it
        counting = _Counting(transport, self._linger)
        super().connection_made(counting)  # type: ignore[arg-type] # all of a transport that is used
        self._handle = _Handle(self, counting)
        self._extensions: dict[str, Any] = {EXTENSION: self._handle}
        self._head_bytes = 0
        """Received since the last message ended."""
        self._in_head = True
        self._half_closed = False
        self._lingering = False
        self._next_probe = 0.0
        self._arrival: asyncio.TimerHandle | None = self.loop.call_later(ARRIVAL_S, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._arrived()
        self._handle.lost = True

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        # The parser keeps an unfinished line for as long as it grows.
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            what = f"A request's line and headers have at most {MOST_HEAD_BYTES} bytes together."
            self._refuse(ApiError(431, what, code="headers_too_large"))

    def eof_received(self) -> bool:  # type: ignore[override] # as asyncio has it; uvicorn's always lets it close
        """The client sends no more: it is gone or waits for its answer, which only bytes sent to it can tell."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self._half_closed = True
        self.loop.call_later(FIRST_PROBE_S, self._look_after_client, FIRST_PROBE_S)
        return True

    def _look_after_client(self, waited: float) -> None:
        if self._handle.lost or self.transport.is_closing():
            return
        if _reset(self.transport):
            self.transport.abort()
            return
        now = self.loop.time()
        # A machine that has closed its socket answers anything by a reset. The chunks of a stream do as well.
        if not self.cycle.response_started and not self.pipeline and now >= self._next_probe:
            self._next_probe = now + PROBE_S
            self.transport.write(_PROBE)
        wait = min(2 * waited, PROBE_S)
        self.loop.call_later(wait, self._look_after_client, wait)

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if self._half_closed and last:
            self.transport.close()

    def _linger(self) -> bool:
        """Answered in the middle of its body: end our side, and the connection with the client's or in a while."""
        if self._lingering or self._in_head or self.transport.is_closing():
            return False
        self._lingering = True
        self._arrived()
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)
        return True

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _too_late(self) -> None:
        self._arrival = None
        if self.transport.is_closing():
            return
        # While an answer goes on the next request has time, and the server may not even be reading it.
        answering = self._in_head and self.cycle is not None and not self.cycle.response_complete
        if answering or self.pipeline or self.flow.read_paused:
            self._arrival = self.loop.call_later(ARRIVAL_S, self._too_late)
        elif self._head_bytes:
            what = f"The request was not here whole within {ARRIVAL_S:g} s."
            self._refuse(ApiError(408, what, code="request_timeout"))
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL_S, self._too_late)
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._arrived()
        self._head_bytes, self._in_head = 0, True

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP. A response under way is not broken into: the connection just ends."""
        self._refuse(invalid("This is not a valid HTTP request.", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        log.info("http.invalid", code=error.code, client=self.client[0] if self.client else None)
        in_body = not self._in_head and not self.pipeline and not self.cycle.response_started
        if in_body or self.cycle is None or self.cycle.response_complete:
            body = error_body(error)
            head = b"content-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (JSON.encode(), len(body))
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade that is not offered is ignored, as HTTP wants it."""
