"""Never returns, in Python code: the guard ends each of these by itself."""

import contextlib
import re
import time

from kvyard.policy import Admission, Snapshot

from kvyard_faulty.trigger import FaultyAdmission


class Sleeps(FaultyAdmission):
    """Waits for something outside."""

    def fault(self, s: Snapshot) -> Admission:
        time.sleep(3600)
        return Admission(s.waiting)


class Loops(FaultyAdmission):
    """An endless loop."""

    def fault(self, s: Snapshot) -> Admission:
        while True:
            pass


class Catches(FaultyAdmission):
    """An endless loop that catches everything."""

    def fault(self, s: Snapshot) -> Admission:
        while True:
            try:
                sum(range(100))
            except BaseException:
                pass


class Suppresses(FaultyAdmission):
    """The same with a context manager."""

    def fault(self, s: Snapshot) -> Admission:
        while True:
            with contextlib.suppress(BaseException):
                sum(range(100))


class Finally(FaultyAdmission):
    """The same with a `continue` that swallows what is raised."""

    def fault(self, s: Snapshot) -> Admission:
        while True:
            try:
                sum(range(100))
            finally:
                continue


class Regex(FaultyAdmission):
    """A regular expression that backtracks for longer than the universe lasts."""

    def fault(self, s: Snapshot) -> Admission:
        re.match(r"(a+)+$", "a" * 64 + "b")
        return Admission(s.waiting)
