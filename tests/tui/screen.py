"""What tests share: a daemon and a screen on it, the screen as a grid of text, and waiting for something to be so."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from kvyard_tui.app import TopApp
from kvyard_tui.widgets.table import RequestTable
from rich.cells import cell_len
from rich.console import Console
from textual.pilot import Pilot

from tests.e2e.timing import limit
from tests.tui.yard import Daemon


@contextlib.contextmanager
def socket_dir() -> Iterator[Path]:
    """A folder whose name is short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="kvy"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Daemon]:  # noqa: ANN401 - whatever Daemon takes
    """A daemon that listens."""
    with socket_dir() as folder:
        daemon = Daemon(folder / "k.sock", **options)
        await daemon.start()
        try:
            yield daemon
        finally:
            await daemon.stop()


@contextlib.asynccontextmanager
async def watching(
    path: Path,
    size: tuple[int, int] = (80, 24),
    **options: Any,  # noqa: ANN401 - whatever TopApp takes
) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """The screen on a socket, driven by a pilot."""
    app = TopApp(path, **options)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield app, pilot


@contextlib.asynccontextmanager
async def watched(
    size: tuple[int, int] = (80, 24),
    *,
    rows: int = 5,
    role: str = "admin",
    **options: Any,  # noqa: ANN401 - whatever TopApp takes
) -> AsyncIterator[tuple[Daemon, TopApp, Pilot[None]]]:
    """A daemon and a screen that has its data."""
    async with serving(rows=rows, role=role) as daemon, watching(daemon.path, size, **options) as (app, pilot):
        await until(pilot, lambda: len(app.screen.query_one(RequestTable).visible_rows) == rows)
        await pilot.pause()
        yield daemon, app, pilot


def grid(app: TopApp) -> list[str]:
    """Every line of the screen as text, dialogs included."""
    width, height = app.size
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, record=True)
    # The call that Textual's own screenshot makes; an SVG of it would change with every release.
    update = app.screen._compositor.render_update(full=True, screen_stack=app._background_screens)
    console.print(update)
    return console.export_text(styles=False).splitlines()[:height]


def text(app: TopApp) -> str:
    """The whole screen."""
    return "\n".join(grid(app))


def line_with(app: TopApp, part: str) -> str:
    """The first line that holds a text."""
    found = next((line for line in grid(app) if part in line), None)
    assert found is not None, f"{part!r} is not on screen:\n{text(app)}"
    return found


def assert_whole(app: TopApp) -> None:
    """Every line fills the width of the terminal exactly."""
    width, height = app.size
    lines = grid(app)
    assert len(lines) == height
    assert {cell_len(line) for line in lines} == {width}


async def until(pilot: Pilot[None], so: Callable[[], bool], limit_s: float = 8.0) -> None:
    """Wait until something is so; fail when it is not in time, for which a busy machine gets more."""
    async with asyncio.timeout(max(limit_s, min(limit(limit_s), 60.0))):
        while not so():
            await pilot.pause(0.05)


async def until_text(app: TopApp, pilot: Pilot[None], part: str, limit_s: float = 8.0) -> None:
    """Wait until a text stands on screen."""
    try:
        await until(pilot, lambda: part in text(app), limit_s)
    except TimeoutError:
        raise AssertionError(f"{part!r} did not appear:\n{text(app)}") from None


async def allow_changes(app: TopApp, pilot: Pilot[None]) -> None:
    """`w`, and yes."""
    await pilot.press("w")
    await until_text(app, pilot, "Allow changes in this session?")
    await pilot.press("right", "enter")
    await until(pilot, lambda: app.writable)
    await pilot.pause(0.1)
