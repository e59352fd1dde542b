"""Code that is not ours, run within limits of time.

Time is bounded by an interval timer that the engine arms around the policy calls of a step. Its tick ends a
call that has used too much CPU time (a busy machine is not the policy's fault) or far too much wall time
(sleeping is). Code that swallows the exception is ended by escalation: from the third tick a trace function
raises in every frame of the policy, so each tick peels one level off. A function that enters such code is
marked as a `boundary`: its frame, and those around it, are ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, TypeVar, cast

from kvyard.core.containment import Containment, NoContainment

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Timer(Protocol):
    """Interrupts the calling thread at intervals while armed; a no-op where nothing can hang for long."""

    def arm(self, tick: Callable[[FrameType | None], None], first_ns: int, every_ns: int) -> None:
        """Call `tick` with the interrupted frame after `first_ns`, then every `every_ns`; it may raise."""

    def disarm(self) -> None:
        """No more ticks; safe to call when not armed."""


class NoTimer:
    """For the simulator and for tests: nothing is interrupted."""

    def arm(self, tick: Callable[[FrameType | None], None], first_ns: int, every_ns: int) -> None:
        """Do nothing."""

    def disarm(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one call into a policy may cost, in nanoseconds of this thread's CPU time unless said otherwise."""

    soft_ns: int = 2_000_000
    soft_overruns: int = 20
    """Calls over the soft budget, among the last `soft_window`, that put the policy out."""
    soft_window: int = 100
    hard_ns: int = 50_000_000
    wall_ns: int = 500_000_000
    """Wall time: for a policy that sleeps or waits."""
    tick_ns: int = 10_000_000
    """Interval of the timer once a call is over its budget."""
    escalate_tick: int = 3
    loading_cpu_ns: int = 5_000_000_000
    """To import and construct a candidate, once, while the streams stand still."""
    loading_wall_ns: int = 10_000_000_000

    @property
    def limits(self) -> str:
        """Of one call, in words."""
        return f"{self.hard_ns / 1e6:g} ms of CPU time or {self.wall_ns / 1e6:g} ms"


MOST_BETWEEN_TICKS_NS = 100_000_000
"""Wall time that counts between two ticks: a process that was stopped, or had no processor, got none meanwhile, and
its policies are not to blame. It is more than passes until the first tick.
"""


def time_spent(cpu_ns: int, wall_ns: int) -> str:
    """What a call took until it was ended, in words."""
    return f"{cpu_ns / 1e6:.0f} ms of CPU time and {wall_ns / 1e6:.0f} ms by the clock"


class PolicyTimeout(BaseException):
    """Raised by the timer inside a policy's code; not an Exception, so that `except Exception` lets it pass."""


_boundaries: set[CodeType] = set()


def boundary(function: F) -> F:
    """Mark a function that enters code that is not ours."""
    _boundaries.add(cast(FunctionType, function).__code__)
    return function


