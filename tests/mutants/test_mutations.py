"""The short form of `make mutants`: every mutation still fits the code, and the test it relies on is there."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutants.__main__ import Outcome, verdict
from tests.mutants.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.fault)
def test_it_applies_and_its_test_exists(mutation: Mutation, tmp_path: Path) -> None:
    copy = tmp_path / mutation.path
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutation.path, copy)
    mutation.apply(tmp_path)
    assert copy.read_text() != (ROOT / mutation.path).read_text()
    ast.parse(copy.read_text())
    file, _, name = mutation.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_code_that_has_changed_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match=r"2 times instead of once"):
        Mutation("a fault", "a.py", "x = 1", "x = 2", "tests/a.py::test").apply(tmp_path)


@pytest.mark.parametrize(("status", "word"), [(1, "caught"), (0, "MISSED"), (None, "TOO LATE"), (4, "NOT RUN")])
def test_only_a_failing_test_has_caught_anything(status: int | None, word: str) -> None:
    assert verdict(Outcome(status, 1.0, "")) == word
