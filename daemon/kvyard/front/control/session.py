"""One control connection: reads requests, runs them side by side, writes answers and events.

What a peer can cost is bounded: the length of a line, the calls in flight, the bytes waiting to be written.
Events to a slow reader are dropped and counted; a reader that takes no answer at all is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import structlog

from kvyard.control.schema import MAX_LINE, PROTOCOL, ErrorBody, Event, Hello, Request, Response, Role
from kvyard.front.control.methods import BY_NAME, HANDLERS, MUTATIONS, Topic, parse
from kvyard.front.control.peer import RANK
from kvyard.front.control.steps import step_data
from kvyard.front.operations import OperationError, Operations, Who
from kvyard.front.repeated import repeated_name

IN_FLIGHT = 16
"""Calls of one session that run at once; further lines wait unread."""
EVENT_BACKLOG = 1 << 20
"""Unwritten bytes above which events are dropped."""
STALL_TIMEOUT = 30.0
"""Seconds that an answer may wait for its reader."""
HANG_UP_POLL = 0.1
"""Seconds between two looks whether a peer that sends no more still listens."""
LINGER = 1.0
"""Seconds in which the rest of an over-long line is read away, so that the peer gets to see the error."""

LONG = MUTATIONS | {"generate"}
"""Calls that may take long and run side by side; the others run one by one, each written before the next."""

_log = structlog.get_logger("kvyard.control")
_encoder = msgspec.json.Encoder()
_requests = msgspec.json.Decoder(Request)


class Session:
    """Runs until the peer goes, misbehaves or `close` is called."""

    def __init__(
        self,
        operations: Operations,
        who: Who,
        version: str,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keep: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`keep` takes over a mutation that is still running when the session ends."""
        self.who = who
        self._operations = operations
        self._hello = Hello(PROTOCOL, version, who.role, pid)
        self._reader = reader
        self._writer = writer
        self._keep = keep
        self._calls: dict[asyncio.Task[None], str] = {}
        self._topics: list[asyncio.Task[None]] = []
        self._places = asyncio.Semaphore(IN_FLIGHT)
        self._turn = asyncio.Lock()
        """Held until what was written is on its way, so that answers do not pile up before a slow reader."""
        self._dropped = 0

    async def run(self) -> None:
        """The whole conversation."""
        try:
            await self._write(_encoder.encode(self._hello))
            while line := await self._read_line():
                await self._places.acquire()
                task = asyncio.create_task(self._answer(line))
                self._calls[task] = ""
                task.add_done_callback(self._done)
            await self._finish_calls()
        except (OSError, TimeoutError):
            pass  # the peer is gone or takes nothing
        finally:
            self._end()

    def lower(self, role: Role) -> None:
        """Lower the session's role. Raises OperationError when that would raise it."""
        if RANK[role] > RANK[self.who.role]:
            raise OperationError(
                "forbidden", f"this session is {self.who.role}; a role is never raised", "open a new connection"
            )
        self.who = replace(self.who, role=role)

    def subscribe(self, topics: list[Topic], interval: float) -> None:
        """Replace the subscriptions; `interval` in seconds between status events."""
        for task in self._topics:
            task.cancel()
        sources = {"status": self._send_status, "steps": self._send_steps, "events": self._send_log}
        self._topics = [asyncio.create_task(sources[topic](interval)) for topic in dict.fromkeys(topics)]
        for task in self._topics:
            task.add_done_callback(_report)

    async def send(self, topic: str, data: dict[str, object]) -> None:
        """Send an event that belongs to an answer; waits for a slow reader."""
        async with self._turn:
            await self._write(_encoder.encode(Event(topic, time.time(), data)))

    async def finish(self, timeout_s: float) -> None:
        """Give calls under way that long to be answered; the server is closing."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)

    # ---- requests ------------------------------------------------------------------------------------------

    async def _read_line(self) -> bytes:
        """The next line; empty at the end or when the peer broke the rules."""
        try:
            return await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return b""
        except asyncio.LimitOverrunError:
            await self._reply(
                _error(0, "too-large", f"a line has at most {MAX_LINE} bytes", "send less; this connection ends")
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    while await self._reader.read(1 << 20):
                        pass
            return b""

    async def _answer(self, line: bytes) -> None:
        try:
            request = _requests.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            await self._reply(_error(0, "bad-request", f"this line is no request: {error}", "see method `schema`"))
            return
        if (ambiguous := _ambiguous(line)) is not None:
            await self._reply(_error(request.id, "bad-request", ambiguous, "which one was meant cannot be known"))
            return
        task = asyncio.current_task()
        if task is not None:
            self._calls[task] = request.method
        if request.method in LONG:
            await self._reply(await self._call(request))
        else:
            async with self._turn:
                await self._reply(await self._call(request), in_turn=True)

    async def _call(self, request: Request) -> Response:
        outcome = "ok"
        try:
            self._allow(request.method)
            params = parse(request.method, request.params)
            result = await HANDLERS[request.method].run(self._operations, self, params)
            response = Response(request.id, result)
        except OperationError as error:
            outcome = error.code
            response = _error(request.id, error.code, error.message, error.hint)
        except Exception as error:  # a defect of one method must not take the daemon down
            outcome = "internal"
            _log.exception("control method failed", method=request.method)
            message = f"`{request.method}` failed inside the daemon: {type(error).__name__}"
            response = _error(request.id, "internal", message, "its log has the details")
        if request.method in MUTATIONS:
            self._audit(request, outcome)
        return response

    def _allow(self, method: str) -> None:
        known = BY_NAME.get(method)
        if known is None:
            raise OperationError("unknown-method", f"there is no method {method[:100]!r}", "`schema` lists them all")
        if RANK[self.who.role] < RANK[known.role]:
            raise OperationError(
                "forbidden",
                f"`{method}` needs the role {known.role}; this session is {self.who.role}",
                "ask an administrator, or connect as the daemon's user or root",
            )

    def _audit(self, request: Request, outcome: str) -> None:
        who = {"uid": self.who.uid, "pid": self.who.pid, "user": self.who.user, "role": self.who.role}
        params = json.dumps(request.params)[:500]
        text = f"{self.who} called {request.method}: {outcome}"
        self._operations.log.add("control", text, method=request.method, params=params, who=who, outcome=outcome)
        _log.info("control", method=request.method, params=params, outcome=outcome, **who)

    async def _reply(self, response: Response, in_turn: bool = False) -> None:
        try:
            line = _encoder.encode(response)
        except (TypeError, ValueError, OverflowError):
            _log.exception("a result is no JSON")
            failed = _error(response.id, "internal", "the result cannot be sent as JSON", "its log has the details")
            line = _encoder.encode(failed)
        # A peer that is gone is noticed by the reading side, which ends the session.
        with contextlib.suppress(OSError):
            if in_turn:
                await self._write(line)
            else:
                async with self._turn:
                    await self._write(line)

    # ---- subscriptions -------------------------------------------------------------------------------------

    async def _send_status(self, interval: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                status = await self._operations.status()
                self._offer(Event("status", time.time(), msgspec.to_builtins(status)))
            except Exception:
                _log.exception("status for a subscriber failed")
            due = max(due + interval, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _send_steps(self, interval: float) -> None:
        subscription = self._operations.steps.subscribe(1024)
        try:
            async for record in subscription:
                self._dropped += subscription.dropped
                subscription.dropped = 0
                self._offer(Event("steps", time.time(), step_data(record)))
        finally:
            subscription.close()

    async def _send_log(self, interval: float) -> None:
        subscription = self._operations.log.feed.subscribe(1024)
        try:
            async for event in subscription:
                self._dropped += subscription.dropped
                subscription.dropped = 0
                self._offer(event)
        finally:
            subscription.close()

    def _offer(self, event: Event) -> None:
        """Write an event unless the reader is behind; it is told afterwards how many it missed."""
        if self._writer.is_closing() or self._backlog() > EVENT_BACKLOG:
            self._dropped += 1
            return
        if self._dropped:
            missed = Event("dropped", event.at, {"count": self._dropped})
            self._writer.write(_encoder.encode(missed) + b"\n")
            self._dropped = 0
        self._writer.write(_encoder.encode(event) + b"\n")

    # ---- writing and ending --------------------------------------------------------------------------------

    def _backlog(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    async def _write(self, line: bytes) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError  # uvloop's own is a RuntimeError, which would be taken for a defect
        self._writer.write(line + b"\n")
        try:
            async with asyncio.timeout(STALL_TIMEOUT):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise

    def _done(self, task: asyncio.Task[None]) -> None:
        self._calls.pop(task, None)
        self._places.release()
        _report(task)

    async def _finish_calls(self) -> None:
        """The peer has closed its side: answer what it asked, unless it has hung up altogether."""
        while self._calls and not self._hung_up():
            await asyncio.wait(self._calls, timeout=HANG_UP_POLL)

    def _hung_up(self) -> bool:
        connection = self._writer.get_extra_info("socket")
        if self._writer.is_closing() or connection.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(connection.fileno(), 0)  # errors and hang-ups are always reported
        return bool(poll.poll(0))

    def _end(self) -> None:
        for task in self._topics:
            task.cancel()
        for task, method in list(self._calls.items()):
            if method in MUTATIONS:
                self._keep(task)
            else:
                task.cancel()
        self._writer.close()


def _ambiguous(line: bytes) -> str | None:
    try:
        twice = repeated_name(line)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, for one
        return f"this line cannot be read: {error}"
    return None if twice is None else f"{twice[:64]!r} is given more than once in one object"


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a task of a control session failed", exc_info=error)


def _error(number: int, code: str, message: str, hint: str) -> Response:
    return Response(number, None, ErrorBody(code, message, hint))
