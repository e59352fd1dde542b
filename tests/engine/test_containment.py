"""What a policy does to the process is refused, noticed and put right; what others do is left alone.

An audit hook cannot be taken out again, so each case runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import gc, os, resource, signal, socket, subprocess, sys, threading, time, types
from kvyard.core.interrupt import SignalTimer
from kvyard.engine.containment import HEADROOM, ProcessContainment
import kvyard.core.pool

timer = SignalTimer()
inside = ProcessContainment(timer)

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
        ("lambda: sys.setrecursionlimit(10**9)", ("Refused", "tampered")),
        ("lambda: gc.freeze()", ("Refused", "tampered")),
        ("lambda: gc.unfreeze()", ("Refused", "tampered")),
        ("lambda: sys.settrace(print)", ("Refused", "tampered")),
        ("lambda: sys.setprofile(print)", ("Refused", "tampered")),
        ("lambda: os.environ.update(A='b')", ("Refused", "tampered")),
        ("lambda: os.environ.clear()", ("Refused", "tampered")),
        ("lambda: os.chdir('/')", ("Refused", "tampered")),
        ("lambda: os.kill(os.getpid(), signal.SIGTERM)", ("Refused", "tampered")),
        ("lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", ("Refused", "tampered")),
        ("lambda: gc.disable()", ("", "tampered")),
        ("lambda: gc.set_threshold(1)", ("", "tampered")),
        ("lambda: sys.setswitchinterval(1.0)", ("", "tampered")),
        ("lambda: signal.signal(signal.SIGTERM, print)", ("", "tampered")),
        ("lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL)", ("", "tampered")),
        ("lambda: gc.get_stats()", ("", None)),
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


def test_settings_are_put_right_and_named() -> None:
    code = """
def act():
    gc.disable()
    gc.set_threshold(5, 6, 7)
    sys.setswitchinterval(1.0)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
before = gc.get_threshold(), sys.getswitchinterval(), signal.getsignal(signal.SIGPIPE)
inside.look()
act()
print(inside.breach(True).what)
print((gc.get_threshold(), sys.getswitchinterval(), signal.getsignal(signal.SIGPIPE)) == before, gc.isenabled())
print(inside.breach(True))
"""
    assert run(code).splitlines() == [
        "changed the threads' interval (sys.setswitchinterval), the garbage collector (gc.disable), "
        "the garbage collector (gc.set_threshold), the handler of SIGPIPE",
        "True True",
        "None",
    ]


def test_tampering_of_several_kinds_is_put_right_and_named_together() -> None:
    code = """
original = kvyard.core.pool
def act():
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.disable()
    sys.modules['kvyard.core.pool'] = types.ModuleType('x')
timer.arm(lambda frame: None, 10**9, 10**9)
inside.open()
act()
print(inside.breach(True).what)
print(signal.getitimer(signal.ITIMER_REAL)[1], gc.isenabled(), sys.modules['kvyard.core.pool'] is original)
"""
    assert run(code).splitlines() == [
        "switched the guard's timer off and changed the garbage collector (gc.disable) "
        "and replaced a module of kvyard",
        "1.0 True True",
    ]


@pytest.mark.parametrize("method", ["admit", "key"])
def test_what_a_policy_changed_beside_what_was_noticed_does_not_stay(method: str) -> None:
    """Of keys only what was refused is looked for after the call, and the next window takes what is for right."""
    code = f"""
from kvyard.core.guard import Fault, Guard
from kvyard.policy import Policy
class Changes(Policy):
    kind = "admission"
    def admit(self):
        gc.set_threshold(1)
        try:
            open("/dev/null")
        except BaseException:
            pass
    key = admit
guard = Guard(clock_ns=time.perf_counter_ns, cpu_ns=time.thread_time_ns, timer=timer, containment=inside)
before = gc.get_threshold()
with guard.armed():
    try:
        guard.call("admission", Changes(), "{method}", lambda value: value)
    except Fault as fault:
        print(fault.code, gc.get_threshold() == before)
"""
    assert run(code) == "forbidden True"


def test_what_the_engine_changes_between_two_calls_is_nobodys_fault() -> None:
    code = """
gc.disable()
sys.setrecursionlimit(5000)
print(policy(lambda: None), gc.isenabled(), sys.getrecursionlimit())
"""
    assert run(code) == "('', None) False 5000"


def test_what_the_engine_changed_since_the_last_call_is_nobodys_fault_even_without_another_call() -> None:
    says = run("""
from kvyard.core.guard import Fault, Guard
from kvyard.policy import Admission, AdmissionPolicy

class Theirs(AdmissionPolicy):
    def admit(self, s):
        return Admission(())

guard, theirs = Guard(clock_ns=time.monotonic_ns, containment=inside), Theirs()
with guard.armed():
    guard.call("admission", theirs, "admit", lambda value: value, None)
gc.disable()
with guard.armed():
    guard.examine("admission", theirs)
guard.settled()
theirs.admit = None
with guard.armed():
    try:
        guard.call("admission", theirs, "admit", lambda value: value, None)
    except Fault as fault:
        print(fault.code, gc.isenabled())
""")
    assert says == "raised False"


def test_parameters_and_declarations_are_contained_like_decisions() -> None:
    code = """
