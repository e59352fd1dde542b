"""Does to the process what a policy must not do."""

import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import types

import numpy as np
from kvyard.policy import Admission, Snapshot

from kvyard_faulty.trigger import FaultyAdmission


class BlocksSignal(FaultyAdmission):
    """Blocks the signal of the guard's timer."""

    def fault(self, s: Snapshot) -> Admission:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        return Admission(s.waiting)


class ReplacesHandler(FaultyAdmission):
    """Replaces the handler of the guard's timer."""

    def fault(self, s: Snapshot) -> Admission:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return Admission(s.waiting)


class StopsTimer(FaultyAdmission):
    """Switches the guard's timer off."""

    def fault(self, s: Snapshot) -> Admission:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return Admission(s.waiting)


class StartsThread(FaultyAdmission):
    """Starts a thread that computes for ever."""

    def fault(self, s: Snapshot) -> Admission:
        def spin() -> None:
            while True:
                pass

        threading.Thread(target=spin, daemon=True).start()
        return Admission(s.waiting)


class Forks(FaultyAdmission):
    """Forks the engine."""

    def fault(self, s: Snapshot) -> Admission:
        if not os.fork():
            os._exit(0)
        return Admission(s.waiting)


class RunsCommand(FaultyAdmission):
    """Runs a command, and hides that it could not."""

    def fault(self, s: Snapshot) -> Admission:
        try:
            subprocess.run(["true"], check=False)
        except BaseException:
            pass
        return Admission(s.waiting)


class OpensFile(FaultyAdmission):
    """Writes a file."""

    def fault(self, s: Snapshot) -> Admission:
        with open("/tmp/kvyard-faulty", "w") as file:
            file.write(str(s.step))
        return Admission(s.waiting)


class OpensSocket(FaultyAdmission):
    """Opens a socket."""

    def fault(self, s: Snapshot) -> Admission:
        socket.socket().close()
        return Admission(s.waiting)


class ReplacesModule(FaultyAdmission):
    """Puts another module in the place of one of kvyard's."""

    def fault(self, s: Snapshot) -> Admission:
        sys.modules["kvyard.core.pool"] = types.ModuleType("kvyard.core.pool")
        return Admission(s.waiting)


class Allocates(FaultyAdmission):
    """Takes 4 GiB."""

    def fault(self, s: Snapshot) -> Admission:
        self.hoard = bytearray(4 << 30)
        return Admission(s.waiting)


class AllocatesInPieces(FaultyAdmission):
    """Takes 4 GiB in pieces, and keeps them."""

    def fault(self, s: Snapshot) -> Admission:
        self.hoard = []
        for _ in range(64):
            self.hoard.append(np.empty(64 << 20, np.uint8))
        return Admission(s.waiting)


class AllocatesUntilItFails(FaultyAdmission):
    """Takes pieces until there are no more."""

    def fault(self, s: Snapshot) -> Admission:
        hoard = []
        while True:
            hoard.append(np.empty(16 << 20, np.uint8))


class Maps(FaultyAdmission):
    """Maps 8 GiB."""

    def fault(self, s: Snapshot) -> Admission:
        self.hoard = mmap.mmap(-1, 8 << 30)
        return Admission(s.waiting)


class SetsRecursionLimit(FaultyAdmission):
    """Lets itself recurse until the stack is full, and hides that it could not."""

    def fault(self, s: Snapshot) -> Admission:
        try:
            sys.setrecursionlimit(10**9)
        except BaseException:
            pass
        return Admission(s.waiting)


class SwitchesCollectorOn(FaultyAdmission):
    """Lets garbage be collected in the midst of the engine's steps."""

    def fault(self, s: Snapshot) -> Admission:
        gc.set_threshold(1)
        gc.enable()
        return Admission(s.waiting)


class Freezes(FaultyAdmission):
    """Hides garbage from the collector for ever."""

    def fault(self, s: Snapshot) -> Admission:
        gc.freeze()
        return Admission(s.waiting)


class Traces(FaultyAdmission):
    """Has every line that the engine runs go through it."""

    def fault(self, s: Snapshot) -> Admission:
        sys.settrace(lambda *_: None)
        return Admission(s.waiting)


class Profiles(FaultyAdmission):
    """Has every call that the engine makes go through it."""

    def fault(self, s: Snapshot) -> Admission:
        sys.setprofile(lambda *_: None)
        return Admission(s.waiting)


class SetsSwitchInterval(FaultyAdmission):
    """Changes how often threads take turns."""

    def fault(self, s: Snapshot) -> Admission:
        sys.setswitchinterval(10.0)
        return Admission(s.waiting)


class HandlesPipe(FaultyAdmission):
    """Lets a closed connection end the engine."""

    def fault(self, s: Snapshot) -> Admission:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return Admission(s.waiting)


class ClearsEnvironment(FaultyAdmission):
    """Takes the engine's environment away."""

    def fault(self, s: Snapshot) -> Admission:
        os.environ.clear()
        return Admission(s.waiting)


class Writes(FaultyAdmission):
    """Changes what it was handed: each way is closed, and the last one raises."""

    def fault(self, s: Snapshot) -> Admission:
        first = next(iter(s.running))
        for target, name in ((s, "free"), (first, "total"), (s.cols, "total"), (s.count, "finished"), (s, "running")):
            try:
                setattr(target, name, 0)
            except AttributeError:
                continue
            return Admission()
        s.cols.total[:] = 0
        return Admission(s.waiting)
