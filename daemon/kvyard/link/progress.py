"""The progress page: shared memory in which the engine says what it is doing (docs/architecture.md).

The supervisor reads it without the engine's help, so it can tell a hang from a long legal prefill, and
after a death it knows who was running. One writer, one reader, one machine word per value: a word is
never torn, and the reader needs no more than that. The page is a memfd that the front makes and hands
over the link, so nothing of it is left behind whoever dies first.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

MAGIC = 0x6B767961726431
MAX_IDS = 8192
_NAME_BYTES = 128
_NAME_AT = 16
_IDS_AT = _NAME_AT + _NAME_BYTES // 8
SIZE = (_IDS_AT + MAX_IDS) * 8


class EnginePhase(IntEnum):
    """What the engine does at this moment."""

    STARTING = 0
    LOADING = 1
    IDLE = 2
    INBOX = 3
    CONTROL = 4
    SCHEDULE = 5
    POLICY = 6
    MODEL = 7
    SAMPLE = 8
    OUTPUTS = 9
    LEAVING = 10
    CANDIDATE = 11
    """A policy is imported and constructed: at the start, or to be swapped in."""


_WORK = (EnginePhase.SCHEDULE, EnginePhase.POLICY, EnginePhase.MODEL, EnginePhase.SAMPLE, EnginePhase.OUTPUTS)


@dataclass(frozen=True, slots=True)
class Progress:
    """One reading of the page. Times are CLOCK_MONOTONIC nanoseconds."""

    pid: int
    phase: EnginePhase
    phase_started: int
    step: int
    step_started: int
    policy: str
    """`kind/name` of the policy last entered or loaded."""
    ids: tuple[int, ...]
    """Sequences of the step in progress, of the last one while idle."""

    @property
    def in_step(self) -> bool:
        """A step was in progress, so that its sequences may have to do with a death."""
        return self.phase in _WORK


_PID, _PHASE, _PHASE_AT, _STEP, _STEP_AT, _COUNT = range(1, 7)


class ProgressPage:
    """Both ends of the page."""

    def __init__(self, fd: int) -> None:
        """Map the page behind `fd`, which stays the caller's to close."""
        self._map = mmap.mmap(fd, SIZE)
        self._words: npt.NDArray[np.int64] = np.frombuffer(self._map, np.int64)
        # A memoryview stores a word in about 40 ns, a numpy scalar assignment takes 100.
        self._cells = memoryview(self._map).cast("q")
        self._name = ""

    @staticmethod
    def create() -> int:
        """A new, empty page's file descriptor."""
        fd = os.memfd_create("kvyard-progress", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        return fd

    # ---- the engine's side

    def begin(self, pid: int, now_ns: int) -> None:
        """Say that the engine is alive."""
        self._cells[0] = MAGIC
        self._cells[_PID] = pid
        self.phase(EnginePhase.STARTING, now_ns)

    def phase(self, phase: EnginePhase, now_ns: int) -> None:
        """The engine enters a phase."""
        self._cells[_PHASE_AT] = now_ns
        self._cells[_PHASE] = phase

    def policy(self, name: str, now_ns: int) -> None:
        """The engine enters a policy, `kind/name`."""
        if name is not self._name:
            self._tell(name)
        self._cells[_PHASE_AT] = now_ns
        self._cells[_PHASE] = EnginePhase.POLICY

    @contextmanager
    def candidate(self, name: str) -> Iterator[None]:
        """The engine loads `kind/name`; afterwards it goes on with what it did before."""
        before = EnginePhase(self._cells[_PHASE])
        self._tell(name)
        self.phase(EnginePhase.CANDIDATE, time.monotonic_ns())
        try:
            yield
        finally:
            self.phase(before, time.monotonic_ns())

    def _tell(self, name: str) -> None:
        self._name = name
        raw = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        self._words[_NAME_AT:_IDS_AT] = np.frombuffer(raw, np.int64)

    def step(self, number: int, now_ns: int) -> None:
        """A step starts."""
        self._cells[_STEP] = number
        self._cells[_STEP_AT] = now_ns

    def ids(self, ids: npt.NDArray[np.int64]) -> None:
        """The sequences of this step; beyond MAX_IDS the rest is not told."""
        count = min(len(ids), MAX_IDS)
        self._words[_IDS_AT : _IDS_AT + count] = ids[:count]
        self._cells[_COUNT] = count

    # ---- the supervisor's side

    def read(self) -> Progress | None:
        """What the engine does now; None before it said anything."""
        if self._cells[0] != MAGIC:
            return None
        words = self._words
        count = min(int(words[_COUNT]), MAX_IDS)
        name = words[_NAME_AT:_IDS_AT].tobytes().rstrip(b"\0").decode(errors="replace")
        return Progress(
            pid=int(words[_PID]),
            phase=EnginePhase(int(words[_PHASE])),
            phase_started=int(words[_PHASE_AT]),
            step=int(words[_STEP]),
            step_started=int(words[_STEP_AT]),
            policy=name,
            ids=tuple(words[_IDS_AT : _IDS_AT + count].tolist()),
        )

    def close(self) -> None:
        """Unmap the page."""
        self._cells.release()
        del self._words
        self._map.close()


PolicyEntered = Callable[[str], None]
"""Called with `kind/name` right before a policy's code runs."""
