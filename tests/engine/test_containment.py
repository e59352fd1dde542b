"""What a policy does to the process is refused, noticed and put right; what others do is left alone.

An audit hook cannot be taken out again, so each case runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import os, resource, signal, socket, subprocess, sys, threading, time, types
from kvyard.core.interrupt import SignalTimer
from kvyard.engine.containment import HEADROOM, ProcessContainment
import kvyard.core.pool

timer = SignalTimer()
inside = ProcessContainment(timer, time.perf_counter_ns)

def policy(act):
    "Run `act` as the guard runs a policy; what was noticed."
    timer.arm(lambda frame: None, 10**9, 10**9)
    inside.open()
    inside.active = True
    try:
        act()
    except BaseException as error:
        raised = type(error).__name__
    else:
        raised = ""
    finally:
        inside.active = False
    breach = inside.breach(True)
    timer.disarm()
    inside.close()
    return raised, breach and breach.code
"""


def run(code: str) -> str:
    """The output of `code` behind the prelude."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("lambda: threading.Thread(target=print).start()", ("Refused", "spawned")),
        ("lambda: os.fork()", ("Refused", "spawned")),
        ("lambda: subprocess.run(['true'])", ("Refused", "spawned")),
        ("lambda: os.system('true')", ("Refused", "spawned")),
        ("lambda: open('/dev/null')", ("Refused", "forbidden")),
        ("lambda: os.open('/dev/null', os.O_RDONLY)", ("Refused", "forbidden")),
        ("lambda: open('/tmp/kvyard-never.py', 'w')", ("Refused", "forbidden")),
        ("lambda: os.open('/tmp/kvyard-never.py', os.O_WRONLY | os.O_CREAT)", ("Refused", "forbidden")),
        ("lambda: socket.socket()", ("Refused", "forbidden")),
        ("lambda: sys.addaudithook(print)", ("Refused", "forbidden")),
        ("lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN)", ("", "tampered")),
        ("lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})", ("", "tampered")),
        ("lambda: signal.setitimer(signal.ITIMER_REAL, 0)", ("", "tampered")),
        ("lambda: sys.modules.update({'kvyard.core.pool': types.ModuleType('x')})", ("", "tampered")),
        ("lambda: sys.modules.pop('kvyard.core.pool')", ("", "tampered")),
        ("lambda: __import__('wave')", ("", None)),
        ("lambda: sorted(range(1000))", ("", None)),
        ("lambda: 1 / 0", ("ZeroDivisionError", None)),
    ],
)
def test_what_a_policy_does_is_noticed(act: str, expected: tuple[str, str | None]) -> None:
    assert run(f"print(policy({act}))") == str(expected)


def test_a_refusal_that_is_swallowed_is_noticed_all_the_same() -> None:
    code = """
def act():
    try:
        open('/dev/null')
    except BaseException:
        pass
print(policy(act), policy(lambda: None))
"""
    assert run(code) == "('', 'forbidden') ('', None)"


def test_everything_is_put_right() -> None:
    code = """
original = kvyard.core.pool
def act():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    sys.modules['kvyard.core.pool'] = types.ModuleType('x')
policy(act)
print(sys.modules['kvyard.core.pool'] is original, policy(lambda: None))
"""
    assert run(code) == "True ('', None)"


def test_wild_memory_is_refused_and_blamed_and_the_engine_may_have_it() -> None:
    code = """
print(policy(lambda: bytearray(4 << 30)), inside.out_of_memory().code)
print(len(bytearray(HEADROOM * 3 // 2)) == HEADROOM * 3 // 2)
"""
    assert run(code).splitlines() == ["('MemoryError', None) memory", "True"]


def test_memory_that_the_engine_took_is_not_the_policys_fault() -> None:
    code = """
inside.open()
inside.close()
import mmap
taken = mmap.mmap(-1, HEADROOM * 9 // 10)
print(policy(lambda: bytearray(300 << 20)), inside.out_of_memory())
"""
    assert run(code) == "('MemoryError', None) None"


def test_the_engine_itself_may_do_all_of_it() -> None:
    code = """
threading.Thread(target=lambda: None).start()
open('/dev/null').close()
socket.socket().close()
subprocess.run(['true'], check=True)
print(inside.breach(False))
"""
    assert run(code) == "None"


def test_a_planted_modules_own_equality_is_not_asked() -> None:
    code = """
class Sly(types.ModuleType):
    def __eq__(self, other):
        raise SystemExit('asked')
    __hash__ = None
print(policy(lambda: sys.modules.update({'kvyard.core.pool': Sly('x')})))
"""
    assert run(code) == "('', 'tampered')"
