"""The guard around every call into a policy: what it may cost, what it may return, what happens if not.

A decision is turned into plain values inside the guard, wholly, before any of it is applied, so no policy
code runs outside. Whatever a policy raises, and whatever it returns that is no decision, becomes a `Fault`;
the caller puts the policy out and asks the built-in instead.

Time is bounded by an interval timer that the engine arms around the policy calls of a step. Its tick ends a
call that has used too much CPU time (a busy machine is not the policy's fault) or far too much wall time
(sleeping is). Code that swallows the exception is ended by escalation: from the third tick a trace function
raises in every frame of the policy, so each tick peels one level off.

What a policy leaves behind has code as well (`__del__`, callbacks of weak references): the guard lets go of
exceptions and of policies that left under the same timer, and collects garbage under it (`collect`).
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

from kvyard.core.containment import Breach, Containment, NoContainment
from kvyard.core.remains import OURS, Blame, Collection, Remains, Suspect, culprit
from kvyard.policy.base import KINDS, Kind, Policy

T = TypeVar("T")
K = TypeVar("K")
FAST_TICK_NS = 200_000
"""Interval of the timer once what was left behind is over its limit."""
MAX_TEXT = 8192
"""Characters kept of a traceback or of an exception's text."""
MAX_CAUSES = 16
MAX_UNRAISED = 16
"""Exceptions in finalizers that are kept of one collection."""
LEFT = "code that it left behind (__del__, or a callback of a weak reference)"


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


class PolicyTimeout(BaseException):
    """Raised by the timer inside a policy's code; not an Exception, so that `except Exception` lets it pass."""


class Nonsense(Exception):
    """A decision that is none; `code` is machine-readable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Breached(Exception):
    """A call came back after it had done something to the process."""

    def __init__(self, breach: Breach) -> None:
        super().__init__(breach.what)
        self.breach = breach


class Fault(Exception):
    """A policy failed in a call; `code` is machine-readable, the message is for operators."""

    def __init__(self, kind: Kind, code: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code
        self.message = message
        self.trace = trace


class NotLoaded(Exception):
    """A candidate could not be loaded within its limits; `code` is machine-readable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class CallCost:
    """Calls of one kind since the last record."""

    calls: int = 0
    ns: int = 0
    overrides: dict[str, int] = field(default_factory=dict)


