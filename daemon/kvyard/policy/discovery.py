"""Which policies are installed: entry points read one distribution at a time, nothing imported.

Discovery goes through the `entrypoints` package's parsing, but not through its scan, which stops at the
first malformed file and so lets one bad distribution hide all others. What cannot be read here becomes a
problem in words, and everything else is found.
"""

from __future__ import annotations

import configparser
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import entrypoints

from kvyard.policy.base import KINDS

GROUPS: dict[str, str] = {**{kind: f"kvyard.{kind}" for kind in KINDS}, "discipline": "kvyard.disciplines"}
"""Kind (or `discipline`) to the entry-point group that offers it."""
OWN_DISTRIBUTION = "kvyard"


@dataclass(frozen=True, slots=True)
class Offer:
    """One entry point: what some distribution offers under a name."""

    kind: str
    """A kind of policy, or `discipline`."""
    name: str
    module: str
    attribute: str
    distribution: str
    version: str
    root: str
    """The folder of the import path that holds the distribution's metadata."""


@dataclass(slots=True)
class Discovery:
    """Everything found, and everything that could not be read."""

    offers: dict[tuple[str, str], Offer] = field(default_factory=dict)
    """By kind and name; where two distributions offer one name, the winner."""
    problems: list[str] = field(default_factory=list)

    def names(self, kind: str) -> list[str]:
        """Names offered for a kind, sorted."""
        return sorted(name for found, name in self.offers if found == kind)


def discover(path: Sequence[str] | None = None) -> Discovery:
    """Read the entry points of every distribution on `path` (default: `sys.path`)."""
    found = Discovery()
    seen: set[str] = set()
    for root in dict.fromkeys(sys.path if path is None else path):
        for offer in _offers_in(root or ".", seen, found.problems):
            _settle(found, offer)
    return found


def _settle(found: Discovery, offer: Offer) -> None:
    """Keep one offer per name: kvyard's own always, otherwise the first on the import path."""
    key = (offer.kind, offer.name)
    other = found.offers.get(key)
    if other is None:
        found.offers[key] = offer
        return
    own = offer.distribution == OWN_DISTRIBUTION
    winner, loser = (offer, other) if own else (other, offer)
    found.offers[key] = winner
    why = (
        "kvyard's own name cannot be taken"
        if winner.distribution == OWN_DISTRIBUTION
        else "it comes first on the path"
    )
    found.problems.append(
        f"{offer.kind} {offer.name!r} is offered by {winner.distribution} and by {loser.distribution};"
        f" {winner.distribution} is used, since {why}"
    )


def _offers_in(root: str, seen: set[str], problems: list[str]) -> Iterator[Offer]:
    folder = Path(root)
    try:
        if folder.is_file():
            yield from _offers_in_archive(root, seen, problems)
            return
        files = _entry_point_files(folder)
    except OSError as error:
        problems.append(f"{root}: cannot be searched for policies: {error}")
        return
    for file in files:
        found = _read_distribution(file, root)
        # A distribution earlier on the path shadows a later one of the same name, as it does for imports.
        normal = re.sub(r"[-_.]+", "-", found.name).lower()
        if normal in seen:
            continue
        seen.add(normal)
        problems += found.problems
        yield from found.offers


@dataclass(slots=True)
class _Read:
    """What one distribution offers."""

    name: str
    offers: list[Offer]
    problems: list[str]


def _entry_point_files(folder: Path) -> list[Path]:
    def look() -> list[Path]:
        return sorted([*folder.glob("*.dist-info/entry_points.txt"), *folder.glob("*.egg-info/entry_points.txt")])

    return _remembered(_folders, folder, look)


def _read_distribution(file: Path, root: str) -> _Read:
    def read() -> _Read:
        name, version = _identity(file.parent)
        problems: list[str] = []
        try:
            config = _parser()
            config.read_string(file.read_text("utf-8"), str(file))
        except (OSError, UnicodeError, configparser.Error) as error:
            return _Read(name, [], [f"{name}: its entry points cannot be read: {_one_line(error)}"])
        return _Read(name, list(_offers_of(config, name, version, root, problems)), problems)

    return _remembered(_files, file, read)


T = TypeVar("T")
_Memory: TypeAlias = dict[Path, tuple[tuple[int, int], T]]
_folders: _Memory[list[Path]] = {}
_files: _Memory[_Read] = {}
FRESH_NS = 2_000_000_000
"""A file that changed so lately may change again without its time of change telling."""


def _remembered(memory: _Memory[T], path: Path, read: Callable[[], T]) -> T:
    """What was read from `path`, as long as it has not changed: a swap looks here between two steps.

    Reading a hundred distributions anew takes 15 ms, looking at their times of change less than one.
    """
    try:
        stat = path.stat()
    except OSError:
        return read()
    state = (stat.st_mtime_ns, stat.st_size)
    known = memory.get(path)
    if known is not None and known[0] == state:
        return known[1]
    value = read()
    if time.time_ns() - stat.st_mtime_ns > FRESH_NS:
        memory[path] = (state, value)
    else:
        memory.pop(path, None)
    return value


def _offers_in_archive(root: str, seen: set[str], problems: list[str]) -> Iterator[Offer]:
    """A zip file on the import path."""
    try:
        pairs = list(entrypoints.iter_files_distros(path=[root]))
    except Exception as error:  # whatever a foreign archive makes the parser raise concerns nobody else
        problems.append(f"{root}: its entry points cannot be read: {_one_line(error)}")
        return
    for config, distribution in pairs:
        if distribution is not None and distribution.name not in seen:
            seen.add(distribution.name)
            yield from _offers_of(config, distribution.name, distribution.version or "", root, problems)


def _offers_of(
    config: configparser.RawConfigParser, distribution: str, version: str, root: str, problems: list[str]
) -> Iterator[Offer]:
    for group in config.sections():
        if group.startswith("kvyard.") and group not in GROUPS.values():
            known = ", ".join(GROUPS.values())
            problems.append(f"{distribution}: nothing is read from the entry points {group!r}; there are {known}")
    for kind, group in GROUPS.items():
        if not config.has_section(group):
            continue
        for name, text in config.items(group, raw=True):
            try:
                point = entrypoints.EntryPoint.from_string(text, name)
            except entrypoints.BadEntryPoint:
                problems.append(f"{distribution}: {group} {name!r} is no entry point: {text!r}")
                continue
            if not point.object_name:
                problems.append(f"{distribution}: {group} {name!r} names a module, not a class in it: {text!r}")
                continue
            yield Offer(kind, name, point.module_name, point.object_name, distribution, version, root)


def _parser() -> configparser.RawConfigParser:
    parser: configparser.RawConfigParser = entrypoints.CaseSensitiveConfigParser(
        delimiters=("=",), interpolation=None
    )
    return parser


def _identity(info: Path) -> tuple[str, str]:
    """Name and version as the distribution writes them; from the folder's name where it does not."""
    fallback = entrypoints.Distribution.from_name_version(info.stem)
    name, version = fallback.name, fallback.version or ""
    for file in ("METADATA", "PKG-INFO"):
        try:
            head = (info / file).read_text("utf-8", errors="replace").split("\n\n", 1)[0]
        except OSError:
            continue
        fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line and not line.startswith(" "))
        return fields.get("Name", name).strip(), fields.get("Version", version).strip()
    return name, version


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
