"""What policies leave behind: objects whose end runs code of theirs, and how long that code may run.

A finalizer (`__del__`, a callback of a weak reference, the `finally` of an unfinished generator) runs when
the last reference goes or the collector finds a cycle. So whatever a policy may have left is kept until the
guard lets go of it, and its code is timed by samples: the timer's signal is only taken where Python code
runs (or C code that looks at signals), so the collector's own work, however long, is one sample at most.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any, Generic, NamedTuple, TypeVar

from kvyard.core.timed import boundary
from kvyard.policy.base import Kind, Policy
from kvyard.policy.generations import OURS

MAX_CAUSES = 16
MAX_FRAMES = 64
SHOWN_FRAMES = 12
ALONE = 2
"""References to a policy that only its `Left` holds, as `sys.getrefcount` counts them."""
MOST_KEPT = 2
"""Collections after a step for which a policy is kept that something else holds; that may be a cycle of its own."""

Origin = tuple[dict[str, Any], ...]
K = TypeVar("K")


class Suspect(NamedTuple, Generic[K]):
    """A policy that may have left something behind; not the object, whose end must not wait for this."""

    kind: Kind
    made_by: type[Policy]
    known_as: K


class Blame(NamedTuple, Generic[K]):
    """Who is put out for what was left behind; `code` and `message` as in a `Fault`."""

    kind: Kind
    known_as: K
    code: str
    message: str
    trace: str


@dataclass(slots=True)
class Left:
    """A policy that is not called any more."""

    kind: Kind
    policy: Policy
    kept: int = 0
    """Collections after a step in which something else still held it."""

    @property
    def held(self) -> bool:
        """Something else holds it, in which it would come to its end outside the guard."""
        return sys.getrefcount(self.policy) > ALONE


@dataclass(slots=True)
class Remains:
    """Kept, so that its end comes within the guard."""

    left: list[Left] = field(default_factory=list)
    """Policies of others that were called once and are not called any more."""
    candidates: list[object] = field(default_factory=list)
    """What was loaded, in charge or not; None for what failed, which may have left cycles behind."""

    def __bool__(self) -> bool:
        return bool(self.candidates) or any(not one.kept for one in self.left)

    def leave(self, kind: Kind, policy: Policy) -> None:
        """Another policy of `kind` is called now."""
        if all(policy is not one.policy for one in self.left):
            self.left.append(Left(kind, policy))


class Collection(Generic[K]):
    """One collection of garbage: the time that code of policies took in it, by samples."""

    def __init__(
        self,
        cpu_ns: Callable[[], int],
        clock_ns: Callable[[], int],
        *,
        tick_ns: int,
        limits_ns: tuple[int, int],
        stepped: bool = True,
    ) -> None:
        """`limits_ns`: CPU time and wall time; `tick_ns` between two ticks.

        Without a step since the last collection (`stepped`), whatever the core itself still holds of a policy that
        left was not let go of yet, so a policy that something holds is kept, however often that comes.
        """
        self._stepped = stepped
        self.cpu_ns = self.wall_ns = 0
        self.origin: Origin = ()
        """Where the code was when it was over the limit."""
        self.stack: traceback.StackSummary | None = None
        """The same for people; its lines are not read yet."""
        self.suspect: Suspect[K] | None = None
        """Whose own end it was, where it was that."""
        self._ending: Suspect[K] | None = None
        self._cpu = cpu_ns
        self._clock = clock_ns
        self._tick_ns = tick_ns
        self._limits_ns = limits_ns
        self._last: tuple[int, int] | None = None

    @boundary
    def run(self, remains: Remains, leavers: Iterable[Suspect[K]]) -> None:
        """Let go of `remains`, and collect. `leavers` are those that left, the last one first.

        A tick may come between any two lines here and ends the loop: nobody is out of `remains` meanwhile, whose end
        would come outside the guard later.
        """
        left = remains.left
        at = len(left)
        try:
            remains.candidates.clear()
            for suspect in leavers:
                self._ending, at = suspect, at - 1
                one = left[at]
                if one.held and not (self._stepped and one.kept >= MOST_KEPT):
                    one.kept += self._stepped
                else:
                    del left[at]
                del one
        finally:
            self._ending = None
            gc.collect()

    def over(self, frame: FrameType | None) -> bool:
        """A tick in `frame`: whether the code of policies has had its time."""
        now = self._cpu(), self._clock()
        if self._last is not None:
            # At most one interval: between two samples may lie any amount of the collector's own work, or a
            # time in which a busy machine did not let this process run.
            self.cpu_ns += min(now[0] - self._last[0], self._tick_ns)
            self.wall_ns += min(now[1] - self._last[1], self._tick_ns)
        self._last = now
        if self.cpu_ns <= self._limits_ns[0] and self.wall_ns <= self._limits_ns[1]:
            return False
        if not self.origin:
            self.origin, self.suspect = origin_of(frame), self._ending
            shown = traceback.walk_stack(frame)
            self.stack = traceback.StackSummary.extract(shown, limit=SHOWN_FRAMES, lookup_lines=False)
            self.stack.reverse()
        return True


def is_foreign(policy: Policy) -> bool:
    """Somebody else's, not one of those that come with kvyard."""
    return _root(type(policy).__module__) not in OURS


def clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an exception and of its causes hold, and of the causes of one of ours."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return
        traceback.clear_frames(error.__traceback__)
        further = error.__cause__ or error.__context__
        if _root(type(error).__module__) in OURS:  # it says all that is needed
            error.__cause__ = error.__context__ = None
        error = further


def origin_of(frame: FrameType | None) -> Origin:
    """The global names of the functions under way from `frame` on, innermost first."""
    names: list[dict[str, Any]] = []
    while frame is not None and len(names) < MAX_FRAMES:
        names.append(frame.f_globals)
        frame = frame.f_back
    return tuple(names)


def culprit(origin: Origin, suspects: Sequence[Suspect[K]]) -> Suspect[K] | None:
    """Whose code it was: by the module it is from; where no module tells, the only plugin that it can be.

    So a finalizer of another library's that harms is the only plugin's, although that may have nothing to do with it.
    """
    theirs = [names for names in origin if _root(names.get("__name__")) not in OURS]
    for belongs in (_from_module, _from_plugin):
        for names in theirs:
            for suspect in suspects:
                if belongs(suspect.made_by, names):
                    return suspect
    plugins = {_root(suspect.made_by.__module__) for suspect in suspects}
    return suspects[0] if len(plugins) == 1 else None


def _from_module(made_by: type[Policy], names: dict[str, Any]) -> bool:
    functions = (value for kind in made_by.__mro__ for value in vars(kind).values())
    return any(type(function) is FunctionType and function.__globals__ is names for function in functions)


def _from_plugin(made_by: type[Policy], names: dict[str, Any]) -> bool:
    return _root(made_by.__module__) == _root(names.get("__name__"))


def _root(name: object) -> str:
    return name.partition(".")[0] if type(name) is str else ""