class Guard:
    """Calls policies. `clock_ns` is wall time, `cpu_ns` this thread's CPU time; both come from outside."""

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int],
        cpu_ns: Callable[[], int] = lambda: 0,
        timer: Timer | None = None,
        containment: Containment | None = None,
        budget: Budget | None = None,
        watch: Callable[[Kind, Policy | None, int], None] = lambda kind, policy, at: None,
    ) -> None:
        """`watch` is told which policy is entered, and None when it is left, each with the time on `clock_ns`:

        for whoever looks on from outside.
        """
        self.budget = budget or Budget()
        self.costs: dict[Kind, CallCost] = {kind: CallCost() for kind in KINDS}
        self._clock_ns = clock_ns
        self._cpu_ns = cpu_ns
        self._timer = timer or NoTimer()
        self._containment = containment or NoContainment()
        self._watch = watch
        self._known: dict[Kind, tuple[Policy, bool]] = {}
        """The policy last called of each kind, and whether it is somebody else's."""
        self._overruns: dict[Kind, deque[int]] = {kind: deque() for kind in KINDS}
        self.calls: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        """Calls of each kind since the start."""
        self.blamed: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        """Overrides of each kind since the start that speak against the policy."""
        self._inside = False
        self._started_wall = self._started_cpu = 0
        self._ticks = 0
        self._armed = self._timed = self._confined = False
        self._armed_wall = self._armed_cpu = 0
        self._cpu_limit, self._wall_limit = self.budget.hard_ns, self.budget.wall_ns
        self.remains = Remains()
        """What policies left behind, until `collect`."""

    def arm(self) -> bool:
        """Open a window of policy calls; False when one is open already, and then somebody else closes it.

        The timer itself starts with the first call: in most steps that only decode, no policy is asked.
        """
        if self._armed:
            return False
        self._armed = True
        return True

    def _start_timer(self) -> None:
        self._timed = True
        self._armed_wall, self._armed_cpu = self._clock_ns(), self._cpu_ns()
        self._timer.arm(self.tick, self.budget.hard_ns, self.budget.tick_ns)

    def disarm(self) -> None:
        """No more ticks."""
        if self._timed:
            self._timer.disarm()
        if self._confined:
            self._containment.close()
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

    def call_each(
        self, kind: Kind, policy: Policy, method: str, check: Callable[[Any], T], items: Iterable[Any]
    ) -> list[T]:
        """The checked decisions of `policy.method(item)` for each item, as one call with one budget. Raises Fault."""
        # No `cast`: it is a call, and this runs in every step in which somebody comes.
        checked: Any = check
        return self.call(kind, policy, method, checked, each=items)

    def call(
        self,
        kind: Kind,
        policy: Policy,
        method: str,
        check: Callable[[Any], T],
        *args: Any,  # noqa: ANN401 - whatever the method takes
        each: Iterable[Any] | None = None,
        by: object | None = None,
    ) -> T:
        """The checked decision of `policy.method(*args)`. Raises Fault, whatever went wrong.

        `each` is for `call_each`. `by` is whose method it is where it is not the policy's own: it runs code of the
        policy's, which answers for it.
        """
        clock, containment = self._clock_ns, self._containment
        known = self._known.get(kind)
        foreign = known[1] if known is not None and known[0] is policy else self.is_foreign(kind, policy)
        if self._armed:
            if not self._timed:
                self._start_timer()
            if foreign and not self._confined:
                self._confined = True
                containment.open()
        else:
            self._started_cpu = self._cpu_ns()
            if foreign:
                containment.look()
        self._started_wall = start = clock()
        self._watch(kind, policy, start)
        try:
            try:
                self._inside = containment.active = True
                if each is None:
                    decision = check(getattr(policy if by is None else by, method)(*args))
                else:
                    decide = getattr(policy, method)
                    decision = [check(decide(item)) for item in each]  # type: ignore[assignment]
            finally:
                # No call may stand before this line: a tick is only taken at calls and backward jumps.
                self._inside = containment.active = False
            end = clock()
            # Ours are known by their tests; a key is asked for once per request, and `examine` follows them.
            thorough = foreign and method != "key"
            if thorough or containment.noticed is not None:
                breach = containment.breach(thorough)
                if breach is not None:
                    raise Breached(breach)
        except BaseException as error:
            self._inside = containment.active = False
            self._calm()
            failed = [error]
        else:
            self._watch(kind, None, end)
            spent, cost = end - start, self.costs[kind]
            cost.calls += 1
            cost.ns += spent
            self.calls[kind] += 1
            if self._ticks or spent > self.budget.soft_ns:
                self._judge_time(kind, method)
            return decision
        # Out of the handler, so that nothing else holds the exception: its frames hold what the policy left there.
        fault = self._fault(kind, method, failed[0])
        self._protected(failed.clear)
        containment.breach(True)
        self._watch(kind, None, clock())
        raise fault

    def load(self, make: Callable[[], T]) -> T:
        """What `make` makes, which imports and constructs candidates. Raises NotLoaded; its own errors pass through.

        Not within a window of policy calls: it has the timer to itself.
        """
        budget = self.budget
        self._cpu_limit, self._wall_limit = budget.loading_cpu_ns, budget.loading_wall_ns
        self._started_cpu, self._started_wall = self._cpu_ns(), self._clock_ns()
        self._containment.look()
        self._timer.arm(self.tick, budget.loading_cpu_ns, budget.tick_ns)
        failed: list[BaseException] = []
        made: T | None = None
        try:
            try:
                self._inside = True
                made = make()
            finally:
                self._inside = False
        except BaseException as error:
            self._inside = False
            failed.append(error)
        # None where it failed: what was made until then may have left cycles behind.
        self.remains.candidates.append(made)
        self._loaded(failed)
        if failed:
            raise failed.pop()
        return cast("T", made)

    def _loaded(self, failed: list[BaseException]) -> None:
        """Loading is over: back to the limits of calls. Raises NotLoaded when it took too long or did more.

        What the frames of its failure hold, or that itself where something else is told, ends under these limits.
        """
        budget, containment = self.budget, self._containment
        self._calm()
        ticks, self._ticks = self._ticks, 0
        self._cpu_limit, self._wall_limit = budget.hard_ns, budget.wall_ns
        breach = containment.breach(True)
        if failed:
            self._timer.arm(self.tick, budget.tick_ns, budget.tick_ns)
            self._protected(partial(_clear_frames, failed[0]))
            if ticks or breach is not None:
                self._protected(failed.clear)
            breach = breach or containment.breach(True)
        self._timer.disarm()
        if ticks:
            limits = f"{budget.loading_cpu_ns / 1e9:g} s of CPU time or {budget.loading_wall_ns / 1e9:g} s"
            raise NotLoaded("timeout", f"its import and construction did not end within {limits}; nothing changed")
        if breach is not None:
            raise NotLoaded(breach.code, f"it {breach.what} while it was loaded; nothing changed")

    def is_foreign(self, kind: Kind, policy: Policy) -> bool:
        """Somebody else's, not one of those that come with kvyard."""
        known = self._known.get(kind)
        if known is None or known[0] is not policy:
            if known is not None and known[1]:
                self.remains.leave(kind, known[0])
            known = self._known[kind] = (policy, type(policy).__module__.partition(".")[0] not in OURS)
        return known[1]

    def examine(self, kind: Kind, policy: Policy) -> None:
        """Look for what many calls in a row of `kind` may have done to the process. Raises Fault."""
        if not self._confined or not self.is_foreign(kind, policy):
            return  # nothing of somebody else's ran in this window
        breach = self._containment.breach(True)
        if breach is not None:
            raise Fault(kind, breach.code, f"the policy {breach.what}")

    def settled(self) -> None:
        """The process has the settings that it keeps: what they are now is what policies must leave."""
        self._containment.look()

    def forgive(self, kind: Kind) -> None:
        """Another policy is in charge of `kind`: it starts with a clean slate."""
        self._overruns[kind].clear()

    def override(self, kind: Kind, cause: str, *, blame: bool = True) -> None:
        """The core overrode a decision of `kind`; without `blame` that says nothing against the policy."""
        self.blamed[kind] += blame
        overrides = self.costs[kind].overrides
        overrides[cause] = overrides.get(cause, 0) + 1

    def take_costs(self) -> dict[Kind, CallCost]:
        """Costs since the last call, of the kinds that have any."""
        taken = {}
        for kind, cost in self.costs.items():
            if cost.calls or cost.overrides:
                taken[kind] = cost
                self.costs[kind] = CallCost()
        return taken

    def _cpu_spent(self) -> int:
        """CPU time of the call under way or just over, at least.

        Read once per window instead of once per call (the thread's CPU clock is a system call): whatever ran
        between the two was no more CPU time than wall time.
        """
        if not self._timed:
            return self._cpu_ns() - self._started_cpu
        return self._cpu_ns() - self._armed_cpu - (self._started_wall - self._armed_wall)

    # ---- time -----------------------------------------------------------------------------------------------

    def tick(self, frame: FrameType | None) -> None:
        """The timer's tick: end the call under way if it is over its budget."""
        if not self._inside:
            return
        over_cpu = self._cpu_spent() > self._cpu_limit
        if not over_cpu and self._clock_ns() - self._started_wall <= self._wall_limit:
            return
        self._ticks += 1
        if self._ticks >= self.budget.escalate_tick:
            self._escalate(frame)
        raise PolicyTimeout

    def _escalate(self, frame: FrameType | None) -> None:
        """Raise again in whatever code of the policy handles the exception that is about to be raised."""
        seen = False

        def trace(frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ANN401 - the interpreter's protocol
            nonlocal seen
            if not self._inside:
                return None
            if event == "exception" and issubclass(arg[0], PolicyTimeout):
                seen = True
            elif seen and event in ("line", "call"):
                raise PolicyTimeout
            return trace

        boundary = (
            Guard.call.__code__,
            Guard.load.__code__,
            Guard._protected.__code__,
            Collection.run.__code__,
        )
        while frame is not None and frame.f_code not in boundary:
            frame.f_trace = trace
            frame = frame.f_back
        containment, active = self._containment, self._containment.active
        containment.active = False  # a policy may not do this
        sys.settrace(trace)
        containment.active = active

    def _calm(self) -> None:
        """Forget the ticks of the call that ended."""
        if self._ticks >= self.budget.escalate_tick:
            sys.settrace(None)

    def _judge_time(self, kind: Kind, method: str) -> None:
        """A call came back late: once in a while is forgiven."""
        if self._ticks:
            self._calm()
            self._ticks = 0
            raise Fault(kind, "timeout", f"{method}() went on after it was told to stop")
        if self._cpu_spent() <= self.budget.soft_ns:
            return
        overruns = self._overruns[kind]
        overruns.append(self.calls[kind])
        while overruns and overruns[0] <= self.calls[kind] - self.budget.soft_window:
            overruns.popleft()
        if len(overruns) >= self.budget.soft_overruns:
            limit = self.budget.soft_ns / 1e6
            raise Fault(
                kind, "too-slow", f"{len(overruns)} of its last calls took more than {limit:g} ms of CPU time"
            )

    # ---- faults ---------------------------------------------------------------------------------------------

    def _fault(self, kind: Kind, method: str, error: BaseException) -> Fault:
        # First of all: there may be no memory left for what follows.
        memory = self._containment.out_of_memory() if _lacked_memory(error) else None
        cpu_ns, wall_ns = max(0, self._cpu_spent()), self._clock_ns() - self._started_wall
        spent = f"{cpu_ns / 1e6:.0f} ms and {wall_ns / 1e6:.0f} ms"
        ticks, self._ticks = self._ticks, 0
        # Even after one that was noticed: what else it did must not be taken for right from now on.
        breach = self._containment.breach(True) or memory
        if isinstance(error, Breached):
            breach = error.breach
        if self._confined:  # whoever kept what there was must leave memory for what follows
            self._containment.open()
        if breach is not None:
            return Fault(kind, breach.code, f"the policy {breach.what} in {method}()", self._trace_of(error))
        if isinstance(error, PolicyTimeout) or ticks:
            limits = f"{self.budget.hard_ns / 1e6:g} ms of CPU time or {self.budget.wall_ns / 1e6:g} ms"
            text = f"{method}() did not return within {limits}, and was ended after {spent}"
            return Fault(kind, "timeout", text, self._trace_of(error))
        if isinstance(error, Nonsense):
            return Fault(kind, error.code, f"{method}() returned nonsense: {error}")
        name = type(error).__name__
        return Fault(kind, "raised", f"{method}() raised {name}{self._text_of(error)}", self._trace_of(error))

    def _text_of(self, error: BaseException) -> str:
        """The exception's own text; making it runs the policy's code, so it is guarded as well."""
        text: str | None = self._protected(lambda: str(error))
        return f": {text[:MAX_TEXT]}" if text else ""

    def _trace_of(self, error: BaseException) -> str:
        lines = self._protected(lambda: "".join(traceback.format_exception(error, limit=-20)))
        return (lines or "")[-MAX_TEXT:]

    def _protected(self, make: Callable[[], T | None]) -> T | None:
        self._started_cpu, self._started_wall = self._cpu_ns(), self._clock_ns()
        containment = self._containment
        try:
            try:
                self._inside = containment.active = True
                return make()
            finally:
                self._inside = containment.active = False
        except BaseException:  # nothing the policy's exception does may leave the guard
            self._inside = containment.active = False
            return None
        finally:
            self._calm()
            self._ticks = 0
            containment.noticed = None  # it is put out anyhow

    # ---- what policies leave behind -------------------------------------------------------------------------

    def collect(self, known_as: Callable[[Kind, Policy], K], *, stepped: bool = True) -> Blame[K] | None:
        """Collect garbage, and let go of what policies left behind; who is to blame for its code if that did harm.

        Such code has the limits of one call, all of it together. Not within a window of policy calls. `known_as`
        is asked before, of policies that may be gone afterwards. `stepped`: a step ran since the last time.
        """
        left = [
            Suspect(one.kind, type(one.policy), known_as(one.kind, one.policy)) for one in reversed(self.remains.left)
        ]
        known = [(kind, policy) for kind, (policy, foreign) in self._known.items() if foreign]
        suspects = [*(Suspect(kind, type(policy), known_as(kind, policy)) for kind, policy in known), *left]
        del known  # its policies must be able to end
        limits = self.budget.hard_ns, self.budget.wall_ns
        collection: Collection[K] = Collection(
            self._cpu_ns, self._clock_ns, tick_ns=self.budget.tick_ns, limits_ns=limits, stepped=stepped
        )
        if not suspects and not self.remains:
            collection.run(self.remains, left)
            return None
        unraised: deque[Any] = deque(maxlen=MAX_UNRAISED)
        hook, sys.unraisablehook = sys.unraisablehook, unraised.append
        try:
            self._run(collection, left)
        finally:
            sys.unraisablehook = hook
        breach, ticks, self._ticks = self._containment.breach(True), self._ticks, 0
        self._start_timer()
        trace = self._protected(partial(_told, unraised, hook, collection.stack)) or ""
        self._protected(unraised.clear)
        self.disarm()
        if ticks:
            origin, code, what = collection.origin, "timeout", self._too_long(collection)
        elif breach is not None:
            origin, code, what = breach.origin, breach.code, f"the policy {breach.what} in {LEFT}"
        else:
            return None
        found = collection.suspect or culprit(origin, suspects)
        return None if found is None else Blame(found.kind, found.known_as, code, what, trace)

    def _run(self, collection: Collection[K], left: list[Suspect[K]]) -> None:
        containment = self._containment

        def tick(frame: FrameType | None) -> None:
            if self._inside and collection.over(frame):
                self._ticks += 1
                if self._ticks == 1:  # there may be thousands more of its kind, and each takes a tick
                    self._timer.arm(tick, FAST_TICK_NS, FAST_TICK_NS)
                self._escalate(frame)
                raise PolicyTimeout

        containment.open()
        self._timer.arm(tick, self.budget.tick_ns, self.budget.tick_ns)
        try:
            try:
                self._inside = containment.active = True
                collection.run(self.remains, left)
            finally:
                self._inside = containment.active = False
        except BaseException:  # a tick that came while no code of a policy's ran
            self._inside = containment.active = False
        finally:
            self._timer.disarm()
            containment.close()
            if self._ticks:
                sys.settrace(None)

    def _too_long(self, collection: Collection[Any]) -> str:
        limits = f"{self.budget.hard_ns / 1e6:g} ms of CPU time or {self.budget.wall_ns / 1e6:g} ms"
        spent = f"{collection.cpu_ns / 1e6:.0f} ms and {collection.wall_ns / 1e6:.0f} ms"
        return f"{LEFT} was not done within {limits}, and was ended after {spent}"


def _lacked_memory(error: BaseException) -> bool:
    # The type exactly: a class of somebody's own may have an errno that is code.
    return isinstance(error, MemoryError) or (type(error) is OSError and error.errno == errno.ENOMEM)


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an exception and of its causes hold, and of the causes of one of ours."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return
        traceback.clear_frames(error.__traceback__)
        further = error.__cause__ or error.__context__
        if type(error).__module__.partition(".")[0] in OURS:  # it says all that is needed
            error.__cause__ = error.__context__ = None
        error = further


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
