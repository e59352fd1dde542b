"""Leaves something behind whose end runs code: by the time it runs, the call is long over."""

import sys
import time
from collections.abc import Callable
from typing import Any

from kvyard.policy import Admission, AdmissionPolicy, Snapshot

from kvyard_faulty.trigger import FaultyAdmission


def in_engine() -> bool:
    """Not in the scratch process that tries a candidate first: so that the fault shows where it hurts."""
    return "kvyard.engine.loop" in sys.modules


class Left:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish = finish
        self.me = self

    def __del__(self) -> None:
        self.finish()


def loop() -> None:
    """Never returns, whatever it is told."""
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue


class LeavesLoops(FaultyAdmission):
    """Leaves objects whose end is an endless loop."""

    def fault(self, s: Snapshot) -> Admission:
        for _ in range(20):
            Left(loop)
        return Admission(s.waiting)


class LeavesSleeps(FaultyAdmission):
    """Leaves an object whose end sleeps."""

    def fault(self, s: Snapshot) -> Admission:
        Left(lambda: time.sleep(3600))
        return Admission(s.waiting)


class LeavesFiles(FaultyAdmission):
    """Leaves an object whose end writes a file."""

    def fault(self, s: Snapshot) -> Admission:
        Left(lambda: open("/tmp/kvyard-faulty", "w").close())
        return Admission(s.waiting)


class EndsInLoop(AdmissionPolicy):
    """Its own end is an endless loop."""

    api = (1, 0)

    def admit(self, s: Snapshot) -> Admission:
        return Admission(s.waiting)

    def __del__(self) -> None:
        if in_engine():
            loop()
