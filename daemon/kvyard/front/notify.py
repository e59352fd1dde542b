"""Telling the service manager how we are: systemd's notify protocol (sd_notify(3)), without a dependency.

READY=1 is sent when an engine serves, not before; WATCHDOG=1 only while the daemon makes progress: the
front's loop runs (or this would not be called) and the engine is not in a phase for longer than it may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping


class Notifier:
    """Sends datagrams to $NOTIFY_SOCKET; does nothing where there is none."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog_s = _watchdog(environ)
        """Seconds within which a ping is expected; None where nobody watches."""
        self._late: dict[str, str | int] = {}
        """What the manager's full queue did not take; the next message carries it."""

    def send(self, **fields: str | int) -> None:
        """Send `FIELD=value` lines; a manager that is gone is no reason to fail, a busy one none to wait."""
        if self._address is None:
            return
        fields = {**self._late, **fields}
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        self._late = {}
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            try:
                sock.sendto(text.encode(), self._address)
            except BlockingIOError:
                # A ping says how we are now, so that a late one would be a lie.
                self._late = {name: value for name, value in fields.items() if name != "WATCHDOG"}

    async def watch(self, alive: Callable[[], bool], status: Callable[[], str]) -> None:
        """Ping at a third of the interval for as long as `alive` says so; runs until cancelled."""
        if self._address is None:
            return
        interval = self.watchdog_s / 3 if self.watchdog_s is not None else 10.0
        last = ""
        while True:
            if self.watchdog_s is not None and alive():
                self.send(WATCHDOG=1)
            if (text := status()) != last:
                last = text
                self.send(STATUS=text)
            elif self._late:
                self.send()
            await asyncio.sleep(interval)


def _address(text: str) -> str | None:
    # `@` stands for the abstract namespace, whose names begin with a NUL.
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else None


def _watchdog(environ: Mapping[str, str]) -> float | None:
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6
