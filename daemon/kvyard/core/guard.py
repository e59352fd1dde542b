"""The guard around every call into a policy: what it may cost, what it may return, what happens if not.

A decision is turned into plain values inside the guard, wholly, before any of it is applied, so no policy
code runs outside. Whatever a policy raises, and whatever it returns that is no decision, becomes a `Fault`;
the caller puts the policy out and asks the built-in instead.

How calls are timed is in `kvyard.core.timed`. What a policy leaves behind has code as well (`__del__`,
callbacks of weak references): the guard lets go of exceptions under the same timer, keeps the policies that
left, and has garbage collected under it (`kvyard.core.collector`).
"""

from __future__ import annotations

import errno
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from kvyard.core.collector import Collector
from kvyard.core.containment import Breach, Containment
from kvyard.core.remains import Blame, Remains, Suspect, clear_frames, is_foreign
from kvyard.core.timed import MOST_BETWEEN_TICKS_NS, Budget, PolicyTimeout, Timed, Timer, boundary, time_spent
from kvyard.policy.base import KINDS, Kind, Policy

T = TypeVar("T")
K = TypeVar("K")
DECLARED_AS = {
    "key_and_evicts": "`key` or `evicts`",
    "lookahead": "`lookahead`",
    "shape_and_divide": "`shape` or `divide`",
    "parameters": "`params`",
}
"""What a policy declares, as its author calls it, by what `kvyard.core.policy_set.Declarations` reads it with."""
MAX_TEXT = 8192
"""Characters kept of a traceback or of an exception's text."""


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


