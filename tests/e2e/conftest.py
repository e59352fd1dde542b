"""One daemon for the tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.quick_model import quick_model


@pytest.fixture(scope="session")
def shared_daemon(default_model: Path) -> Iterator[DaemonProcess]:
    """A daemon in its default discipline, deterministic, with a pool of 512 blocks. Leave it as you find it."""
    flags = ("--deterministic", "--dtype", "float32", "--kv-blocks", "512", "--max-running", "32")
    with daemon(*flags, model=default_model) as running:
        yield running


@pytest.fixture(scope="session")
def quick_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick model, for daemons of a test's own."""
    return quick_model(tmp_path_factory.mktemp("quick-model"))


@pytest.fixture(scope="session")
def quick_daemon(quick_model_folder: Path) -> Iterator[DaemonProcess]:
    """A daemon with the quick model, deterministic, 16 tokens a step. Leave it as you find it."""
    flags = ("--deterministic", "--dtype", "float32", "--kv-blocks", "512", "--max-step-tokens", "16")
    with daemon(*flags, model=quick_model_folder) as running:
        yield running
