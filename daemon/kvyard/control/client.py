"""Blocking client of the control socket, for the CLI and for scripts.

Plain sockets and msgspec alone: importing asyncio would cost more than a whole `kvyard status`.

    with Client(client_socket()) as client:
        status = client.status()
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import msgspec

from kvyard.control.schema import PROTOCOL, ErrorBody, Event, Hello, Request, Response, Status

MAX_REPLY = 256 << 20
"""Longest line taken from the daemon, in bytes; a dump of a long queue is the largest there is."""

Json: TypeAlias = Any
"""A decoded JSON value; which one is the method's business (schema.METHODS)."""

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Hello | Response | Event] = msgspec.json.Decoder(Hello | Response | Event)


class ControlError(Exception):
    """The daemon refused, or the conversation failed: what happened, what it means, what to do."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    @classmethod
    def of(cls, body: ErrorBody) -> ControlError:
        """The error that a response carried."""
        return cls(body.code, body.message, body.hint)


class NotRunning(ControlError):
    """Nobody answers at the socket."""

    def __init__(self, path: Path, why: str = "") -> None:
        super().__init__(
            "not-running",
            f"no daemon answers at {path}{f' ({why})' if why else ''}",
            "start one with `kvyard serve`, or name its socket with --socket or KVYARD_SOCKET",
        )


def decode_line(line: bytes | bytearray | memoryview) -> Hello | Response | Event:
    """One line from the daemon. Raises ControlError when it is not of this protocol."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise ControlError(
            "protocol", f"the daemon sent a line that this client does not know: {error}", "use the same version"
        ) from error


def check_hello(message: Hello | Response | Event) -> Hello:
    """The greeting, if it is one and of this protocol. Raises ControlError."""
    if isinstance(message, Response) and message.error is not None:
        raise ControlError.of(message.error)
    if not isinstance(message, Hello):
        raise ControlError("protocol", "this socket does not greet as a kvyard daemon does", "check --socket")
    if message.protocol != PROTOCOL:
        raise ControlError(
            "protocol",
            f"the daemon ({message.version}) speaks control protocol {message.protocol}, this client {PROTOCOL}",
            "use the client of the daemon's version",
        )
    return message


def encode_request(number: int, method: str, params: Mapping[str, Json] | None) -> bytes:
    """A request as one line."""
    return _encoder.encode(Request(number, method, dict(params or {}))) + b"\n"


class Client:
    """One connection. Calls raise ControlError (NotRunning when nobody is there or the daemon goes away)."""

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        """Connect and read the greeting; `timeout` in seconds bounds every wait unless a call sets its own."""
        self.path = path
        self.timeout = timeout
        self.before_wait: Callable[[int], None] = lambda descriptor: None
        """Called with the socket's descriptor before each wait for the daemon; what it raises passes through."""
        self._buffer = bytearray()
        self._scanned = 0
        self._number = 0
        self._socket = _connect(path, timeout)
        try:
            self.hello = check_hello(self._receive(timeout))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; safe to call twice."""
        self._socket.close()

    def server_pid(self) -> int:
        """Process id of whoever listens, as the kernel knows it."""
        ucred = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", ucred)[0]
        return pid

    def call(self, method: str, params: Mapping[str, Json] | None = None, timeout: float | None = None) -> Json:
        """The result of a method; `timeout` in seconds, the client's own when None."""
        number = self._send(method, params)
        while True:
            message = self._receive(timeout or self.timeout)
            if isinstance(message, Response):
                return _result(message, number)

    def stream(
        self, method: str, params: Mapping[str, Json] | None = None, timeout: float | None = None
    ) -> Iterator[Event | Json]:
        """Events of a call as they come, and its result as the last item. `timeout` bounds each wait."""
        number = self._send(method, params)
        while True:
            message = self._receive(timeout)
            if isinstance(message, Event):
                yield message
            elif isinstance(message, Response):
                yield _result(message, number)
                return

    def subscribe(self, topics: list[str], interval: float = 1.0) -> Iterator[Event]:
        """Events without end; `interval` in seconds between status events."""
        self.call("subscribe", {"topics": topics, "interval": interval})
        while True:
            message = self._receive(None)
            if isinstance(message, Event):
                yield message

    def status(self) -> Status:
        """What the first screen shows."""
        return msgspec.convert(self.call("status"), Status)

    def _send(self, method: str, params: Mapping[str, Json] | None) -> int:
        self._number += 1
        self._socket.settimeout(self.timeout)
        try:
            self._socket.sendall(encode_request(self._number, method, params))
        except TimeoutError as error:
            raise self._silent(self.timeout) from error
        except (BrokenPipeError, ConnectionResetError):
            # The daemon may have said why before it hung up: its last line is still to be read.
            return self._number
        return self._number

    def _receive(self, timeout: float | None) -> Hello | Response | Event:
        """The next line; None waits without end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (end := self._buffer.find(b"\n", self._scanned)) < 0:
            self._scanned = len(self._buffer)
            if self._scanned > MAX_REPLY:
                raise ControlError("too-large", f"the daemon's answer is longer than {MAX_REPLY} bytes")
            self._buffer += self._read(deadline, timeout)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._scanned = 0
        return decode_line(line)

    def _read(self, deadline: float | None, timeout: float | None) -> bytes:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
        self._socket.settimeout(left)
        self.before_wait(self._socket.fileno())
        try:
            data = self._socket.recv(1 << 18)
        except TimeoutError as error:
            raise self._silent(timeout or 0.0) from error
        except ConnectionResetError:
            data = b""
        if not data:
            raise NotRunning(self.path, "it closed the connection")
        return data

    def _silent(self, timeout: float) -> ControlError:
        return ControlError(
            "timeout",
            f"the daemon at {self.path} did not answer within {timeout:g} s",
            "it may be overloaded or stopped; look at its log",
        )


def _connect(path: Path, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise unreachable(path, error) from error
    return connection


def unreachable(path: Path, error: OSError) -> ControlError:
    """Why a connection could not be made, for a person."""
    if isinstance(error, PermissionError):
        return ControlError(
            "forbidden",
            f"you may not open the control socket {path}",
            "ask for membership of the socket's group, or use sudo",
        )
    if isinstance(error, FileNotFoundError):
        return NotRunning(path)
    if isinstance(error, ConnectionRefusedError):
        return NotRunning(path, "a left-over socket file")
    return NotRunning(path, error.strerror or str(error))


def _result(response: Response, number: int) -> Json:
    if response.error is not None:
        raise ControlError.of(response.error)
    if response.id != number:
        raise ControlError("protocol", f"the daemon answered request {response.id} instead of {number}")
    return response.result
