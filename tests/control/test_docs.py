"""The tables in docs/ are what the code says: a metric, setting, method or command cannot go undocumented."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer
from kvyard.cli.app import MODULES, build
from kvyard.front.metrics import Metrics
from kvyard.front.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
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
