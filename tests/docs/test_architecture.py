"""docs/architecture.md: its diagrams are the tables, and the files it names are there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.diagrams import PAGE, updated

ROOT = Path(__file__).parents[2]


def test_the_diagrams_are_those_of_the_tables() -> None:
    page = PAGE.read_text()
    assert updated(page) == page, "run `python -m tests.docs.diagrams`"
    assert page.count("stateDiagram-v2") == 3


def test_every_file_it_names_exists() -> None:
    named = re.findall(r"`((?:front|core|engine|link|policy)/[\w/]*(?:\.py)?)`", PAGE.read_text())
    assert len(named) > 15
    missing = [name for name in named if not (ROOT / "daemon" / "kvyard" / name).exists()]
    assert missing == []
