"""Notices what a policy does to the engine's process: threads, children, files, sockets, memory, tampering.

An audit hook refuses forbidden actions while a policy runs, so they never happen; a limit on the address
space turns a wild allocation into a MemoryError before the kernel has to end somebody; and after each call
the guard's timer, the modules of kvyard and the settings of the interpreter are as they were. It contains
faults and is no sandbox: code that means harm runs with the engine's rights.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C module has no stub
import _thread
import gc
import operator
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvyard.core.containment import Breach
from kvyard.core.interrupt import SignalTimer
from kvyard.core.remains import origin_of

HEADROOM = 1 << 30
"""Address space that the calls of one step may take, in bytes."""
PAGE = resource.getpagesize()
SPAWNS = frozenset(
    {
        "_thread.start_new_thread", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system",
        "subprocess.Popen", "pty.spawn",
    }
)  # fmt: skip
FORBIDDEN = frozenset(
    {
        "open", "socket.__new__", "socket.connect", "socket.bind", "os.remove", "os.rename", "os.mkdir", "os.rmdir",
        "os.truncate", "os.link", "os.symlink", "os.chmod", "os.chown", "sqlite3.connect", "sys.addaudithook",
    }
)  # fmt: skip
TAMPERS = {
    "sys.settrace": "tried to set a trace function (sys.settrace)",
    "sys.setprofile": "tried to set a profile function (sys.setprofile)",
    "sys.setrecursionlimit": "tried to change the recursion limit (sys.setrecursionlimit)",
    "gc.freeze": "tried to change the garbage collector (gc.freeze)",
    "gc.unfreeze": "tried to change the garbage collector (gc.unfreeze)",
    "os.putenv": "tried to change the environment (os.putenv)",
    "os.unsetenv": "tried to change the environment (os.unsetenv)",
    "os.chdir": "tried to change the working folder (os.chdir)",
    "os.kill": "tried to send a signal (os.kill)",
    "os.killpg": "tried to send a signal (os.killpg)",
    "signal.pthread_kill": "tried to send a signal (signal.pthread_kill)",
    "resource.setrlimit": "tried to change a limit of the process (resource.setrlimit)",
    "resource.prlimit": "tried to change a limit of the process (resource.prlimit)",
}
"""Events of changes to the process, in words."""
UNAUDITED = ((sys, "setrecursionlimit"), (gc, "freeze"), (gc, "unfreeze"))
"""Functions that raise no event of their own."""
HANDLED = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD)))
"""Signals whose handlers must stay: to lose one may end the engine."""
IMPORTED = (".py", ".pyc", ".so")
"""Opening these to read is how the interpreter imports, or shows a line of code; that is judged by its time."""


class Refused(BaseException):
    """Raised in a policy's code in place of a forbidden action; no Exception, so that `except Exception` passes."""


class ProcessContainment:
    """`kvyard.core.containment.Containment` of the engine. One per process: an audit hook cannot be taken out."""

    def __init__(self, timer: SignalTimer) -> None:
        self.active = False
        self._timer = timer
        self.noticed: Breach | None = None
        self._limits = resource.getrlimit(resource.RLIMIT_AS)
        self._highest = min(limit for limit in (*self._limits, sys.maxsize) if limit != resource.RLIM_INFINITY)
        """The limit that the process has anyhow."""
        self._size_fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._size = 0
        self._limited = False
        self._settings = _settings()
        self._functions = _functions()
        self._modules: tuple[ModuleType, ...] = ()
        self._names: tuple[str, ...] = ()
        self._find: Callable[[Any], tuple[ModuleType, ...]] = lambda modules: ()
        self.protect_modules()
        _audit_thread_starts()
        for module, name in UNAUDITED:
            setattr(module, name, _audited(getattr(module, name), f"{module.__name__}.{name}"))
        sys.addaudithook(self._audit)

    # ---- modules --------------------------------------------------------------------------------------------

    def protect_modules(self) -> None:
        """The modules of kvyard that are loaded now are those that must stay."""
        own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kvyard"}
        self._names, self._modules = tuple(own), tuple(own.values())
        self._find = operator.itemgetter(*self._names)

    def _modules_intact(self) -> bool:
        try:
            return all(map(operator.is_, self._find(sys.modules), self._modules))
        except KeyError:
            return False

    # ---- the audit hook -------------------------------------------------------------------------------------

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in SPAWNS:
            self._refuse(Breach("spawned", f"tried to start a thread or a process ({event})"))
        elif event in FORBIDDEN and not (event == "open" and _is_import(args)):
            self._refuse(Breach("forbidden", f"tried to use files or sockets ({event} {_subject(args)})"))
        elif event in TAMPERS and not (event == "sys.settrace" and self._guard_traces()):
            self._refuse(Breach("tampered", TAMPERS[event]))

    def _guard_traces(self) -> bool:
        # The guard's trace function ends code that catches everything; where it raises, the interpreter takes it
        # away, which is the same event.
        return sys.gettrace() is not self._functions[0]

    def _refuse(self, breach: Breach) -> None:
        if self.noticed is None:
            self.noticed = breach._replace(origin=origin_of(sys._getframe(2)))
        raise Refused(breach.what)

    # ---- memory ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Limit the address space to what there is and HEADROOM, and remember the settings."""
        self.look()
        self._limited = True
        self._limit()

    def _limit(self) -> None:
        self._size = self._address_space()
        resource.setrlimit(resource.RLIMIT_AS, (min(self._size + HEADROOM, self._highest), self._limits[1]))

    def close(self) -> None:
        """Lift the limit: the model may take what it needs."""
        self._limited = False
        resource.setrlimit(resource.RLIMIT_AS, self._limits)

    def out_of_memory(self) -> Breach | None:
        """A breach unless the process had less than the half of HEADROOM left before the policies were called."""
        had = min(HEADROOM, self._highest - self._size)
        if self._limited:  # whoever kept what there was must leave something for what follows
            self._limit()
        if had < HEADROOM // 2:
            return None
        return Breach("memory", f"took more memory than the {HEADROOM >> 20} MiB that a policy may take")

    def _address_space(self) -> int:
        return int(os.pread(self._size_fd, 32, 0).split(None, 1)[0]) * PAGE

    # ---- after a call ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """What the settings are now is what they must be after the calls that follow."""
        self._settings, self._functions = _settings(), _functions()

    def breach(self, thorough: bool) -> Breach | None:
        """What the call did; the timer, the modules and the settings are put right."""
        noticed, self.noticed = self.noticed, None
        # All three, whatever the first finds: what stays is taken for right by the next `look`.
        found = (self._timer.restore(), self._restore(), self._restore_modules()) if thorough else ()
        tampered = " and ".join(filter(None, found))
        if noticed is None and tampered:
            return Breach("tampered", tampered)
        return noticed

    def _restore_modules(self) -> str:
        if self._modules_intact():
            return ""
        sys.modules.update(zip(self._names, self._modules, strict=True))
        return "replaced a module of kvyard"

    def _restore(self) -> str:
        """Put right what somebody did to the settings; what that was, empty when nothing."""
        changed = []
        if _settings() != self._settings:
            changed += _put_settings_back(self._settings)
        # By identity: an equality of somebody's own would run here.
        if not all(map(operator.is_, _functions(), self._functions)):
            changed += _put_functions_back(self._functions)
        return f"changed {', '.join(changed)}" if changed else ""


