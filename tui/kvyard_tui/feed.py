"""Keeps a Yard up to date over the control socket: connects, subscribes, polls, and does so again for ever.

The watching connection lowers itself to viewer at once, so nothing on it can change the daemon; what the
operator does goes over connections of its own (`operate`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from kvyard.control.client import ControlError
from kvyard.control.schema import Event, RequestPage, Status

from kvyard_tui.connection import CALL_TIMEOUT, Connection
from kvyard_tui.model import Step, Yard

T = TypeVar("T")

INTERVAL = 0.5
"""Seconds between status events asked for."""
POLL = 1.0
"""Seconds between two lists of requests."""
MOST_ROWS = 500
SILENCE = 10.0
"""Seconds without a status after which a connection counts as dead."""
BACK_OFF = (0.2, 0.5, 1.0, 2.0)
"""Seconds to wait before each try; the last one for ever."""


class Feed:
    """Run `run` as a task; `changed` is called after every change of the yard."""

    def __init__(self, path: Path, yard: Yard, changed: Callable[[], None], interval: float = INTERVAL) -> None:
        self.path = path
        self.yard = yard
        self.changed = changed
        self.interval = interval

    async def run(self) -> None:
        """Until cancelled."""
        tries = 0
        while True:
            seen = self.yard.status_at
            try:
                problem = await self._session()
            except ControlError as error:
                problem = error
            tries = tries + 1 if self.yard.status_at == seen else 0
            delay = BACK_OFF[min(tries, len(BACK_OFF) - 1)]
            self.yard.lost(problem.message, time.monotonic() + delay)
            self.changed()
            await asyncio.sleep(delay)

    async def _session(self) -> ControlError:
        """One connection from its greeting to its end; why it ended."""
        connection = await Connection.open(self.path, self._on_event)
        try:
            if connection.hello.role != "viewer":
                await connection.call("lower", object, {"role": "viewer"})
            await self._start(connection)
            await self._poll(connection)
            return connection.problem
        finally:
            await connection.close()

    async def _start(self, connection: Connection) -> None:
        status = await connection.call("status", Status)
        self.yard.connected(connection.hello)
        self.yard.saw_status(status, time.monotonic())
        self.yard.saw_log(await connection.call("events", list[Event], {"limit": 100}))
        topics = {"topics": ["status", "events", "steps"], "interval": self.interval}
        await connection.call("subscribe", object, topics)
        self.changed()

    async def _poll(self, connection: Connection) -> None:
        """Lists of requests until the connection ends; the next is asked for when the last has come."""
        while not connection.closed.is_set():
            self.yard.saw_requests(await connection.call("requests", RequestPage, {"limit": MOST_ROWS}))
            self.changed()
            if (self.yard.age(time.monotonic()) or 0.0) > SILENCE:
                raise ControlError("timeout", f"the daemon has sent no status for {SILENCE:.0f} s")
            try:
                async with asyncio.timeout(POLL):
                    await connection.closed.wait()
            except TimeoutError:
                continue

    def _on_event(self, event: Event) -> None:
        """Called from the reader: a newer status replaces the older, so nothing can pile up.

        Raises msgspec.ValidationError, which ends the connection with a reason.
        """
        if event.topic == "status":
            self.yard.saw_status(msgspec.convert(event.data, Status), time.monotonic())
        elif event.topic == "steps":
            step = msgspec.convert(event.data, Step)
            if not step.preempted:
                return  # most steps take nothing from anybody, and there may be hundreds a second
            self.yard.saw_step(step)
        else:
            self.yard.saw_event(event)
        self.changed()


async def operate(
    path: Path, method: str, result: type[T], params: Mapping[str, Any], limit_s: float = CALL_TIMEOUT
) -> T:
    """One call on a connection of its own, with the full role of this user. Raises ControlError."""
    connection = await Connection.open(path)
    try:
        return await connection.call(method, result, params, limit_s)
    finally:
        await connection.close()
