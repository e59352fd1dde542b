"""A third party's plugin, from `pip install` to quarantine, on a live daemon that is never restarted."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.streams import run_all, wishes
from tests.e2e.timing import limit

EXAMPLE = Path(__file__).parents[2] / "plugins" / "example"
FLAGS = ("--kv-blocks", "128", "--max-running", "16")
NAMES = {
    "admission": "example-shortest-first",
    "preemption": "example-most-blocks",
    "prefill": "example-share",
    "discipline": "example",
}


def install(source: Path, site: Path) -> None:
    """`pip install` of the example into the scratch environment, in place of the version that is there.

    With --target pip leaves the old version's metadata beside the new one's.
    """
    remove(site)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--upgrade", "--target", str(site), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def break_siblings(site: Path) -> None:
    """Distributions that could hide others: metadata that no parser takes, and a module that fails."""
    bad = {
        "no_section-1.0.dist-info": "admission = a:b\n",
        "twice-1.0.dist-info": "[kvyard.admission]\nx = a:b\nx = a:c\n",
        "percent-1.0.dist-info": "[kvyard.prefill]\ny = a:%(b\n",
        "raises-1.0.dist-info": "[kvyard.admission]\nraises-at-import = raises_at_import:Policy\n",
    }
    for folder, text in bad.items():
        (site / folder).mkdir(parents=True)
        (site / folder / "entry_points.txt").write_text(text)
        (site / folder / "METADATA").write_text(f"Name: {folder.split('-')[0]}\nVersion: 1.0\n")
    (site / "raises_at_import.py").write_text("raise RuntimeError('out of order')\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(EXAMPLE, folder)
    break_siblings(folder)
    return folder


@pytest.fixture(scope="module")
def running(site: Path, quick_model_folder: Path) -> Iterator[DaemonProcess]:
    """The quick model, in steps that last until somebody has changed the policy."""
    slow = json.dumps([{"point": "model", "action": "sleep", "seconds": 0.05}])
    env = {"PYTHONPATH": str(site), "KVYARD_TEST_FAULTS": slow}
    with daemon(*FLAGS, model=quick_model_folder, env=env) as process:
        yield process


@pytest.fixture(autouse=True)
def with_site(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line sees the same environment as the daemon."""
    monkeypatch.setenv("PYTHONPATH", str(site))


def rows(running: DaemonProcess) -> dict[tuple[str, str], dict[str, Any]]:
    listing = running.ask("policy", "list")
    return {(row["kind"], row["name"]): row for row in listing["policies"]}


def test_installed_is_listed_and_inactive_and_broken_siblings_hide_nobody(running: DaemonProcess) -> None:
    listed = rows(running)
    for kind, name in NAMES.items():
        assert listed[kind, name]["distribution"].replace("_", "-") == "kvyard-example"
        assert not listed[kind, name]["active"]
        assert listed[kind, name]["problem"] == ""
    assert listed["admission", "vllm"]["distribution"] == "kvyard"
    problems = "\n".join(running.ask("policy", "list")["problems"])
    for broken in ("no_section", "twice", "percent"):
        assert broken in problems


def test_a_module_that_fails_is_refused_and_changes_nothing(running: DaemonProcess) -> None:
    before = running.status()["policies"]
    done = running.cli("policy", "swap", "admission", "raises-at-import")
    assert done.returncode != 0
    assert "RuntimeError: out of order" in done.stderr
    assert [row["name"] for row in running.status()["policies"]] == [row["name"] for row in before]


def test_swapped_in_under_load_then_upgraded_and_swapped_again(
    running: DaemonProcess, site: Path, tmp_path: Path
) -> None:
    async def swap_under_load(kind: str, name: str) -> None:
        wanted = wishes(10, seed=71, output=(20, 40), ids=(0, 250))
        task = asyncio.create_task(run_all(running.base, wanted))
        await asyncio.to_thread(
            wait_until, lambda: value(running, "kvyard_sequences_running") > 0, limit(20), "requests to run"
        )
        result = await asyncio.to_thread(running.ask, "policy", "swap", kind, name)
        assert result["ok"]
        for got, wish in zip(await task, wanted, strict=True):
            assert (got.error, got.finishes, len(got.tokens)) == ("", ["length"], wish.max_tokens)

    asyncio.run(swap_under_load("discipline", "example"))
    charge = {row["kind"]: row for row in running.status()["policies"]}
    assert {kind: row["name"] for kind, row in charge.items()} == {k: n for k, n in NAMES.items() if k in charge}
    assert charge["admission"]["version"] == "1.0.0"
    assert charge["prefill"]["params"]["share"] == 0.5
    install(second_version(tmp_path), site)
    asyncio.run(swap_under_load("discipline", "example"))
    charge = {row["kind"]: row for row in running.status()["policies"]}
    assert charge["admission"]["version"] == "2.0.0"
    assert charge["prefill"]["params"]["share"] == 0.75
    assert running.status()["engine"]["restarts"] == 0
    idle_again(running)


def second_version(folder: Path, break_it: bool = False) -> Path:
    """The example with a new version and another share, or with a fault."""
    copy = folder / "example"
    shutil.copytree(EXAMPLE, copy)
    for path in copy.rglob("*"):
        if path.suffix in (".py", ".toml"):
            text = path.read_text().replace("1.0.0", "2.0.0").replace('"share": 0.5', '"share": 0.75')
            if break_it and path.name == "admission.py":
                text = text.replace(
                    "        return Admission(", "        raise ZeroDivisionError(s.step)\n        return Admission("
                )
            path.write_text(text)
    return copy


def test_a_faulty_version_is_put_out_then_removed_while_in_quarantine(
    running: DaemonProcess, site: Path, tmp_path: Path
) -> None:
    install(second_version(tmp_path, break_it=True), site)
    running.ask("policy", "swap", "discipline", "kvyard")
    running.ask("policy", "swap", "admission", NAMES["admission"])
    answer = running.complete([100, 101, 102], max_tokens=8, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8
    wait_until(lambda: running.status()["quarantine"], 5, "the quarantine")
    (entry,) = running.status()["quarantine"]
    assert entry["policy"] == f"admission/{NAMES['admission']}"
    assert entry["code"] == "raised"
    charge = {row["kind"]: row["name"] for row in running.status()["policies"]}
    assert charge["admission"] == "builtin"
    assert value(running, "kvyard_policy_ejections_total", kind="admission", code="raised") == 1
    refused = running.cli("policy", "swap", "admission", NAMES["admission"])
    assert refused.returncode != 0
    assert "quarantine" in refused.stderr
    assert entry["version"] == "2.0.0"
    remove(site)
    install(EXAMPLE, site)
    assert running.ask("policy", "swap", "admission", NAMES["admission"])["ok"], "another version is free"
    running.ask("policy", "swap", "admission", "vllm")
    remove(site)
    assert ("admission", NAMES["admission"]) not in rows(running)
    assert running.status()["quarantine"]
    assert running.complete([5, 6, 7], max_tokens=4)["usage"]["completion_tokens"] > 0
    released = running.cli("policy", "release", entry["policy"])
    assert released.returncode == 0, released.stderr
    assert not running.status()["quarantine"]
    running.ask("policy", "swap", "discipline", "kvyard")


def remove(site: Path) -> None:
    """`pip uninstall`, as far as a --target folder knows it."""
    for found in (*site.glob("kvyard_example*"), *site.glob("kvyard-example*")):
        shutil.rmtree(found) if found.is_dir() else found.unlink()
