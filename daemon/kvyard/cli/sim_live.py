"""`kvyard sim prefill-vs-decode --live`: the disciplines in turn on a daemon, which is driven over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvyard.cli.errors import CliError
from kvyard.control.client import Client, ControlError
from kvyard.control.schema import Status, SwapResult
from kvyard.sim import disciplines, live

READY_WITHIN = 180.0
"""Seconds for a daemon of our own to load its model and become ready."""
SWAP_WITHIN = 120.0
STOP_WITHIN = 30.0


@contextmanager
def own_daemon(model: str, step_tokens: int) -> Iterator[Path]:
    """A daemon on a free port that lives as long as the block; its control socket. Raises CliError."""
    with tempfile.TemporaryDirectory(prefix="kvyard-live-") as name:
        folder = Path(name)
        socket = folder / "kvyard.sock"
        words = [sys.executable, "-m", "kvyard.cli.main", "serve", "--port", "0", "--socket", str(socket)]
        words += ["--max-step-tokens", str(step_tokens), *(["--model", model] if model else [])]
        # Its quarantine and its state must not mix with those of the operator's daemon.
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder)}
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        try:
            _await_ready(process, socket, folder / "log")
            yield socket
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    until = time.monotonic() + READY_WITHIN
    while time.monotonic() < until:
        if process.poll() is not None:
            raise CliError(f"the daemon ended before it was ready:\n{log.read_text()[-2000:]}")
        try:
            with Client(socket) as client:
                if client.status().ready:
                    return
        except ControlError:
            pass
        time.sleep(0.1)
    raise CliError(f"the daemon was not ready within {READY_WITHIN:g} s:\n{log.read_text()[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(socket: Path, names: list[str], prompts: int) -> dict[str, dict[str, Any]]:
    """Each discipline's figures on the daemon at `socket`, whose discipline and parameters are put back.

    Raises CliError.
    """
    with Client(socket, timeout=SWAP_WITHIN) as client:
        status = client.status()
        before, changed = _discipline(status), status.changed
        target = live.Target(_address(status), status.model.id, status.model.max_model_len)
        try:
            return {name: _one(client, target, name, prompts) for name in names}
        except live.LiveError as error:
            raise CliError(str(error), "`kvyard events` on that socket shows what the daemon did") from error
        finally:
            _swap(client, before, changed)


def _discipline(status: Status) -> str:
    if status.discipline is None:
        text = "the daemon's policies are mixed, no named discipline, so they could not be put back"
        raise CliError(text, "put one in charge: kvyard policy swap discipline NAME")
    return status.discipline


def _address(status: Status) -> str:
    if not status.address.startswith("http://"):
        raise CliError(f"the daemon's HTTP API is at {status.address}, and a TCP address is needed")
    return status.address


def _one(client: Client, target: live.Target, text: str, prompts: int) -> dict[str, Any]:
    choice = disciplines.parse(text)
    _swap(client, choice.name, {kind: given for kind, given in choice.changes.items() if kind not in choice.parts})
    for kind, part in choice.parts.items():
        _swap(client, part, choice.changes.get(kind, {}), kind)
    return live.measure(target, prompts)


def _swap(client: Client, name: str, params: Any, kind: str = "discipline") -> None:  # noqa: ANN401 - by kind or not
    answer = client.call("policy.swap", {"kind": kind, "name": name, "params": params})
    result = msgspec.convert(answer, SwapResult)
    if not result.ok:
        raise CliError(f"{name} was not put in charge: {result.message}", "what was in charge before still is")
