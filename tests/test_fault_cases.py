"""Every fault case of the list has a test that carries its id."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = (TESTS / "data" / "fault_cases.txt").read_text().split()
NAME = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)


@pytest.fixture(scope="module")
def names() -> list[str]:
    return [name for path in TESTS.rglob("test_*.py") for name in NAME.findall(path.read_text(encoding="utf-8"))]


def test_the_list_is_whole() -> None:
    assert len(CASES) == len(set(CASES)) == 138


@pytest.mark.parametrize("case", CASES)
def test_it_has_a_test(case: str, names: list[str]) -> None:
    kind, number = case.split("-")
    carries = re.compile(rf"(?:^|_){kind}_{number}(?:_|$)", re.IGNORECASE)
    assert any(carries.search(name) for name in names), f"no test function carries {case} in its name"