Settings = tuple[int, float, bool, tuple[int, int, int]]


def _settings() -> Settings:
    return sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold()


def _functions() -> list[Any]:
    return [sys.gettrace(), sys.getprofile(), *map(_signal.getsignal, HANDLED)]


def _put_settings_back(wanted: Settings) -> list[str]:
    """The settings that were different, by name."""
    limit, interval, collects, threshold = wanted
    changed = []
    if sys.getrecursionlimit() != limit:
        changed.append("the recursion limit (sys.setrecursionlimit)")
        sys.setrecursionlimit(limit)
    if sys.getswitchinterval() != interval:
        changed.append("the threads' interval (sys.setswitchinterval)")
        sys.setswitchinterval(interval)
    if gc.isenabled() != collects:
        changed.append(f"the garbage collector (gc.{'disable' if collects else 'enable'})")
        (gc.enable if collects else gc.disable)()
    if gc.get_threshold() != threshold:
        changed.append("the garbage collector (gc.set_threshold)")
        gc.set_threshold(*threshold)
    return changed


def _put_functions_back(wanted: list[Any]) -> list[str]:
    """The functions that were others, by name. The guard itself takes a trace function away when it used its own."""
    trace, profile, *handlers = wanted
    changed = []
    if (now := sys.gettrace()) is not None and now is not trace:
        changed.append("the trace function (sys.settrace)")
        sys.settrace(trace)
    if sys.getprofile() is not profile:
        changed.append("the profile function (sys.setprofile)")
        sys.setprofile(profile)
    for number, handler in zip(HANDLED, handlers, strict=True):
        if _signal.getsignal(number) is not handler:
            changed.append(f"the handler of {signal.Signals(number).name}")
            if handler is not None:
                _signal.signal(number, handler)  # that of `signal` asks the old one whether it equals a constant
    return changed


def _is_import(args: tuple[Any, ...]) -> bool:
    path, mode, flags = args
    if type(path) is not str or not path.endswith(IMPORTED):
        return False
    return flags & os.O_ACCMODE == os.O_RDONLY if mode is None else mode in ("r", "rb")


def _subject(args: tuple[Any, ...]) -> str:
    """What an event was about, without running anybody's code."""
    first = args[0] if args else ""
    return first[:200] if type(first) is str else type(first).__name__


def _audit_thread_starts() -> None:
    """Let thread starts raise an audit event in the Pythons that have none (up to 3.12)."""
    for module, name in (
        (_thread, "start_new_thread"),
        (_thread, "start_new"),
        (_thread, "start_joinable_thread"),
        (threading, "_start_new_thread"),
        (threading, "_start_joinable_thread"),
    ):
        start = getattr(module, name, None)
        if start is not None:
            setattr(module, name, _audited(start, "_thread.start_new_thread"))


def _audited(call: Callable[..., Any], event: str) -> Callable[..., Any]:
    def audited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the original takes
        sys.audit(event)
        return call(*args, **kwargs)

    return audited
