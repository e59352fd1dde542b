"""The HTTP listener: a socket bound before anything slow is started, served by uvicorn on the daemon's loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from kvyard.front.http.protocol import KEEP_ALIVE_S, counting


class ListenError(Exception):
    """The address cannot be listened on; the text says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ListenError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ListenError(f"{host!r} is not an address of this machine: {error.strerror}") from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ListenError(_why(host, port, error)) from None
    sock.setblocking(False)
    return sock


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; stop the other program or choose one with --port (0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def address_of(sock: socket.socket) -> str:
    """The socket's address as a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Signals belong to the daemon: it drains before the server may stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class HttpServer:
    """Serves an application on a bound socket until told to stop."""

    def __init__(
        self,
        app: Starlette,
        sock: socket.socket,
        *,
        refused: Callable[[str], None] = lambda code: None,
        goodbye_s: float = 5.0,
    ) -> None:
        """`refused` is told the code of every answer to what never reached the application."""
        self.stopped = asyncio.Event()
        """All responses have ended."""
        self._sock = sock
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="none",
                http=counting(refused),
                timeout_keep_alive=KEEP_ALIVE_S,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(goodbye_s),
                backlog=2048,
            )
        )

    async def serve(self) -> None:
        """Serve until `stop`."""
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            self.stopped.set()

    def stop(self, *, force: bool = False) -> None:
        """Finish the responses under way, for a few seconds at most; `force` drops them."""
        self._server.should_exit = True
        self._server.force_exit = self._server.force_exit or force