from kvyard.core.advice import builtin_set
from kvyard.core.guard import Guard
from kvyard.core.plan import Limits
from kvyard.core.scheduler import Scheduler
from kvyard.policy import Admission, AdmissionPolicy, PolicyParams, PreemptionPolicy, Victims, live

class Hoards(AdmissionPolicy):
    class Params(PolicyParams):
        weight: float = live(1.0, ge=0, doc="x")
    def set_params(self, values):
        super().set_params(values)
        self.table = bytearray(3 << 30)
    def admit(self, s):
        return Admission(())

class Switches(PreemptionPolicy):
    @property
    def lookahead(self):
        gc.enable()
        return 1
    def victims(self, s, short, who, cause):
        return Victims(())

gc.disable()
guard = Guard(clock_ns=time.perf_counter_ns, cpu_ns=time.thread_time_ns, timer=timer, containment=inside)
limits = Limits(blocks=16, block_size=16, max_running=4, max_step_tokens=64, max_model_len=128)
scheduler = Scheduler(limits, builtin_set(), clock_ns=time.perf_counter_ns, guard=guard, salt=b"test")
print(scheduler.swap({"preemption": Switches()}).code, gc.isenabled())
print(scheduler.swap({"admission": Hoards()}).ok)
try:
    scheduler.set_params("admission", {"weight": 2.0})
except BaseException as fault:
    print(fault.code, [exit_.code for exit_ in scheduler.take_exits()], scheduler.policies.name("admission"))
"""
    assert run(code).splitlines() == ["tampered False", "True", "memory ['memory'] builtin"]


def test_a_functions_own_equality_is_not_asked() -> None:
    code = """
class Sly:
    def __call__(self, *args): pass
    def __eq__(self, other): raise SystemExit('asked')
    __hash__ = None
print(policy(lambda: signal.signal(signal.SIGTERM, Sly())), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
    assert run(code) == "('', 'tampered') True"


def test_wild_memory_is_refused_and_blamed_and_the_engine_may_have_it() -> None:
    code = """
print(policy(lambda: bytearray(4 << 30)), inside.out_of_memory().code)
print(len(bytearray(HEADROOM * 3 // 2)) == HEADROOM * 3 // 2)
"""
    assert run(code).splitlines() == ["('MemoryError', None) memory", "True"]


TAKEN_IN_PIECES = """
def pieces():
    kept.extend(numpy.empty(64 << 20, numpy.uint8) for _ in range(64))
def freed():
    pieces = [numpy.empty(64 << 20, numpy.uint8) for _ in range(64)]
def grows():
    while True:
        kept.append(numpy.empty(1 << 20, numpy.uint8))
def mapped():
    kept.append(mmap.mmap(-1, 8 << 30))
"""


@pytest.mark.parametrize("way", ["pieces", "freed", "grows", "mapped"])
def test_memory_taken_in_pieces_or_mapped_is_blamed(way: str) -> None:
    """Through the guard: what is kept leaves the engine room to go on in the same step."""
    code = f"""
import mmap, numpy
from kvyard.core.guard import Fault, Guard
from kvyard.policy import Policy
kept = []
{TAKEN_IN_PIECES}
class Takes(Policy):
    kind = "admission"
    def admit(self):
        return {way}()
guard = Guard(clock_ns=time.perf_counter_ns, cpu_ns=lambda: 0, timer=timer, containment=inside)
with guard.armed():
    try:
        guard.call("admission", Takes(), "admit", lambda value: value)
    except Fault as fault:
        print(fault.code, fault.message)
    print(len(bytearray(HEADROOM // 2)) == HEADROOM // 2)
"""
    told = "memory the policy took more memory than the 1024 MiB that a policy may take in admit()"
    assert run(code).splitlines() == [told, "True"]


@pytest.mark.parametrize("clause", ["except BaseException: pass", "finally: continue"])
def test_ending_code_that_catches_everything_is_no_tampering(clause: str) -> None:
    """The guard ends it with a trace function, which policies may not set."""
    code = f"""
from kvyard.core.guard import Fault, Guard
from kvyard.policy import Policy
class Loops(Policy):
    kind = "admission"
    def admit(self):
        while True:
            try: sum(range(100))
            {clause}
guard = Guard(clock_ns=time.perf_counter_ns, cpu_ns=time.thread_time_ns, timer=timer, containment=inside)
for _ in range(2):
    with guard.armed():
        try:
            guard.call("admission", Loops(), "admit", lambda value: value)
        except Fault as fault:
            print(fault.code, sys.gettrace())
"""
    assert run(code).splitlines() == ["timeout None"] * 2


def test_memory_that_the_engine_took_is_not_the_policys_fault() -> None:
    code = """
inside.open()
inside.close()
import mmap
taken = mmap.mmap(-1, HEADROOM * 9 // 10)
print(policy(lambda: bytearray(300 << 20)))
"""
    assert run(code) == "('', None)"


def test_where_the_process_has_little_left_anyhow_nobody_is_blamed() -> None:
    code = """
resource.setrlimit(resource.RLIMIT_AS, (int(open('/proc/self/statm').read().split()[0]) * 4096 + (300 << 20),) * 2)
inside = ProcessContainment(timer)
print(policy(lambda: bytearray(600 << 20)), inside.out_of_memory())
print(policy(lambda: bytearray(100 << 20)))
"""
    assert run(code).splitlines() == ["('MemoryError', None) None", "('', None)"]


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
