"""The engine as a child process: how it is started, what it inherits, what its death means.

It is executed, not forked from the front's state; it inherits the link's descriptor alone, lives in a
session of its own (so that Ctrl-C reaches the front only), and dies with its parent.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvyard.link.progress import EnginePhase, Progress

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


def engine_environment(environ: dict[str, str]) -> dict[str, str]:
    """The engine's environment: plugins run with its rights, so nothing secret is in it."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in NOT_INHERITED and not any(word in name.upper() for word in SECRET_WORDS)
    }
    # Spinning OpenMP threads fight the front for the cores: a linear-only step beside one busy process
    # takes 14 ms (p99 140) with spinning threads and 10 ms (p99 33) with passive ones.
    kept.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    kept.setdefault("KMP_BLOCKTIME", "0")
    # All of the core's objects in huge pages: with ten thousand waiting, sequences are cold when they are admitted,
    # and a step costs 8 to 14 % less (medians of three, in turns). It needs the C library's allocator for all.
    kept.setdefault("PYTHONMALLOC", "malloc")
    # By itself it keeps 7 freed pieces of a size at hand, so most of a step's go back to the heap, where it looks at
    # their neighbours; with a hundred thousand waiting those are cold, and a step costs 5 % less if it keeps 127.
    kept.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=127")
    # oneDNN and torch's layer over it keep a compiled product (0.5 to 0.8 MB) per matrix shape and row count, 1024
    # by default. With 128 decoding and prompts are as fast; a sweep over 44 row counts costs at most 3 % more.
    kept.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    kept.setdefault("LRU_CACHE_CAPACITY", "128")
    return kept


def spawn(module: str = "kvyard.engine.process") -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an engine; the process and the front's end of the link."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=engine_environment(dict(os.environ)),
        )
    return child, ours


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """How an engine ended and what it was doing."""

    returncode: int
    progress: Progress | None
    ready: bool
    """It had served."""
    oom: bool
    """The kernel ended a process of this machine or group for want of memory meanwhile."""
    hang: str | None
    """The supervisor ended it for this reason."""
    stack: str
    """Where it hung, as far as it could be asked."""

    @property
    def policy_at_fault(self) -> str | None:
        """`kind/name` of the policy that was running, where that explains the death."""
        seen = self.progress
        if seen is None or self.unexplained_kill:
            return None
        if seen.phase not in (EnginePhase.POLICY, EnginePhase.CANDIDATE):
            return None
        if self.hang is not None and not self.hang.startswith("policy "):
            return None  # the supervisor had another reason
        return seen.policy

    @property
    def code(self) -> str:
        """The code of the exit record of the policy at fault."""
        return "hung" if self.hang is not None else "memory" if self.oom else "crashed"

    @property
    def unexplained_kill(self) -> bool:
        """Somebody sent SIGKILL and it was neither the kernel for memory nor the supervisor for a hang.

        Then no request can be blamed: a request makes an engine crash or run out of memory, it does
        not make an operator type `kill -9`.
        """
        return self.returncode == -signal.SIGKILL and not self.oom and self.hang is None

    @property
    def words(self) -> str:
        """The death in words."""
        if self.hang is not None:
            return self.hang
        if self.returncode == -signal.SIGKILL:
            return (
                "was ended by the kernel for want of memory"
                if self.oom
                else "was killed by another process (SIGKILL)"
            )
        return how_it_ended(self.returncode)


def how_it_ended(returncode: int) -> str:
    """A process's end in words, by what `Popen.returncode` says."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    known = -returncode in set(signal.Signals)
    return f"died of {signal.Signals(-returncode).name if known else 'a signal'}"


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory, in this group and on this machine."""
    total = 0
    for path in (*_cgroup_events(), Path("/proc/vmstat")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return total


def _cgroup_events() -> list[Path]:
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    return [Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events" for line in own if line.startswith("0::")]
