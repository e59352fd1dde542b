"""Takes the engine down, or makes it deaf: the supervisor has to end it and to know who it was."""

import ctypes
import itertools
import os
import signal
from collections import deque

from kvyard.policy import Admission, Snapshot

from kvyard_faulty.trigger import FaultyAdmission


class StuckInC(FaultyAdmission):
    """A C loop that never looks at signals."""

    def fault(self, s: Snapshot) -> Admission:
        deque(itertools.repeat(0), maxlen=0)
        return Admission(s.waiting)


class Segfault(FaultyAdmission):
    """Reads what is not there."""

    def fault(self, s: Snapshot) -> Admission:
        ctypes.string_at(0)
        return Admission(s.waiting)


class Exits(FaultyAdmission):
    """Leaves without a word."""

    def fault(self, s: Snapshot) -> Admission:
        os._exit(0)


class BlocksAndLoops(FaultyAdmission):
    """Makes itself deaf to the guard's timer, then loops."""

    def fault(self, s: Snapshot) -> Admission:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        while True:
            pass
