"""The command line as a process, and a daemon without an engine for it to speak to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = [str(Path(sys.executable).with_name("kvyard"))]


@dataclass(frozen=True)
class Done:
    """A finished command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:  # noqa: ANN401 - a JSON value
        """Standard output as JSON."""
        return json.loads(self.out)


Cli = Callable[..., Done]


def environment(**more: str) -> dict[str, str]:
    """This environment without settings of kvyard, and without files of this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVYARD_")}
    return {**kept, "XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200", "TERM": "dumb", **more}


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    """A served control socket, one per module."""
    with tempfile.TemporaryDirectory(prefix="kvyard-") as folder:
        path = Path(folder) / "kvyard.sock"
        words = [sys.executable, "-m", "tests.control.desk", str(path)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield path
            process.terminate()


@pytest.fixture
def cli(socket: Path) -> Cli:
    """Run a command against the served socket."""

    def run(*words: str, stdin: str = "", **env: str) -> Done:
        done = subprocess.run(
            [*PROGRAM, *words], capture_output=True, text=True, input=stdin, timeout=60,
            env=environment(**{"KVYARD_SOCKET": str(socket), **env}),
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def lonely(cli: Cli, tmp_path: Path) -> Cli:
    """Run a command where no daemon is."""

    def run(*words: str, **env: str) -> Done:
        return cli(*words, **{"KVYARD_SOCKET": str(tmp_path / "none.sock"), **env})

    return run
