"""Leaving when told to from outside: in order while the terminal is there, and in any case soon."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

GRACE = 2.0
"""Seconds in which the terminal can be restored."""


@contextlib.contextmanager
def leaving_on_signals(leave: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGHUP call `leave`; a process that is still there after GRACE is ended by SIGALRM.

    When the terminal is gone Textual's writer thread ends and its main thread waits for it for ever, so
    leaving in order may never come to an end. Handlers of asyncio would not run then; these do.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, GRACE)
        leave()

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
