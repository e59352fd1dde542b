"""Keeps an engine running: starts it, watches its progress page, ends it when it hangs, starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvyard.front.engine_child import EngineDeath, cpu_seconds, oom_kills, spawn
from kvyard.front.engine_link import EngineLink
from kvyard.front.engine_states import EngineEvent, EngineState, next_state
from kvyard.link.codec import ToEngine, ToFront
from kvyard.link.messages import EngineInfo, Loading, Refused, Start, Stop
from kvyard.link.progress import EnginePhase, Progress, ProgressPage

log = structlog.get_logger(__name__)

WATCH_S = 0.25
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
COMPUTES_S = 0.3
"""Processor time within one phase, in seconds, from which on the engine counts as computing in it."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the engine may stay in one phase before it counts as hanging, in seconds.

    A policy has its own limits inside the engine (50 ms of CPU, 500 ms of wall time); what is still in
    a policy after that is stuck in C code, or has made itself deaf to the guard. Unless it computes it gets
    four times as long: a busy machine may keep the engine from running at all. A model step may legally be
    long: a whole prompt on a slow CPU, or a kernel's first compilation.
    """

    policy: float = 0.7
    candidate: float = 7.0
    """To import and construct a policy, which the guard ends after 5 s of CPU time or 10 s."""
    candidate_cpu: float = 5.5
    """With less processor time than this a candidate has twice as long: the guard may still end it."""
    step: float = 120.0
    loading: float = 900.0
    leaving: float = 5.0


class EngineHandler(Protocol):
    """Who is told what the engine does."""

    def engine_message(self, message: ToFront) -> None:
        """Anything but the start's own messages."""

    def engine_ready(self, info: EngineInfo) -> None:
        """A new engine serves."""

    def engine_lost(self, death: EngineDeath) -> None:
        """It is gone; a new one will be started."""

    def engine_refused(self, refused: Refused) -> None:
        """It cannot start as asked."""


