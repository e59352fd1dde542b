"""Plugins of other people on a live daemon: made once per activation, two of one name, good beside broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.metrics import idle_again
from tests.e2e.quick_model import quick_model

COUNTED = """
import os
from kvyard.policy import Admission, AdmissionPolicy

# On a descriptor that is there already: a policy may not open one.
os.write(2, b"\\nimported {name}\\n")

class Policy(AdmissionPolicy):
    "Counts how often it is made."
    api = (1, 0)

    def __init__(self):
        super().__init__()
        os.write(2, b"\\nmade {name}\\n")

    def admit(self, s):
        return Admission(s.waiting)
"""
DISCIPLINE = """
from kvyard.policy import Discipline

class Counted(Discipline):
    api = (1, 0)
    doc = "counted"
    parts = {"admission": ("counted", {}), "preemption": ("vllm", {}), "prefill": ("vllm", {})}
"""
GOOD = """
from kvyard.policy import Admission, AdmissionPolicy

class Policy(AdmissionPolicy):
    "A good one."
    api = (1, 0)

    def admit(self, s):
        return Admission(s.waiting)
"""
BROKEN = {
    "fails": "import os\nos.write(2, b'ran broken')\nraise RuntimeError('out of order')\n",
    "nonsense": "class Policy(\n",
    "constructor": GOOD.replace(
        "    def admit", "    def __init__(self):\n        raise OSError('no table')\n\n    def admit"
    ),
}


def distribution(site: Path, name: str, entries: str, **modules: str) -> None:
    """What pip leaves of a distribution: its metadata and its modules."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    distribution(
        folder,
        "counted",
        "[kvyard.admission]\ncounted = counted_policy:Policy\n"
        "[kvyard.disciplines]\ncounted = counted_bundle:Counted\n",
        counted_policy=COUNTED.format(name="counted"),
        counted_bundle=DISCIPLINE,
    )
    for name in ("first", "second"):
        entries = f"[kvyard.admission]\ntwice = {name}_policy:Policy\n"
        distribution(folder, name, entries, **{f"{name}_policy": COUNTED.format(name=name)})
    for name in ("good-a", "good-z"):
        module = name.replace("-", "_")
        distribution(folder, module, f"[kvyard.admission]\n{name} = {module}:Policy\n", **{module: GOOD})
    for name, source in BROKEN.items():
        entries = f"[kvyard.admission]\nbroken-{name} = broken_{name}:Policy\n"
        distribution(folder, f"broken_{name}", entries, **{f"broken_{name}": source})
    return folder


@pytest.fixture(scope="module")
def running(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    model = quick_model(tmp_path_factory.mktemp("quick"))
    flags = ("--dtype", "float32", "--kv-blocks", "64", "--discipline", "counted")
    with daemon(*flags, model=model, env={"PYTHONPATH": str(site)}) as process:
        yield process


@pytest.fixture(autouse=True)
def with_site(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line sees the same environment as the daemon."""
    monkeypatch.setenv("PYTHONPATH", str(site))


@pytest.fixture(scope="module")
def client(running: DaemonProcess) -> Iterator[Client]:
    with Client(running.socket, timeout=60) as connected:
        yield connected


def listed(client: Client) -> dict[str, dict[str, Any]]:
    """Admission policies by name."""
    rows = client.call("policy.list")["policies"]
    return {row["name"]: row for row in rows if row["kind"] == "admission"}


def swap(client: Client, name: str) -> None:
    """Put an admission policy in charge."""
    client.call("policy.swap", {"kind": "admission", "name": name, "params": {}})


def serves(running: DaemonProcess) -> None:
    """A request gets what it asked for."""
    answer = running.complete([5, 6, 7], max_tokens=4, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4


def test_PLUGIN_03_a_policy_is_made_once_per_activation(running: DaemonProcess, client: Client) -> None:
    """At the start, on five listings, on two swaps: once per time that it is put in charge, no more."""

    def counts() -> tuple[int, int]:
        return running.log.count("\nmade counted\n"), running.log.count("\nimported counted\n")

    assert counts() == (1, 1)
    for _ in range(5):
        assert listed(client)["counted"]["active"]
    client.call("policy.show")
    serves(running)
    assert counts() == (1, 1), "looking at it makes nothing"
    for number in (2, 3):
        swap(client, "vllm")
        assert counts() == (number - 1, number - 1)
        swap(client, "counted")
        serves(running)
        assert counts() == (number, number)


def test_PLUGIN_03_of_two_that_offer_one_name_the_winner_is_stated(running: DaemonProcess, client: Client) -> None:
    assert listed(client)["twice"]["distribution"] == "first"
    problems = "\n".join(client.call("policy.list")["problems"])
    assert "admission 'twice' is offered by first and by second; first is used" in problems
    swap(client, "twice")
    assert running.log.count("\nmade first\n") == 1
    assert running.log.count("made second") == running.log.count("imported second") == 0
    serves(running)


def test_PLUGIN_04_broken_ones_leave_the_good_ones_usable(running: DaemonProcess, client: Client) -> None:
    """Listed are all of them; those that show as broken without running them say why; the good ones work."""
    rows = listed(client)
    assert {"good-a", "good-z", *(f"broken-{name}" for name in BROKEN)} <= set(rows)
    assert rows["good-a"]["problem"] == rows["good-z"]["problem"] == ""
    assert rows["broken-nonsense"]["problem"].startswith("SyntaxError in broken_nonsense.py, line 1: ")
    assert any(
        line.startswith("!") and "broken-nonsense" in line
        for line in running.cli("policy", "list").stdout.split("\n")
    )
    for good in ("good-a", "good-z"):
        for name, says in (("fails", "out of order"), ("nonsense", "SyntaxError"), ("constructor", "no table")):
            with pytest.raises(ControlError, match=says):
                swap(client, f"broken-{name}")
        swap(client, good)
        assert listed(client)[good]["active"]
        serves(running)
    assert client.status().engine.restarts == 0
    assert "ran broken" not in running.log, "nothing of theirs ever ran in the daemon"
    assert "Traceback" not in running.log
    idle_again(running)
