"""Fails on the way in, or when it is asked for its state."""

import ctypes
import itertools
import sys
from collections import deque
from collections.abc import Sequence

from kvyard.policy import Admission, AdmissionPolicy, PolicyState, RequestView, Snapshot


class FailsInConstruction(AdmissionPolicy):
    """Fails when it is made."""

    api = (1, 0)

    def __init__(self) -> None:
        raise OSError("no such table")


def in_engine() -> bool:
    """Not in the scratch process that tries a candidate first: so that the fault shows where it hurts."""
    return "kvyard.engine.loop" in sys.modules


class NeverConstructed(AdmissionPolicy):
    """Is never done with being made, whatever it is told."""

    api = (1, 0)

    def __init__(self) -> None:
        super().__init__()
        while in_engine():
            try:
                while True:
                    pass
            except BaseException:
                continue


class CrashesInConstruction(AdmissionPolicy):
    """Takes the engine down while it is made."""

    api = (1, 0)

    def __init__(self) -> None:
        super().__init__()
        if in_engine():
            ctypes.string_at(0)


class StuckInConstruction(AdmissionPolicy):
    """A C loop that never looks at signals, while it is made."""

    api = (1, 0)

    def __init__(self) -> None:
        super().__init__()
        if in_engine():
            deque(itertools.repeat(0), maxlen=0)


class FailsInAdopt(AdmissionPolicy):
    """Fails when it is shown the live requests."""

    api = (1, 0)

    def adopt(self, views: Sequence[RequestView]) -> None:
        raise KeyError(views[0].id)


class CrashesInAdoption(AdmissionPolicy):
    """Takes the engine down while it is shown the live requests, before it is in charge."""

    api = (1, 0)

    def adopt(self, views: Sequence[RequestView]) -> None:
        ctypes.string_at(0)


class FailsInExport(AdmissionPolicy):
    """Fails when it is asked for its state."""

    api = (1, 0)

    def admit(self, s: Snapshot) -> Admission:
        return Admission(s.waiting)

    def export_state(self) -> PolicyState | None:
        raise RuntimeError("nothing to tell")
