"""A real control server on a real socket, with a remembering daemon behind it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvyard.front.control.server import ControlServer

from tests.control.desk import Desk


@dataclass
class Served:
    """What a test gets."""

    path: Path
    desk: Desk
    server: ControlServer


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvyard-") as name:
        yield Path(name)


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    desk = Desk()
    server = ControlServer(folder / "control" / "kvyard.sock", "9.9.9")
    await server.start(desk)
    yield Served(server.path, desk, server)
    await server.close()
