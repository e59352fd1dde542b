"""What a policy's source says of itself, read without importing it: listing must not run foreign code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvyard.policy.discovery import Offer


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts of a class as its source states them; empty where the source does not say."""

    doc: str = ""
    """First paragraph of the docstring, on one line."""
    api: tuple[int, int] | None = None
    problem: str = ""
    """Why the source cannot be used, as far as that shows without running it."""


def read_source(offer: Offer, path: Sequence[str] | None = None) -> SourceFacts:
    """Facts of the class that `offer` names; none if its source is not a file on the import path."""
    file = _source_of(offer, sys.path if path is None else path)
    if file is None:
        return SourceFacts()
    try:
        module = ast.parse(file.read_text("utf-8"), str(file))
    except SyntaxError as error:
        return SourceFacts(problem=f"SyntaxError in {file.name}, line {error.lineno}: {error.msg}")
    except (OSError, UnicodeError, ValueError) as error:
        return SourceFacts(problem=f"{file.name} cannot be read: {error}")
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == offer.attribute:
            return SourceFacts(_first_paragraph(ast.get_docstring(node)), _api_of(node))
    return SourceFacts()


def _source_of(offer: Offer, path: Sequence[str]) -> Path | None:
    relative = Path(*offer.module.split("."))
    for root in (offer.root, *path):
        for candidate in (
            Path(root or ".") / relative / "__init__.py",
            (Path(root or ".") / relative).with_suffix(".py"),
        ):
            if candidate.is_file():
                return candidate
    return None


def _api_of(node: ast.ClassDef) -> tuple[int, int] | None:
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            targets: list[ast.expr] = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == "api" for target in targets) and statement.value:
            return _version(statement.value)
    return None


def _version(node: ast.expr) -> tuple[int, int] | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    match value:
        case (int() as major, int() as minor):
            return major, minor
    return None


def _first_paragraph(doc: str | None) -> str:
    return " ".join((doc or "").split("\n\n", 1)[0].split())