class Timed:
    """The timer, and the call that it times. `clock_ns` is wall time, `cpu_ns` this thread's CPU time."""

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int],
        cpu_ns: Callable[[], int] = lambda: 0,
        timer: Timer | None = None,
        containment: Containment | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.budget = budget or Budget()
        self.clock_ns = clock_ns
        self.cpu_ns = cpu_ns
        self.timer = timer or NoTimer()
        self.containment = containment or NoContainment()
        self.inside = False
        """Code that is not ours runs at this moment: a tick may end it."""
        self.ticks = 0
        """Ticks that came too late for the call under way."""
        self._started_wall = self._started_cpu = 0
        self._armed = self._timed = self._confined = False
        self._armed_wall = self._armed_cpu = 0
        self._seen_call = self._last_tick = self._stood_still = 0
        self._most_between = MOST_BETWEEN_TICKS_NS
        self._cpu_limit, self._wall_limit = self.budget.hard_ns, self.budget.wall_ns

    # ---- a window of calls ----------------------------------------------------------------------------------

    def arm(self) -> bool:
        """Open a window of policy calls; False when one is open already, and then somebody else closes it.

        The timer itself starts with the first call: in most steps that only decode, no policy is asked.
        """
        if self._armed:
            return False
        self._armed = True
        return True

    def disarm(self) -> None:
        """No more ticks."""
        if self._timed:
            self.timer.disarm()
        if self._confined:
            self.containment.close()
        self._armed = self._timed = self._confined = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Arm the timer around policy calls; nests."""
        mine = self.arm()
        try:
            yield
        finally:
            if mine:
                self.disarm()

    def begin(self, foreign: bool) -> None:
        """Calls begin; of somebody else's code (`foreign`), what it does to the process is watched."""
        if not self._armed:
            self._started_cpu = self.cpu_ns()
            if foreign:
                self.containment.look()
            return
        if not self._timed:
            self._timed = True
            self._armed_wall, self._armed_cpu = self.clock_ns(), self.cpu_ns()
            self.timer.arm(self.tick, self.budget.hard_ns, self.budget.tick_ns)
        if foreign and not self._confined:
            self._confined = True
            self.containment.open()

    def cpu_spent(self) -> int:
        """CPU time of the call under way or just over, at least.

        Read once per window instead of once per call (the thread's CPU clock is a system call): whatever ran
        between the two was no more CPU time than wall time.
        """
        if not self._timed:
            return self.cpu_ns() - self._started_cpu
        return self.cpu_ns() - self._armed_cpu - (self._started_wall - self._armed_wall)

    # ---- ticks ----------------------------------------------------------------------------------------------

    def tick(self, frame: FrameType | None) -> None:
        """The timer's tick: end the call under way if it is over its budget."""
        if not self.inside:
            return
        over_cpu = self.cpu_spent() > self._cpu_limit
        if self._waited() <= self._wall_limit and not over_cpu:
            return
        self.ticks += 1
        if self.ticks >= self.budget.escalate_tick:
            self.escalate(frame)
        raise PolicyTimeout

    def _waited(self) -> int:
        """Wall time of the call under way, without what the process stood still: no tick came then."""
        now = self.clock_ns()
        if self._seen_call != self._started_wall:
            self._seen_call = self._last_tick = self._started_wall
            self._stood_still = 0
        self._stood_still += max(0, now - self._last_tick - self._most_between)
        self._last_tick = now
        return now - self._started_wall - self._stood_still

    def escalate(self, frame: FrameType | None) -> None:
        """Raise again in whatever code handles the exception that is about to be raised."""
        seen = False

        def trace(frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ANN401 - the interpreter's protocol
            nonlocal seen
            if not self.inside:
                return None
            if event == "exception" and issubclass(arg[0], PolicyTimeout):
                seen = True
            elif seen and event in ("line", "call"):
                raise PolicyTimeout
            return trace

        while frame is not None and frame.f_code not in _boundaries:
            frame.f_trace = trace
            frame = frame.f_back
        containment, active = self.containment, self.containment.active
        containment.active = False  # a policy may not do this
        sys.settrace(trace)
        containment.active = active

    def calm(self) -> None:
        """Forget the ticks of the call that ended."""
        if self.ticks >= self.budget.escalate_tick:
            sys.settrace(None)

    @boundary
    def protected(self, make: Callable[[], T | None]) -> T | None:
        """What `make` makes, None when it fails: for what follows a call and runs code of the policy's, too."""
        self._started_cpu, self._started_wall = self.cpu_ns(), self.clock_ns()
        containment = self.containment
        try:
            try:
                self.inside = containment.active = True
                return make()
            finally:
                self.inside = containment.active = False
        except BaseException:  # nothing the policy's exception does may leave the guard
            self.inside = containment.active = False
            return None
        finally:
            self.calm()
            self.ticks = 0
            containment.noticed = None  # it is put out anyhow
