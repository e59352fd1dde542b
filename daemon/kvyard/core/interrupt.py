"""The interval timer of the engine's main thread: SIGALRM, armed around the policy calls of a step.

Arming and disarming cost 0.9 us together. Python runs signal handlers in the main thread only, between
bytecodes, so any Python code can be ended this way, and C code that checks for signals too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

NS = 1e-9


class SignalTimer:
    """A `kvyard.core.guard.Timer`. Raises RuntimeError outside the main thread. One per process."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the guard's timer works in the main thread only; run the step loop there")
        self._tick: Callable[[FrameType | None], None] | None = None
        signal.signal(signal.SIGALRM, self._on_alarm)
        # Blocking calls of the engine must not fail because a late tick came in.
        signal.siginterrupt(signal.SIGALRM, False)

    def arm(self, tick: Callable[[FrameType | None], None], first_ns: int, every_ns: int) -> None:
        """Call `tick` after `first_ns`, then every `every_ns`."""
        self._tick = tick
        signal.setitimer(signal.ITIMER_REAL, first_ns * NS, every_ns * NS)

    def disarm(self) -> None:
        """No more ticks."""
        self._tick = None
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def restore(self) -> bool:
        """Put the handler back if somebody replaced or blocked it; True if somebody had."""
        blocked = signal.SIGALRM in signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        replaced = signal.getsignal(signal.SIGALRM) != self._on_alarm
        if replaced:
            signal.signal(signal.SIGALRM, self._on_alarm)
        return blocked or replaced

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._tick is not None:
            self._tick(frame)
