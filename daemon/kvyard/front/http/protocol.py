"""uvicorn's HTTP protocol, with a handle on each request's connection that ASGI itself does not give."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvyard.front.http.connection import EXTENSION

KEEP_ALIVE_S: Final = 75
"""Longer than clients and proxies keep idle connections, so that it is they who close them, without a race."""


class _Handle:
    """`ConnectionHandle` of one connection."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol

    def abort(self) -> None:
        self._protocol.transport.abort()

    def close_after_response(self) -> None:
        self._protocol.cycle.keep_alive = False


class ConnectionProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose scopes carry a `ConnectionHandle`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as its parent has it
        super().connection_made(transport)
        self._extensions: dict[str, Any] = {EXTENSION: _Handle(self)}

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
