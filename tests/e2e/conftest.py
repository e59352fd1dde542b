"""One daemon for the tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import DaemonProcess, daemon


@pytest.fixture(scope="session")
def shared_daemon(default_model: Path) -> Iterator[DaemonProcess]:
    """A daemon in its default discipline, deterministic, with a pool of 512 blocks. Leave it as you find it."""
    flags = ("--deterministic", "--dtype", "float32", "--kv-blocks", "512", "--max-running", "32")
    with daemon(*flags, model=default_model) as running:
        yield running
