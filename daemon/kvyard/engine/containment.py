"""Notices what a policy does to the engine's process: threads, children, files, sockets, memory, tampering.

An audit hook refuses forbidden actions while a policy runs, so they never happen; a limit on the address
space turns a wild allocation into a MemoryError before the kernel has to end somebody; and after each call
the guard's timer and the modules of kvyard are as they were. It contains faults and is no sandbox: code that
means harm runs with the engine's rights.
"""

from __future__ import annotations

import _thread
import operator
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvyard.core.containment import Breach
from kvyard.core.interrupt import SignalTimer

HEADROOM = 1 << 30
"""Address space that the calls of one step may take, in bytes."""
REFRESH_NS = 1_000_000_000
"""Interval at which the size of the process is read anew (10 us, so not in every step)."""
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
IMPORTED = (".py", ".pyc", ".so")
"""Opening these to read is how the interpreter imports, or shows a line of code; that is judged by its time."""


class Refused(BaseException):
    """Raised in a policy's code in place of a forbidden action; no Exception, so that `except Exception` passes."""


class ProcessContainment:
    """`kvyard.core.containment.Containment` of the engine. One per process: an audit hook cannot be taken out."""

    def __init__(self, timer: SignalTimer, clock_ns: Callable[[], int]) -> None:
        self.active = False
        self._timer = timer
        self._clock_ns = clock_ns
        self.noticed: Breach | None = None
        self._limits = resource.getrlimit(resource.RLIMIT_AS)
        self._ceiling = self._limits
        self._read_at: int | None = None
        self._modules: tuple[ModuleType, ...] = ()
        self._names: tuple[str, ...] = ()
        self._find: Callable[[Any], tuple[ModuleType, ...]] = lambda modules: ()
        self.protect_modules()
        _audit_thread_starts()
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

    def _refuse(self, breach: Breach) -> None:
        self.noticed = self.noticed or breach
        raise Refused(breach.what)

    # ---- memory ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Limit the address space to what there is and HEADROOM."""
        now = self._clock_ns()
        if self._read_at is None or now - self._read_at > REFRESH_NS:
            self._read_at = now
            self._ceiling = (_address_space() + HEADROOM, self._limits[1])
        resource.setrlimit(resource.RLIMIT_AS, self._ceiling)

    def close(self) -> None:
        """Lift the limit: the model may take what it needs."""
        resource.setrlimit(resource.RLIMIT_AS, self._limits)

    def out_of_memory(self) -> Breach | None:
        """A breach unless the engine itself has used the headroom up since its size was read."""
        self._read_at = None
        left = self._ceiling[0] - _address_space()
        if left < HEADROOM // 2:
            return None
        return Breach("memory", f"asked for more memory at once than the {HEADROOM >> 20} MiB that a policy may take")

    # ---- after a call ---------------------------------------------------------------------------------------

    def breach(self, thorough: bool) -> Breach | None:
        """What the call did; the timer and the modules are put right."""
        noticed, self.noticed = self.noticed, None
        tampered = self._timer.restore() if thorough else ""
        if thorough and not self._modules_intact():
            sys.modules.update(zip(self._names, self._modules, strict=True))
            tampered = tampered or "replaced a module of kvyard"
        if noticed is None and tampered:
            return Breach("tampered", tampered)
        return noticed


def _is_import(args: tuple[Any, ...]) -> bool:
    path, mode, flags = args
    if type(path) is not str or not path.endswith(IMPORTED):
        return False
    return flags & os.O_ACCMODE == os.O_RDONLY if mode is None else mode in ("r", "rb")


def _subject(args: tuple[Any, ...]) -> str:
    """What an event was about, without running anybody's code."""
    first = args[0] if args else ""
    return first[:200] if type(first) is str else type(first).__name__


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split(maxsplit=1)[0])
    return pages * resource.getpagesize()


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
            setattr(module, name, _audited(start))


def _audited(start: Callable[..., Any]) -> Callable[..., Any]:
    def audited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the original takes
        sys.audit("_thread.start_new_thread")
        return start(*args, **kwargs)

    return audited
