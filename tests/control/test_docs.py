"""The tables in docs/ are what the code says: a metric, setting, method or command cannot go undocumented."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
from kvyard.cli.app import MODULES, build
from kvyard.front.metrics import Metrics
from kvyard.front.settings import Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ["cli.md", "configuration.md", "control.md", "metrics.md"]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_up_to_date(page: str, tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:  # values of this very shell are no defaults
        monkeypatch.delenv(f"KVYARD_{name.upper()}", raising=False)
    text = (DOCS / page).read_text(encoding="utf-8")
    assert tables.rendered(text, tables.TABLES[page]) == text, "run `python docs/tables.py`"


def _first_cells(page: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_series_is_documented() -> None:
    names = set(re.findall(r"^# TYPE (\S+) ", Metrics("m").render().decode(), re.MULTILINE))
    assert names and names == _first_cells("metrics.md")


def test_every_setting_is_documented() -> None:
    assert set(Settings.model_fields) == _first_cells("configuration.md")


def test_every_command_is_documented() -> None:
    written = {" ".join(cell.split()[1:2]) for cell in _first_cells("cli.md")}
    assert set(MODULES) == written


CODE_AT = {"OperationError": 0, "ControlError": 0, "RegistryError": 1}
"""Where the code stands among the arguments of what an operator's call is refused with."""


def _codes_in(file: Path) -> Iterator[str]:
    """Codes that are written out in calls of CODE_AT, or as `code=` of a reply of the engine."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        at = CODE_AT.get(node.func.id, len(node.args))
        given = [*node.args[at : at + 1], *(word.value for word in node.keywords if word.arg == "code")]
        if node.func.id in (*CODE_AT, "Reply"):
            yield from (
                word.value for word in given if isinstance(word, ast.Constant) and isinstance(word.value, str)
            )


def test_every_code_of_a_refusal_is_documented() -> None:
    package = ROOT / "daemon" / "kvyard"
    files = [*package.glob("front/*.py"), *package.glob("front/control/*.py")]
    files += [package / "engine" / "control.py", package / "policy" / "registry.py"]
    codes = {code for file in files for code in _codes_in(file)}
    written = set(re.findall(r"`([\w-]+)`", (DOCS / "control.md").read_text(encoding="utf-8")))
    assert {"quarantined", "engine-lost"} <= written
    assert len(codes) > 10
    # `generate` gives those of HTTP as well.
    assert codes - written - {"context_length_exceeded"} == set()


def test_every_module_registers_what_the_index_says() -> None:
    root = typer.main.get_command(build())
    assert set(root.commands) == set(MODULES)  # type: ignore[attr-defined] # a group
    for word in MODULES:
        alone = typer.main.get_command(build(word))
        assert word in alone.commands  # type: ignore[attr-defined] # a group


def test_pages_name_no_file_that_is_missing() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([\w./-]+)\)", (DOCS / page).read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), f"{page} links to {target}"
