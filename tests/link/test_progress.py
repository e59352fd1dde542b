"""The progress page: what the engine writes is what the supervisor reads, over a process's death too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
from kvyard.link.progress import MAX_IDS, EnginePhase, ProgressPage

WRITER = """
import os, sys, time, numpy as np
from kvyard.link.progress import EnginePhase, ProgressPage
page = ProgressPage(int(sys.argv[1]))
page.begin(os.getpid(), 1)
page.step(41, 2)
page.ids(np.array([7, 9], np.int64))
page.policy("admission/slow", 3)
print("written", flush=True)
time.sleep(60)
"""


def test_reads_nothing_before_the_engine_said_anything() -> None:
    fd = ProgressPage.create()
    page = ProgressPage(fd)
    assert page.read() is None
    page.close()
    os.close(fd)


def test_survives_the_writers_death() -> None:
    fd = ProgressPage.create()
    os.set_inheritable(fd, True)
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"written\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    page = ProgressPage(fd)
    seen = page.read()
    assert seen is not None
    assert (seen.pid, seen.step, seen.ids) == (child.pid, 41, (7, 9))
    assert (seen.phase, seen.policy, seen.in_step) == (EnginePhase.POLICY, "admission/slow", True)
    child.stdout.close()
    page.close()
    os.close(fd)


def test_tells_idle_from_work() -> None:
    fd = ProgressPage.create()
    page = ProgressPage(fd)
    page.begin(1, 10)
    for phase in EnginePhase:
        page.phase(phase, 20)
        seen = page.read()
        assert seen is not None
        assert seen.phase is phase
        assert seen.in_step == (EnginePhase.SCHEDULE <= phase <= EnginePhase.OUTPUTS)
        assert seen.phase_started == 20
    page.close()
    os.close(fd)


def test_a_candidate_is_named_and_afterwards_it_goes_on_as_before() -> None:
    fd = ProgressPage.create()
    page = ProgressPage(fd)
    page.begin(1, 10)
    page.phase(EnginePhase.CONTROL, 20)
    with page.candidate("admission/new"):
        seen = page.read()
        assert seen is not None
        assert (seen.phase, seen.policy, seen.in_step) == (EnginePhase.CANDIDATE, "admission/new", False)
    seen = page.read()
    assert seen is not None
    assert seen.phase is EnginePhase.CONTROL
    page.close()
    os.close(fd)


def test_more_sequences_than_places_are_cut() -> None:
    fd = ProgressPage.create()
    page = ProgressPage(fd)
    page.begin(1, 0)
    page.ids(np.arange(MAX_IDS + 5, dtype=np.int64))
    seen = page.read()
    assert seen is not None
    assert len(seen.ids) == MAX_IDS
    page.close()
    os.close(fd)


def test_a_long_policy_name_is_cut_not_spilled() -> None:
    fd = ProgressPage.create()
    page = ProgressPage(fd)
    page.begin(1, 0)
    page.ids(np.array([5], np.int64))
    page.policy("admission/" + "x" * 500, 0)
    seen = page.read()
    assert seen is not None
    assert seen.policy == ("admission/" + "x" * 500)[:128]
    assert seen.ids == (5,)
    page.close()
    os.close(fd)
