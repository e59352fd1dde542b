"""Collects garbage under the timer of the guard, and tells who is to blame for what its end did."""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from kvyard.core.remains import Blame, Collection, Remains, Suspect, culprit
from kvyard.core.timed import PolicyTimeout, Timed, time_spent
from kvyard.policy.base import Kind, Policy

K = TypeVar("K")
FAST_TICK_NS = 200_000
"""Interval of the timer once what was left behind is over its limit."""
MAX_TEXT = 8192
"""Characters kept of a traceback."""
MAX_UNRAISED = 16
"""Exceptions in finalizers that are kept of one collection."""
LEFT = "code that it left behind (__del__, or a callback of a weak reference)"


class Collector:
    """Brings about the end of `remains`. The limits of one call are for all of its code together."""

    def __init__(self, timed: Timed, remains: Remains) -> None:
        self._timed = timed
        self._remains = remains

    def collect(
        self, called: list[Suspect[K]], known_as: Callable[[Kind, Policy], K], stepped: bool
    ) -> Blame[K] | None:
        """Who is to blame, nobody where no harm was done. `called` are those of others that are called at present.

        `known_as` and `stepped` as for `Guard.collect`.
        """
        timed = self._timed
        leavers = [
            Suspect(one.kind, type(one.policy), known_as(one.kind, one.policy))
            for one in reversed(self._remains.left)
        ]
        suspects = [*called, *leavers]
        limits = timed.budget.hard_ns, timed.budget.wall_ns
        collection: Collection[K] = Collection(
            timed.cpu_ns, timed.clock_ns, tick_ns=timed.budget.tick_ns, limits_ns=limits, stepped=stepped
        )
        if not suspects and not self._remains:
            collection.run(self._remains, leavers)
            return None
        unraised: deque[Any] = deque(maxlen=MAX_UNRAISED)
        hook, sys.unraisablehook = sys.unraisablehook, unraised.append
        try:
            self._run(collection, leavers)
        finally:
            sys.unraisablehook = hook
        breach, ticks, timed.ticks = timed.containment.breach(True), timed.ticks, 0
        with timed.armed():
            timed.begin(False)
            trace = timed.protected(partial(_told, unraised, hook, collection.stack)) or ""
            timed.protected(unraised.clear)
        if ticks:
            origin, code, what = collection.origin, "timeout", self._too_long(collection)
        elif breach is not None:
            origin, code, what = breach.origin, breach.code, f"the policy {breach.what} in {LEFT}"
        else:
            return None
        found = collection.suspect or culprit(origin, suspects)
        return None if found is None else Blame(found.kind, found.known_as, code, what, trace)

    def _run(self, collection: Collection[K], leavers: list[Suspect[K]]) -> None:
        timed, containment = self._timed, self._timed.containment
        every_ns = timed.budget.tick_ns

        def tick(frame: FrameType | None) -> None:
            if timed.inside and collection.over(frame):
                timed.ticks += 1
                if timed.ticks == 1:  # there may be thousands more of its kind, and each takes a tick
                    timed.timer.arm(tick, FAST_TICK_NS, FAST_TICK_NS)
                timed.escalate(frame)  # from the first tick on: nothing here is anybody's to handle
                raise PolicyTimeout

        containment.open()
        timed.timer.arm(tick, every_ns, every_ns)
        try:
            try:
                timed.inside = containment.active = True
                collection.run(self._remains, leavers)
            finally:
                timed.inside = containment.active = False
        except BaseException:  # a tick that came while no code of a policy's ran
            timed.inside = containment.active = False
        finally:
            timed.timer.disarm()
            containment.close()
            if timed.ticks:
                sys.settrace(None)

    def _too_long(self, collection: Collection[Any]) -> str:
        taken = time_spent(collection.cpu_ns, collection.wall_ns)
        return f"{LEFT} was not done within {self._timed.budget.limits}, and was ended after {taken}"


def _told(unraised: Iterable[Any], hook: Callable[[Any], Any], stack: traceback.StackSummary | None) -> str:
    """The place of the first that the guard raised, or `stack`; what was raised otherwise is told as ever."""
    ours = "" if stack is None else "".join(stack.format())[-MAX_TEXT:]
    for args in unraised:
        if issubclass(args.exc_type, Exception):
            hook(args)
        else:
            lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback, limit=-20)
            ours = ours or "".join(lines)[-MAX_TEXT:]
    return ours