class Guard(Timed):
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
        super().__init__(clock_ns=clock_ns, cpu_ns=cpu_ns, timer=timer, containment=containment, budget=budget)
        self.costs: dict[Kind, CallCost] = {kind: CallCost() for kind in KINDS}
        self._watch = watch
        self._known: dict[Kind, tuple[Policy, bool]] = {}
        """The policy last called of each kind, and whether it is somebody else's."""
        self._overruns: dict[Kind, deque[int]] = {kind: deque() for kind in KINDS}
        self.calls: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        """Calls of each kind since the start."""
        self.blamed: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        """Overrides of each kind since the start that speak against the policy."""
        self.remains = Remains()
        """What policies left behind, until `collect`."""

    def call_each(
        self, kind: Kind, policy: Policy, method: str, check: Callable[[Any], T], items: Iterable[Any]
    ) -> list[T]:
        """The checked decisions of `policy.method(item)` for each item, as one call with one budget. Raises Fault."""
        # No `cast`: it is a call, and this runs in every step in which somebody comes.
        checked: Any = check
        return self.call(kind, policy, method, checked, each=items)

    @boundary
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

        `each` is for `call_each`. `by` has the method where it is not the policy's own, and calls the policy's code.
        """
        clock, containment = self.clock_ns, self.containment
        known = self._known.get(kind)
        foreign = known[1] if known is not None and known[0] is policy else self._enter(kind, policy)
        if not self._timed or (foreign and not self._confined):
            self.begin(foreign)
        self._started_wall = start = clock()
        self._watch(kind, policy, start)
        try:
            try:
                self.inside = containment.active = True
                if each is None:
                    decision = check(getattr(policy if by is None else by, method)(*args))
                else:
                    decide = getattr(policy, method)
                    decision = [check(decide(item)) for item in each]  # type: ignore[assignment]
            finally:
                # No call may stand before this line: a tick is only taken at calls and backward jumps.
                self.inside = containment.active = False
            end = clock()
            # Ours are known by their tests; a key is asked for once per request, and `examine` follows them.
            if (foreign and method != "key") or containment.noticed is not None:
                self._look_for_breach(foreign and method != "key")
        except BaseException as error:
            self.inside = containment.active = False
            failed = [error]
        else:
            self._watch(kind, None, end)
            spent, cost = end - start, self.costs[kind]
            cost.calls += 1
            cost.ns += spent
            self.calls[kind] += 1
            if self.ticks or spent > self.budget.soft_ns:
                self._judge_time(kind, method)
            return decision
        # Out of the handler, so that nothing else holds the exception: its frames hold what the policy left there.
        raise self._failed(kind, method, failed)

    def _look_for_breach(self, thorough: bool) -> None:
        breach = self.containment.breach(thorough)
        if breach is not None:
            raise Breached(breach)

    def _failed(self, kind: Kind, method: str, failed: list[BaseException]) -> Fault:
        self.calm()
        fault = self._fault(kind, method, failed[0])
        self.protected(failed.clear)
        self.containment.breach(True)
        self._watch(kind, None, self.clock_ns())
        return fault

    @boundary
    def load(self, make: Callable[[], T]) -> T:
        """What `make` makes, which imports and constructs candidates. Raises NotLoaded; its own errors pass through.

        Not within a window of policy calls: it has the timer to itself.
        """
        budget = self.budget
        self._cpu_limit, self._wall_limit = budget.loading_cpu_ns, budget.loading_wall_ns
        self._most_between = budget.loading_cpu_ns + MOST_BETWEEN_TICKS_NS  # the first tick comes that late
        self._started_cpu, self._started_wall = self.cpu_ns(), self.clock_ns()
        self.containment.look()
        self.timer.arm(self.tick, budget.loading_cpu_ns, budget.tick_ns)
        failed: list[BaseException] = []
        made: T | None = None
        try:
            try:
                self.inside = True
                made = make()
            finally:
                self.inside = False
        except BaseException as error:
            self.inside = False
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
        budget, containment = self.budget, self.containment
        self.calm()
        ticks, self.ticks = self.ticks, 0
        self._cpu_limit, self._wall_limit = budget.hard_ns, budget.wall_ns
        self._most_between = MOST_BETWEEN_TICKS_NS
        breach = containment.breach(True)
        if failed:
            self.timer.arm(self.tick, budget.tick_ns, budget.tick_ns)
            self.protected(partial(clear_frames, failed[0]))
            if ticks or breach is not None:
                self.protected(failed.clear)
            breach = breach or containment.breach(True)
        self.timer.disarm()
        if ticks:
            limits = f"{budget.loading_cpu_ns / 1e9:g} s of CPU time or {budget.loading_wall_ns / 1e9:g} s"
            raise NotLoaded("timeout", f"its import and construction did not end within {limits}; nothing changed")
        if breach is not None:
            raise NotLoaded(breach.code, f"it {breach.what} while it was loaded; nothing changed")

    def collect(self, known_as: Callable[[Kind, Policy], K], *, stepped: bool = True) -> Blame[K] | None:
        """Collect garbage, and let go of what policies left behind; who is to blame for its code if that did harm.

        Such code has the limits of one call, all of it together. Not within a window of policy calls. `known_as`
        is asked before, of policies that may be gone afterwards. `stepped`: a step ran since the last time.
        """
        called = [
            Suspect(kind, type(policy), known_as(kind, policy))
            for kind, (policy, foreign) in self._known.items()
            if foreign
        ]
        return Collector(self, self.remains).collect(called, known_as, stepped)

    def _enter(self, kind: Kind, policy: Policy) -> bool:
        """Another policy of `kind` is called from now on; whether it is somebody else's."""
        known = self._known.get(kind)
        if known is not None and known[1]:
            self.remains.leave(kind, known[0])
        foreign = is_foreign(policy)
        self._known[kind] = (policy, foreign)
        return foreign

    def examine(self, kind: Kind, policy: Policy) -> None:
        """Look for what many calls in a row of `kind` may have done to the process. Raises Fault."""
        if not self._confined or not is_foreign(policy):
            return  # nothing of somebody else's ran in this window
        breach = self.containment.breach(True)
        if breach is not None:
            raise Fault(kind, breach.code, f"the policy {breach.what}")

    def settled(self) -> None:
        """The process has the settings that it keeps: what they are now is what policies must leave."""
        self.containment.look()

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

    def _judge_time(self, kind: Kind, method: str) -> None:
        """A call came back late: once in a while is forgiven."""
        if self.ticks:
            self.calm()
            self.ticks = 0
            raise Fault(kind, "timeout", f"{method}() went on after it was told to stop")
        if self.cpu_spent() <= self.budget.soft_ns:
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
        memory = self.containment.out_of_memory() if _lacked_memory(error) else None
        cpu_ns, wall_ns = max(0, self.cpu_spent()), self.clock_ns() - self._started_wall
        ticks, self.ticks = self.ticks, 0
        # Even after one that was noticed: what else it did must not be taken for right from now on.
        breach = self.containment.breach(True) or memory
        if isinstance(error, Breached):
            breach = error.breach
        if self._confined:  # whoever kept what there was must leave memory for what follows
            self.containment.open()
        what = DECLARED_AS.get(method, f"{method}()")
        if breach is not None:
            return Fault(kind, breach.code, f"the policy {breach.what} in {what}", self._trace_of(error))
        if isinstance(error, PolicyTimeout) or ticks:
            taken = time_spent(cpu_ns, wall_ns)
            text = f"{what} did not return within {self.budget.limits}, and was ended after {taken}"
            return Fault(kind, "timeout", text, self._trace_of(error))
        if isinstance(error, Nonsense):
            return Fault(kind, error.code, f"{what} returned nonsense: {error}")
        name = type(error).__name__
        return Fault(kind, "raised", f"{what} raised {name}{self._text_of(error)}", self._trace_of(error))

    def _text_of(self, error: BaseException) -> str:
        """The exception's own text; making it runs the policy's code, so it is guarded as well."""
        text: str | None = self.protected(lambda: str(error))
        return f": {text[:MAX_TEXT]}" if text else ""

    def _trace_of(self, error: BaseException) -> str:
        lines = self.protected(lambda: "".join(traceback.format_exception(error, limit=-20)))
        return (lines or "")[-MAX_TEXT:]


def _lacked_memory(error: BaseException) -> bool:
    # The type exactly: a class of somebody's own may have an errno that is code.
    return isinstance(error, MemoryError) or (type(error) is OSError and error.errno == errno.ENOMEM)
