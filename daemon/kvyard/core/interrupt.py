"""The interval timer of the engine's main thread: SIGALRM, armed around the policy calls of a step.

Arming and disarming cost 0.9 us together. Python runs signal handlers in the main thread only, between
bytecodes, so any Python code can be ended this way, and C code that checks for signals too.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C module has no stub
import signal
import threading
from collections.abc import Callable
from types import FrameType

NS = 1e-9
ALARM = int(signal.SIGALRM)
ONLY_ALARM = (ALARM,)


class SignalTimer:
    """A `kvyard.core.timed.Timer`. Raises RuntimeError outside the main thread. One per process."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the guard's timer works in the main thread only; run the step loop there")
        self._tick: Callable[[FrameType | None], None] | None = None
        self._every_ns = 0
        self._handler = self._on_alarm  # bound once, so that identity tells whether it is still in place
        signal.signal(signal.SIGALRM, self._handler)
        # Blocking calls of the engine must not fail because a late tick came in.
        signal.siginterrupt(signal.SIGALRM, False)

    def arm(self, tick: Callable[[FrameType | None], None], first_ns: int, every_ns: int) -> None:
        """Call `tick` after `first_ns`, then every `every_ns`."""
        self._tick, self._every_ns = tick, every_ns
        signal.setitimer(signal.ITIMER_REAL, first_ns * NS, every_ns * NS)

    def disarm(self) -> None:
        """No more ticks."""
        self._tick = None
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def restore(self) -> str:
        """Put right what somebody did to the timer; what that was, empty when nothing."""
        what = ""
        # The C functions: those of `signal` make enumerations of their results and cost five times as much,
        # and this runs after every call of a policy.
        if _signal.getsignal(ALARM) is not self._handler:
            what = "replaced the handler of the guard's timer"
            _signal.signal(ALARM, self._handler)  # that of `signal` asks the old one whether it equals a constant
        if self._tick is not None and not _signal.getitimer(_signal.ITIMER_REAL)[1]:
            what = what or "switched the guard's timer off"
            signal.setitimer(signal.ITIMER_REAL, self._every_ns * NS, self._every_ns * NS)
        if ALARM in _signal.pthread_sigmask(_signal.SIG_UNBLOCK, ONLY_ALARM):
            what = what or "blocked the signal of the guard's timer"
        return what

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._tick is not None:
            self._tick(frame)
