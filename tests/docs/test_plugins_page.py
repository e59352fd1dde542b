"""docs/plugins.md: its code runs as it stands, and nothing of the policy API is missing from it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import kvyard.policy as api
import pytest
from kvyard.policy.discovery import GROUPS
from kvyard.policy.snapshot import Columns, Counts, RequestView, Snapshot, StepTime

from tests.policy.distributions import install
from tests.sim.loads import AZURE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text()
FILE = re.compile(r"^( *)```(?:toml|python)\n\1# (\S+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def files() -> dict[str, str]:
    """The page's code blocks that begin with a file name, by that name."""
    found = {}
    for indent, name, body in FILE.findall(PAGE):
        found[name] = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
    return found


def test_the_pages_code_runs(tmp_path: Path) -> None:
    for name, body in files().items():
        (tmp_path / name).write_text(body)
    assert sorted(files()) == ["my_disciplines.py", "my_policies.py", "pyproject.toml", "test_my_policies.py"]
    done = subprocess.run(
        [sys.executable, "test_my_policies.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_pages_entry_point_names_the_class() -> None:
    project = tomllib.loads(files()["pyproject.toml"])["project"]
    assert project["entry-points"]["kvyard.admission"] == {"my-watermark": "my_policies:Watermark"}


@pytest.mark.parametrize(
    ("words", "fraction", "victims"),
    [
        ("my-discipline", 0.02, "vllm"),
        ("my-discipline,admission.fraction=0.05", 0.05, "vllm"),
        ("sarathi,preemption=least-cost,admission=my-watermark,admission.fraction=0.05", 0.05, "least-cost"),
    ],
)
def test_the_pages_discipline_runs_in_the_simulator(
    tmp_path: Path, words: str, fraction: float, victims: str
) -> None:
    more = re.search(r"# also in pyproject.toml\n(.*?)```", PAGE, re.DOTALL)
    assert more is not None
    groups = tomllib.loads(files()["pyproject.toml"] + more[1])["project"]["entry-points"]
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in groups.items()
    )
    sources = {name.removesuffix(".py"): body for name, body in files().items() if name.startswith("my_")}
    install(tmp_path, "my-policies", text, modules=sources)
    done = subprocess.run(
        [sys.executable, "-m", "kvyard.cli.main", "sim", "run", str(AZURE), "--until", "5", "-d", words, "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["totals"]["finished"] == found["totals"]["requests"] > 1
    assert found["totals"]["ejected"] == []
    policies = found["policies"]
    assert (policies["admission"]["name"], policies["preemption"]["name"]) == ("my-watermark", victims)
    assert policies["admission"]["params"]["fraction"] == fraction
    assert policies["prefill"]["params"] == {"chunk": 512}


def test_the_groups_are_those_that_are_read() -> None:
    assert [group for group in GROUPS.values() if f"`{group}`" not in PAGE] == []


def public(cls: type) -> list[str]:
    """Names that a class defines for others."""
    return [name for name in vars(cls) if not name.startswith("_")]


def test_every_hook_decision_and_field_is_in_the_page() -> None:
    kinds = (api.Policy, api.AdmissionPolicy, api.PreemptionPolicy, api.PrefillPolicy, api.Discipline)
    seen = (Snapshot, RequestView, Counts, Columns, StepTime)
    names = [name for each in (*kinds, *seen) for name in public(each)]
    names += [*api.Ended._fields, *api.LinearKey._fields, "Shape", "Admission", "Victims", "nobody"]
    names += [phase.name for phase in api.Phase]
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", PAGE, re.DOTALL))
    missing = sorted({name for name in names if not re.search(rf"\b{name}\b", code)} - {"kind"})
    assert missing == [], "undocumented in docs/plugins.md"


def test_every_decision_field_has_its_meaning_in_the_docstring() -> None:
    for decision in (api.Admission, api.Victims, api.Shape):
        doc = decision.__doc__ or ""
        missing = [field for field in decision._fields if not re.search(rf"\b{field}\b", doc)]
        assert missing == [], decision.__name__
