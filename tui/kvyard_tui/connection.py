"""One connection to the control socket: calls matched by id, subscribed events handed on as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from kvyard.control.client import (
    MAX_REPLY,
    ControlError,
    NotRunning,
    check_hello,
    decode_line,
    encode_request,
    unreachable,
)
from kvyard.control.schema import Event, Hello, Response

T = TypeVar("T")

CONNECT_TIMEOUT = 5.0
CALL_TIMEOUT = 10.0
SWAP_TIMEOUT = 120.0
"""A swap is checked, adopted and committed before it is answered."""


def no_event(event: Event) -> None:
    """For connections that subscribe to nothing."""


class Connection:
    """An open connection, made by `open`; `closed` is set when either side has ended it.

    Every failure is a ControlError: NotRunning when the daemon went away, else what it answered.
    """

    def __init__(
        self,
        path: Path,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        hello: Hello,
        on_event: Callable[[Event], None],
    ) -> None:
        self.path = path
        self.hello = hello
        self.closed = asyncio.Event()
        self.problem: ControlError = NotRunning(path, "it closed the connection")
        self._reader, self._writer = streams
        self._on_event = on_event
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._last = 0
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, path: Path, on_event: Callable[[Event], None] = no_event) -> Connection:
        """Connect and read the greeting. Raises ControlError."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                streams = await asyncio.open_unix_connection(path, limit=MAX_REPLY)
                try:
                    hello = await _greeting(path, streams[0])
                except BaseException:
                    streams[1].close()
                    raise
        except TimeoutError:
            raise ControlError(
                "timeout", f"the daemon at {path} did not greet within {CONNECT_TIMEOUT:.0f} s"
            ) from None
        except OSError as error:
            raise unreachable(path, error) from None
        return cls(path, streams, hello, on_event)

    async def call(
        self, method: str, result: type[T], params: Mapping[str, Any] | None = None, limit_s: float = CALL_TIMEOUT
    ) -> T:
        """The result of a method, waited for at most `limit_s` seconds. Raises ControlError."""
        if self.closed.is_set():
            raise self.problem
        self._last += 1
        number = self._last
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(encode_request(number, method, params))
                await self._writer.drain()
                response = await answer
        except TimeoutError:
            raise ControlError("timeout", f"the daemon did not answer {method} within {limit_s:.0f} s") from None
        except OSError as error:
            raise NotRunning(self.path, error.strerror or str(error)) from None
        finally:
            self._waiting.pop(number, None)
        if response.error is not None:
            raise ControlError.of(response.error)
        return _as(response.result, result, method)

    async def close(self) -> None:
        """End the connection; pending calls raise."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                self._take(decode_line(line))
        except ControlError as error:
            self.problem = error
        except ValueError as error:  # a line beyond MAX_REPLY, or a status that is none (msgspec's are ValueErrors)
            self.problem = ControlError("protocol", f"what the daemon sent was not understood: {error}")
        except OSError as error:
            self.problem = NotRunning(self.path, error.strerror or str(error))
        finally:
            self.closed.set()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(self.problem)

    def _take(self, item: Hello | Response | Event) -> None:
        if isinstance(item, Event):
            self._on_event(item)
        elif isinstance(item, Response):
            answer = self._waiting.get(item.id)
            if answer is not None and not answer.done():
                answer.set_result(item)


async def _greeting(path: Path, reader: asyncio.StreamReader) -> Hello:
    try:
        line = await reader.readline()
    except ValueError:
        raise ControlError("protocol", "this socket does not greet as a kvyard daemon does") from None
    if not line:
        raise NotRunning(path, "it closed the connection")
    return check_hello(decode_line(line))


def _as(value: object, wanted: type[T], method: str) -> T:
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        raise ControlError("protocol", f"the answer to {method} was not understood: {error}") from None