class Supervisor:
    """One engine process and its successors. Runs on the event loop of the main thread."""

    def __init__(
        self,
        start: Callable[[], Start],
        handler: EngineHandler,
        *,
        patience: Patience | None = None,
        module: str = "kvyard.engine.process",
    ) -> None:
        self.state = EngineState.DOWN
        self.restarts = 0
        self.info: EngineInfo | None = None
        self.loading = ""
        self.pid: int | None = None
        self.ready_at: float | None = None
        self._make_start = start
        self._handler = handler
        self._patience = patience or Patience()
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None
        self._link: EngineLink | None = None
        self._page: ProgressPage | None = None
        self._stack_fd = -1
        self._pidfd = -1
        self._hang: str | None = None
        self._oom_before = 0
        self._cpu_before = 0.0
        """Processor time of the engine when its phase was first seen."""
        self._fruitless = 0
        self._gone = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- commands

    def spawn(self) -> None:
        """Start an engine."""
        self._to(EngineEvent.SPAWNED)
        self._hang, self._oom_before = None, oom_kills()
        self._gone.clear()
        child, sock = spawn(self._module)
        self._child, self.pid = child, child.pid
        self._pidfd = os.pidfd_open(child.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)
        self._open_link(sock)
        self._keep(self._watch())

    def _open_link(self, sock: socket.socket) -> None:
        page_fd = ProgressPage.create()
        self._page = ProgressPage(page_fd)
        self._stack_fd = os.memfd_create("kvyard-stack", os.MFD_CLOEXEC)
        self._link = EngineLink(sock, self._message, self._link_closed)
        # A child that died at once is told by its pidfd, not by the pipe it broke.
        with contextlib.suppress(OSError):
            self._link.open(self._make_start(), [page_fd, self._stack_fd])
        os.close(page_fd)

    def send(self, message: ToEngine) -> None:
        """Send to the engine if there is one."""
        if self._link is not None:
            self._link.send(message)

    async def stop(self) -> None:
        """End the engine for good: asked, then forced."""
        self._to(EngineEvent.STOPPED)
        if self._child is None:
            return
        self.send(Stop())
        try:
            await asyncio.wait_for(self._gone.wait(), self._patience.leaving)
        except TimeoutError:
            self.kill("did not leave when asked")
            await self._gone.wait()

    def kill(self, reason: str) -> None:
        """End the engine now; it is started again unless it is leaving."""
        if self._child is not None:
            self._hang = self._hang or reason
            self._child.kill()

    def progress(self) -> Progress | None:
        """What the engine does at this moment."""
        return self._page.read() if self._page is not None else None

    def stalled(self) -> float:
        """Seconds that the engine has spent in the present phase of a step; 0 between steps."""
        seen = self.progress()
        if seen is None or not seen.in_step or seen.pid != self.pid:
            return 0.0
        return (time.monotonic_ns() - seen.phase_started) / 1e9

    def in_time(self) -> bool:
        """The engine is not overdue in any phase, or a new one is on its way: progress, for a watchdog."""
        seen = self.progress()
        return seen is None or self._overdue(seen, time.monotonic_ns()) is None

    def productive(self) -> None:
        """The engine produced something: its next death is not a failure to start."""
        self._fruitless = 0

    # ---- what happens

    def _to(self, event: EngineEvent) -> None:
        self.state = next_state(self.state, event)

    def _keep(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]  # coroutine of this class
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _message(self, message: ToFront) -> None:
        if isinstance(message, Loading):
            self.loading = message.what
        elif isinstance(message, Refused):
            self._to(EngineEvent.REFUSES)
            self._handler.engine_refused(message)
        elif isinstance(message, EngineInfo):
            self._to(EngineEvent.SERVES)
            self.info, self.ready_at = message, time.monotonic()
            if self.state is EngineState.READY:
                self._handler.engine_ready(message)
        else:
            self._handler.engine_message(message)

    def _link_closed(self, reason: str) -> None:
        # The pidfd tells the death; a link that closes under a living engine is a fault of its own.
        child = self._child
        if child is not None and child.poll() is None and self.state is not EngineState.LEAVING:
            self._keep(self._end_deaf_engine(child, reason))

    async def _end_deaf_engine(self, child: subprocess.Popen[bytes], reason: str) -> None:
        await asyncio.sleep(0.5)
        if child is self._child and child.poll() is None:
            self.kill(f"lost its link ({reason})")

    def _died(self) -> None:
        child, page = self._child, self._page
        assert child is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        returncode = child.wait()
        if self._link is not None:
            self._link.drain()
            self._link.close("the engine is gone")
        death = EngineDeath(
            returncode=returncode,
            progress=page.read() if page is not None else None,
            ready=self.ready_at is not None,
            oom=oom_kills() > self._oom_before,
            hang=self._hang,
            stack=self._read_stack(),
        )
        if page is not None:
            page.close()
        os.close(self._stack_fd)
        self._child = self._link = self._page = self.pid = self.ready_at = None
        self._gone.set()
        self._to(EngineEvent.DIED)
        if self.state is EngineState.LOST:
            self._handler.engine_lost(death)
            self._keep(self._start_again())

    async def _start_again(self) -> None:
        self.restarts += 1
        if self._fruitless:
            await asyncio.sleep(min(FIRST_DELAY_S * 2 ** (self._fruitless - 1), LONGEST_DELAY_S))
        self._fruitless += 1
        if self.state is EngineState.LOST:
            self.spawn()

    # ---- watching

    async def _watch(self) -> None:
        child, since = self._child, 0
        while child is self._child and child is not None:
            await asyncio.sleep(WATCH_S)
            seen = self.progress()
            if seen is not None and seen.phase_started != since:
                since, self._cpu_before = seen.phase_started, cpu_seconds(child.pid)
            reason = self._overdue(seen, time.monotonic_ns()) if seen is not None else None
            if reason is not None and child is self._child:
                log.error("engine.hangs", reason=reason, pid=child.pid)
                self._hang = reason
                # faulthandler writes the stack even from inside a C loop that never checks signals.
                child.send_signal(signal.SIGUSR1)
                await asyncio.sleep(0.2)
                child.kill()
                return

    def _overdue(self, seen: Progress, now_ns: int) -> str | None:
        age = (now_ns - seen.phase_started) / 1e9
        if seen.phase is EnginePhase.IDLE or seen.pid != self.pid:
            return None
        if seen.phase is EnginePhase.POLICY:
            computes = cpu_seconds(seen.pid) - self._cpu_before > COMPUTES_S
            limit = self._patience.policy if computes else 4 * self._patience.policy
            what = f"policy {seen.policy} did not return"
        elif seen.phase is EnginePhase.CANDIDATE:
            computes = cpu_seconds(seen.pid) - self._cpu_before > self._patience.candidate_cpu
            limit = self._patience.candidate if computes else 2 * self._patience.candidate
            what = f"policy {seen.policy} could not be loaded: its import and construction did not end"
        elif seen.phase in (EnginePhase.STARTING, EnginePhase.LOADING):
            limit, what = self._patience.loading, "loading did not end"
        else:
            limit, what = self._patience.step, f"step {seen.step} stayed in {seen.phase.name.lower()}"
        return f"{what} for {age:.1f} s" if age > limit else None

    def _read_stack(self) -> str:
        with contextlib.suppress(OSError):
            return os.pread(self._stack_fd, 64 << 10, 0).decode(errors="replace")
        return ""
