"""The two generating endpoints as ASGI applications."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

import structlog
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvyard.front.http.authentication import tenant_of
from kvyard.front.http.body import BodyDecoder, read_body
from kvyard.front.http.connection import StallGuard, WatchedSend, handle_of, while_connected
from kvyard.front.http.context import Context
from kvyard.front.http.errors import ApiError
from kvyard.front.http.order import Order
from kvyard.front.http.requests import GenerationRequest
from kvyard.front.http.respond import Format, fail_stream, send_error, send_stream, send_whole
from kvyard.front.http.run import Run
from kvyard.front.http.settings import HttpSettings
from kvyard.front.service import Refusal
from kvyard.front.text.tokenizer import Tokenizer

log = structlog.get_logger()

R = TypeVar("R", bound=GenerationRequest)

REQUEST_ID: Final = "x-request-id"
_LONGEST_ID: Final = 128

_SHUTTING_DOWN: Final = ApiError(503, "The server is shutting down.", code="shutting_down")
_FAREWELL_S: Final = 0.5
"""How long a request that the server cancels waits for its client to take the last words."""


def response_id(headers: Headers, own: str) -> str:
    """The client's X-Request-Id where it can be given back, else our own. It names nothing inside the daemon."""
    given = headers.get(REQUEST_ID, "")
    return given if 0 < len(given) <= _LONGEST_ID and given.isascii() and given.isprintable() else own


class GenerationEndpoint(Generic[R]):
    """Reads a request, has it served, and answers; ends the generation at once when the client goes away."""

    def __init__(
        self,
        kind: type[R],
        prefix: str,
        understand: Callable[[R, str, Context], Awaitable[Order]],
        make_format: Callable[[Order, Tokenizer], Format],
        context: Context,
        settings: HttpSettings,
        stalls: StallGuard,
        refused: Callable[[str], None] = lambda code: None,
    ) -> None:
        """`prefix` begins the ids of answers; `understand` and `make_format` are the two sides of the API.

        `refused` is told the code of a request that was not accepted, unless the serving side refused it, which
        counts for itself.
        """
        self._decoder = BodyDecoder(kind)
        self._prefix = prefix
        self._understand = understand
        self._make_format = make_format
        self._context = context
        self._settings = settings
        self._stalls = stalls
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = self._context.new_id(self._prefix)
        headers = {REQUEST_ID: response_id(Headers(scope=scope), own)}
        serving = _Serving(self, own, headers, scope, send)
        try:
            body = await read_body(scope, receive, self._settings.max_body_bytes)
            request = await self._decoder.decode_aside(body, own)
            del body
            if (tenant := tenant_of(scope)) is not None:
                request.user = tenant  # what a client says of itself counts only where there are no keys
            await while_connected(receive, serving.run(request), serving.cancel)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # The server gives its connections up; this task ends here in any case, but not without a word.
            await serving.farewell()
        except ApiError as error:
            if not serving.accepted and not isinstance(error.__cause__, Refusal):
                self._refused(error.code or "other")
            await send_error(error, headers, send)
        except Exception:
            log.exception("a request ended by an internal error", request_id=own)
            internal = ApiError(500, "An internal error ended the request.", code="internal_error")
            await send_error(internal, headers, send)

    async def prepare(self, request: R, own: str) -> tuple[Run, Format]:
        """A submitted run and the form of its answer. Raises ApiError."""
        try:
            order = await self._understand(request, own, self._context)
            run = Run(order)
            run.submit(self._context.service)
        finally:
            self._context.leave_place(own)
        return run, self._make_format(order, self._context.text.tokenizer)

    @property
    def most_unsent(self) -> int:
        """Bytes of a stream that may wait for their reader."""
        return self._settings.most_unsent

    @property
    def stalls(self) -> StallGuard:
        """Who watches for clients that do not read."""
        return self._stalls


class _Serving(Generic[R]):
    """One request to its answer's end."""

    def __init__(
        self, endpoint: GenerationEndpoint[R], own: str, headers: dict[str, str], scope: Scope, send: Send
    ) -> None:
        self._endpoint = endpoint
        self._own = own
        self._headers = headers
        self._scope = scope
        self._handle = handle_of(scope)
        self._send = WatchedSend(send, self._handle, endpoint.most_unsent, self._cut)
        self._run: Run | None = None

    @property
    def accepted(self) -> bool:
        """The serving side took it."""
        return self._run is not None

    def cancel(self) -> None:
        """The client is gone."""
        if self._run is not None:
            self._run.cancel()

    async def run(self, request: R) -> None:
        """Serve it. Raises ApiError while nothing has been sent."""
        self._run, form = await self._endpoint.prepare(request, self._own)
        try:
            if self._run.order.shown.stream:
                if self._handle is not None:
                    self._handle.allow_unsent(self._endpoint.most_unsent)
                await send_stream(self._run, form, self._headers, self._scope, self._send)
            else:
                await send_whole(self._run, form, self._headers, self._send)
        finally:
            self._run.cancel()  # whatever way this ends, nothing runs on for nobody

    async def farewell(self) -> None:
        """Tell the client that the server ends the request, if it reads."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                if not self._send.started:
                    await send_error(_SHUTTING_DOWN, self._headers, self._send)
                elif not self._send.ended:
                    await fail_stream(_SHUTTING_DOWN, self._scope, self._send)

    def _cut(self) -> None:
        self.cancel()
        if self._handle is not None:
            self._endpoint.stalls.cut(self._handle, "buffer")
