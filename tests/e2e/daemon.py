"""The real daemon as a process, for end-to-end tests: started as an operator would, spoken to over its sockets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.timing import limit

LONGEST_WAIT_S = 100.0
"""To which a busy machine may stretch a wait: shorter than the time limit of a test."""
READY = re.compile(r"kvyard is ready: (http://\S+)")


@dataclass
class DaemonProcess:
    """A running `kvyard serve`."""

    process: subprocess.Popen[str]
    socket: Path
    folder: Path
    started: float
    base: str = ""
    lines: list[str] = field(default_factory=list)
    ready_after: float = 0.0
    """Seconds from the start of the process to the ready line."""

    @property
    def log(self) -> str:
        """What it has written to standard error so far."""
        return (self.folder / "stderr").read_text()

    def get(self, path: str, timeout: float = 10.0) -> httpx.Response:
        """GET."""
        return httpx.get(self.base + path, timeout=timeout, verify=False)  # reading the certificates takes 28 ms

    def post(self, path: str, body: Any, timeout: float = 120.0) -> httpx.Response:  # noqa: ANN401 - any JSON value
        """POST of a JSON value."""
        return httpx.post(self.base + path, json=body, timeout=timeout, verify=False)

    def complete(self, prompt: str | list[int], **params: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
        """A completion that has to succeed: the parsed answer."""
        answer = self.post("/v1/completions", {"model": "smollm2-135m", "prompt": prompt, "temperature": 0, **params})
        assert answer.status_code == 200, answer.text
        parsed: dict[str, Any] = answer.json()
        return parsed

    def cli(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """`kvyard ARGUMENTS --socket ...`."""
        command = [sys.executable, "-m", "kvyard.cli.main", *arguments, "--socket", str(self.socket)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)

    def ask(self, *arguments: str) -> Any:  # noqa: ANN401 - any JSON value
        """`kvyard ARGUMENTS --json`, which has to succeed: the parsed answer."""
        done = self.cli(*arguments, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def status(self) -> dict[str, Any]:
        """`kvyard status --json`."""
        status: dict[str, Any] = self.ask("status")
        return status

    @property
    def engine_pid(self) -> int:
        """The engine's process id."""
        pid: int = self.status()["engine"]["pid"]
        return pid

    def wait_ready(self, timeout: float = 30.0) -> float:
        """Wait for `/ready`; the seconds it took."""
        began = time.monotonic()
        wait_until(lambda: self.get("/ready").status_code == 200, timeout, "the daemon to be ready")
        return time.monotonic() - began

    def stop(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,), timeout: float = 20.0) -> int:
        """Signal it and wait; the exit status."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.05)
        return self.process.wait(timeout)


def wait_until(condition: Callable[[], object], timeout: float, what: str) -> None:
    """Poll until the condition holds; fails the test after `timeout` seconds, after more on a busy machine."""
    timeout = max(timeout, min(limit(timeout), LONGEST_WAIT_S))
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout} s in vain for {what}")


def environment(folder: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    """An environment in which the daemon leaves nothing outside `folder` but its model and weight caches."""
    hooks = ("KVYARD_TEST_FAULTS", "KVYARD_TEST_CONDUCT", "KVYARD_TEST_SCRIPT")
    kept = {name: value for name, value in os.environ.items() if name not in hooks}
    added = dict(extra or {})
    if "PYTHONPATH" in added and "PYTHONPATH" in kept:  # where a mutant of kvyard stands
        added["PYTHONPATH"] += os.pathsep + kept["PYTHONPATH"]
    return {**kept, "XDG_STATE_HOME": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder), **added}


@contextlib.contextmanager
def daemon(
    *flags: str,
    env: dict[str, str] | None = None,
    model: str | Path | None = None,
    wait: bool = True,
    timeout: float = 60.0,
) -> Iterator[DaemonProcess]:
    """Run `kvyard serve` with these flags until the block ends; it is killed then if it still lives."""
    with tempfile.TemporaryDirectory(prefix="kvyard-e2e-") as name:
        folder = Path(name)
        socket = folder / "kvyard.sock"
        command = [sys.executable, "-m", "kvyard.cli.main", "serve", "--port", "0", "--socket", str(socket)]
        command += ["--model", str(model), "--served-model-name", "smollm2-135m"] if model is not None else []
        with (folder / "stderr").open("w") as errors:
            process = subprocess.Popen(
                [*command, *flags], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(folder, env)
            )
        running = DaemonProcess(process, socket, folder, time.monotonic())
        try:
            if wait:
                _await_ready(running, timeout)
            yield running
        finally:
            _end(running)


def _await_ready(running: DaemonProcess, timeout: float) -> None:
    assert running.process.stdout is not None
    stdout = running.process.stdout
    # A reader of its own, so that a silent daemon cannot hang the test.
    found = threading.Event()

    def read() -> None:
        for line in stdout:
            running.lines.append(line)
            if (match := READY.search(line)) and not found.is_set():
                running.base, running.ready_after = match[1], time.monotonic() - running.started
                found.set()

    threading.Thread(target=read, daemon=True).start()
    until = time.monotonic() + max(timeout, min(limit(timeout), LONGEST_WAIT_S))
    while not found.wait(0.05):
        assert running.process.poll() is None, f"the daemon ended with {running.process.returncode}:\n{running.log}"
        assert time.monotonic() < until, f"not ready after {timeout} s:\n{running.log}"


def _end(running: DaemonProcess) -> None:
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(running.process.pid).children(recursive=True)
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait(10)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
