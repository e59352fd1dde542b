"""What a policy's source says of itself, read without importing it: listing must not run foreign code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from kvyard.policy.discovery import Offer

SECRETIVE = frozenset({"globals", "vars", "locals", "setattr", "exec", "eval", "__import__"})
"""Functions through which a module may get names that its source does not show."""


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts of a class as its source states them; empty where the source does not say."""

    doc: str = ""
    """First paragraph of the docstring, on one line."""
    api: tuple[int, int] | None = None
    problem: str = ""
    """Why the source cannot be used, as far as that shows without running it."""


def read_source(offer: Offer, path: Sequence[str] | None = None) -> SourceFacts:
    """Facts of the class that `offer` names; none if its source is not a file on the import path.

    A problem is only what is certain: where a source leaves it open whether it can be used, nothing is said.
    """
    file = _source_of(offer, sys.path if path is None else path)
    if file is None:
        known = _module_is_there(offer.module, path)
        return SourceFacts(problem="" if known else f"there is no module {offer.module!r} to import")
    try:
        module = ast.parse(file.read_text("utf-8"), str(file))
    except SyntaxError as error:
        return SourceFacts(problem=f"SyntaxError in {file.name}, line {error.lineno}: {error.msg}")
    except (OSError, UnicodeError, ValueError) as error:
        return SourceFacts(problem=f"{file.name} cannot be read: {error}")
    problem = _missing_import(module, offer, path) or _missing_class(module, offer, file)
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == offer.attribute:
            return SourceFacts(_first_paragraph(ast.get_docstring(node)), _api_of(node), problem)
    return SourceFacts(problem=problem)


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


def _module_is_there(name: str, path: Sequence[str] | None) -> bool:
    """The import system finds a module; no package on the way to it is imported."""
    try:
        if _found(name, path):
            return True
        invalidate_caches()  # the finders may remember a folder as it was before an installation
        return _found(name, path)
    except Exception:  # a finder of somebody else's failed: that says nothing
        return True


def _found(name: str, path: Sequence[str] | None) -> bool:
    top, *below = name.split(".")
    spec = find_spec(top) or PathFinder.find_spec(top, path)
    for part in below:
        if spec is None:
            return False
        spec = _inside(spec, f"{spec.name}.{part}")
    return spec is not None


def _inside(package: ModuleSpec, name: str) -> ModuleSpec | None:
    places = package.submodule_search_locations
    return None if places is None else PathFinder.find_spec(name, list(places))


def _missing_import(module: ast.Module, offer: Offer, path: Sequence[str] | None) -> str:
    """What the module cannot do without and is not installed; empty when there is no such thing."""
    if any(isinstance(node, ast.Attribute) and _of_sys(node) for node in ast.walk(module)):
        return ""  # it may see to it that more can be imported
    own = offer.module.partition(".")[0]
    for name in _imported_always(module):
        top = name.partition(".")[0]
        if top != own and not _module_is_there(top, path):
            return f"it imports {top!r}, which is not installed"
    return ""


def _of_sys(node: ast.Attribute) -> bool:
    return (
        isinstance(node.value, ast.Name) and node.value.id == "sys" and node.attr in ("path", "modules", "meta_path")
    )


def _imported_always(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def _missing_class(module: ast.Module, offer: Offer, file: Path) -> str:
    if "." in offer.attribute:  # a submodule's import leaves its name here without a word of source
        return ""
    bound = _bound_names(module)
    return (
        "" if bound is None or offer.attribute in bound else f"there is no class {offer.attribute!r} in {file.name}"
    )


def _bound_names(module: ast.Module) -> set[str] | None:
    """Names of the module's own scope; None where its source does not tell them all."""
    names: set[str] = set()
    todo: list[ast.AST] = list(module.body)
    while todo:
        match todo.pop():
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case node:
                todo += ast.iter_child_nodes(node)
    hidden = any(
        isinstance(node, ast.Global | ast.Match)
        or (isinstance(node, ast.Name) and node.id in SECRETIVE)
        or (isinstance(node, ast.Attribute) and _of_sys(node))
        for node in ast.walk(module)
    )
    return None if hidden or names & {"*", "__getattr__"} else names


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
