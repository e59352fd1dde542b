"""A plugin that is loaded anew a hundred times leaves nothing behind, in the engine's way of collecting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "plugins" / "example"
PROGRAM = """
import gc, resource, sys, time
from pathlib import Path
from kvyard.core.plan import Limits, SequenceSpec
from kvyard.core.remains import MOST_KEPT
from kvyard.core.scheduler import Scheduler
from kvyard.engine.policies import Loader

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

loader = Loader()
limits = Limits(blocks=64, block_size=4, max_running=4, max_step_tokens=64, max_model_len=64)
scheduler = Scheduler(limits, loader.at_start("kvyard", {}, []), clock_ns=time.perf_counter_ns)
for number in range(1, 9):
    scheduler.add(SequenceSpec(number, number, number, float(number), 8, max_new=8))

def reload(count):
    for _ in range(count):
        changes, names, discipline = loader.candidate("discipline", "example", {}, [])
        assert scheduler.swap(changes, names=names, discipline=discipline).ok
        scheduler.schedule(0.0)
        scheduler.abandon(scheduler._open)
    for _ in range(MOST_KEPT + 1):
        scheduler.guard.collect(lambda kind, policy: None)
    return len(gc.get_objects()), resident()

gc.disable()
reload(20)
objects, bytes_before = reload(10)
objects_after, bytes_between = reload(100)
_, bytes_after = reload(100)
# The allocator settles in one of the rounds: a leak would show in both.
print(objects_after - objects, min(bytes_between - bytes_before, bytes_after - bytes_between))
"""


def test_a_hundred_reloads_leave_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path), str(EXAMPLE)], check=True, capture_output=True)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    objects, growth = map(int, done.stdout.split())
    assert objects < 200, "objects kept per hundred reloads"
    assert growth < 4 << 20, "bytes kept per hundred reloads"
