"""Answers of generations on the wire: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import structlog
from starlette.types import Scope, Send

from kvyard.front.http.answers import Usage
from kvyard.front.http.connection import handle_of
from kvyard.front.http.errors import JSON, ApiError, error_body
from kvyard.front.http.run import Run
from kvyard.front.text.continuation import Piece

log = structlog.get_logger()

_DONE: Final = b"data: [DONE]\n\n"


class Format(Protocol):
    """How one of the APIs writes an order's answer as JSON."""

    def opening(self, at: int) -> bytes | None:
        """A chunk before the first piece of continuation `at`; None where there is none, or not again."""
        ...

    def chunk(self, at: int, piece: Piece, usage: Usage | None) -> bytes:
        """The chunk that adds `piece` to continuation `at`."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk with the usage alone."""
        ...

    def whole(self, chosen: list[tuple[int, Piece]], usage: Usage) -> bytes:
        """The answer that is no stream."""
        ...


async def send_whole(run: Run, form: Format, headers: dict[str, str], send: Send) -> None:
    """Wait for the end and send the answer. Raises ApiError, before anything is sent, when the generation failed."""
    async for _ in run.progress():
        pass
    heavy, chosen, usage = run.order.heavy, run.chosen(), run.usage()
    body = await asyncio.to_thread(form.whole, chosen, usage) if heavy else form.whole(chosen, usage)
    await send_json(200, body, headers, send)


async def send_json(status: int, body: bytes, headers: dict[str, str], send: Send) -> None:
    """Send a JSON body."""
    length = {"content-type": JSON, "content-length": str(len(body))}
    await send({"type": "http.response.start", "status": status, "headers": _encoded(length | headers)})
    await send({"type": "http.response.body", "body": body})


async def send_error(error: ApiError, headers: dict[str, str], send: Send) -> None:
    """Send an error as the whole answer."""
    await send_json(error.status, error_body(error), headers | error.headers, send)


async def send_stream(run: Run, form: Format, headers: dict[str, str], scope: Scope, send: Send) -> None:
    """Send the answer while it is made.

    The response starts with the first tokens, so that a request that fails in the queue still gets an honest
    status: it is raised as ApiError. A failure in mid-stream becomes an error event, and the connection closes.
    """
    stream = _EventStream(headers, send)
    try:
        await _events(run, form, stream)
    except ApiError as error:
        if not stream.started:
            raise
        await fail_stream(error, scope, send)
    except Exception:
        if not stream.started:
            raise
        log.exception("a stream ended by an internal error", request_id=run.order.id)
        await fail_stream(ApiError(500, "An internal error ended the stream.", code="internal_error"), scope, send)


async def _events(run: Run, form: Format, stream: _EventStream) -> None:
    order = run.order
    heavy: set[int] = set(range(len(order.continuations))) if order.heavy_prompt else set()
    async for at in run.progress():
        usage = run.usage() if order.shown.usage_always else None
        piece = order.continuations[at].take()
        if at in heavy:  # its first chunk carries the prompt's log-probabilities
            heavy.remove(at)
            chunk = await asyncio.to_thread(form.chunk, at, piece, usage)
        else:
            chunk = form.chunk(at, piece, usage)
        opening = form.opening(at)
        await stream.events(chunk if opening is None else b"%s\n\ndata: %s" % (opening, chunk))
    if order.shown.usage_chunk:
        await stream.events(form.usage_chunk(run.usage()))
    await stream.end(_DONE)


async def fail_stream(error: ApiError, scope: Scope, send: Send) -> None:
    """End a stream that has begun by an error event, and close the connection behind it."""
    handle = handle_of(scope)
    if handle is not None:
        handle.close_after_response()
    await send({"type": "http.response.body", "body": b"data: %s\n\n" % error_body(error), "more_body": False})


class _EventStream:
    """A response of server-sent events, started by its first event."""

    def __init__(self, headers: dict[str, str], send: Send) -> None:
        self._headers = headers
        self._send = send
        self.started = False

    async def events(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            await self._start()
        await self._send({"type": "http.response.body", "body": b"data: %s\n\n" % data, "more_body": True})

    async def end(self, last: bytes) -> None:
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _start(self) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # proxies must pass tokens on at once
        }
        message = {"type": "http.response.start", "status": 200, "headers": _encoded(headers | self._headers)}
        await self._send(message)


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
