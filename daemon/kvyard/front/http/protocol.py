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
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvyard.front.http.close_delimited import close_delimited
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
HANG_UP_POLL_S: Final = 0.1
"""Seconds between two looks at a client that has sent more requests than are read."""
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


def _sends_no_more(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its sending side, whatever of it is still unread."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


class _HeadTooLong(Exception):
    """A head has more than `MOST_HEAD_BYTES`."""


class _Handle:
    """`ConnectionHandle` of one connection."""

    __slots__ = ("_protocol", "_transport", "lost")

    def __init__(self, protocol: ConnectionProtocol, transport: _Counting) -> None:
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
        if (cycle := self._protocol.answering) is not None:
            cycle.keep_alive = False


class ConnectionProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose scopes carry a `ConnectionHandle`."""

    def count_refused(self, code: str) -> None:
        """Something was refused here."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as its parent has it
        counting = _Counting(transport, self._linger)
        super().connection_made(counting)  # type: ignore[arg-type] # all of a transport that is used
        self._handle = _Handle(self, counting)
        self._extensions: dict[str, Any] = {EXTENSION: self._handle}
        self._head_bytes = 0
        """Received since the last message ended."""
        self._head_read = 0
        """Of the head that is parsed, as the parser has told it: one read may bring all of it, and more."""
        self._in_head = True
        self.answering: RequestResponseCycle | None = None
        """The request that is answered, or was last; uvicorn's `cycle` is the latest that came."""
        self._refused: ApiError | None = None
        """Told behind the answers to what came before it."""
        self._looked_after = False
        self._half_closed = False
        self._lingering = False
        self._next_probe = 0.0
        self._arrival: asyncio.TimerHandle | None = self.loop.call_later(ARRIVAL_S, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._arrived()
        self._handle.lost = True
        # uvicorn tells the latest request alone, which may wait behind others.
        for cycle in (self.answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = cycle.disconnected or not cycle.response_complete
                cycle.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._lingering or self._refused is not None:
            return
        # The parser keeps an unfinished line for as long as it grows.
        self._head_bytes += len(data)
        super().data_received(data)
        done = self._lingering or self._refused is not None or self.transport.is_closing()
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES and not done:
            self._refuse(_head_too_long())

    def eof_received(self) -> bool:  # type: ignore[override] # as asyncio has it; uvicorn's always lets it close
        """The client sends no more: it is gone or waits for its answer, which only bytes sent to it can tell."""
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # it will never be here whole
        cycle = self.answering
        if self._lingering or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if cycle.scope["http_version"] != "1.1":
            return False
        self._half_closed = True
        self._begin_to_look()
        return True

    def _begin_to_look(self) -> None:
        if not self._looked_after:
            self._looked_after = True
            self.loop.call_later(FIRST_PROBE_S, self._look_after_client, FIRST_PROBE_S)

    def _look_past_unread(self) -> None:
        """While requests wait for their turn nothing is read, so nobody would tell that the client has gone."""
        if self._handle.lost or self.transport.is_closing() or self._looked_after or not self.pipeline:
            return
        if _sends_no_more(self.transport):
            self._begin_to_look()
        else:
            self.loop.call_later(HANG_UP_POLL_S, self._look_past_unread)

    def _look_after_client(self, waited: float) -> None:
        if self._handle.lost or self.transport.is_closing():
            return
        if _reset(self.transport):
            self.transport.abort()
            return
        now = self.loop.time()
        # A machine that has closed its socket answers anything by a reset. The chunks of a stream do as well.
        if self.answering is not None and not self.answering.response_started and now >= self._next_probe:
            self._next_probe = now + PROBE_S
            self.transport.write(_PROBE)
        wait = min(2 * waited, PROBE_S)
        self.loop.call_later(wait, self._look_after_client, wait)

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if last and not self.transport.is_closing():
            if self._refused is not None:
                self._tell(self._refused)
            elif self._half_closed:
                self.transport.close()

    def _linger(self) -> bool:
        """Answered before it was read: end our side, and the connection with the client's or in a while."""
        if self._lingering or self._in_head or self._half_closed or self.transport.is_closing():
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
        self._head_read = 0
        self.scope["extensions"] = self._extensions

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_read += size
        if self._head_read > MOST_HEAD_BYTES:
            raise _HeadTooLong

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # raises for a target that is no URL
        self._in_head = False
        if self.pipeline:
            self._look_past_unread()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.answering = cycle
        if cycle.scope["http_version"] != "1.1":
            app = close_delimited(app, cycle)  # type: ignore[arg-type, assignment] # Starlette's names of the same
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._arrived()
        self._head_bytes, self._in_head = 0, True

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser did not take."""
        if self._head_read > MOST_HEAD_BYTES:
            self._refuse(_head_too_long())
        else:
            self._refuse(invalid("This is not a valid HTTP request.", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        log.info("http.invalid", code=error.code, client=self.client[0] if self.client else None)
        self._arrived()
        answering, in_body = self.answering, not self._in_head
        if in_body and self.pipeline:
            self.pipeline.popleft()  # the request itself, which has waited behind others
        elif in_body and answering is not None:
            if answering.response_started:
                self.transport.close()
            else:
                self._tell(error)
            return
        if answering is None or answering.response_complete:
            self._tell(error)
        else:
            self._refused = error

    def _tell(self, error: ApiError) -> None:
        self.count_refused(error.code or "other")
        body = error_body(error)
        head = b"content-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (JSON.encode(), len(body))
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self._in_head = False  # more of it may come
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade that is not offered is ignored, as HTTP wants it."""


def counting(refused: Callable[[str], None]) -> type[ConnectionProtocol]:
    """The protocol of a server that tells `refused` the code of what is refused here; uvicorn makes the objects."""

    class Counting(ConnectionProtocol):
        def count_refused(self, code: str) -> None:
            refused(code)

    return Counting


def _head_too_long() -> ApiError:
    what = f"A request's line and headers have at most {MOST_HEAD_BYTES} bytes together."
    return ApiError(431, what, code="headers_too_large")
