"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Triton settles at import time whether kernels run in its interpreter; any test module may be the first to import it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--run-slow` runs the long proofs whole; without it their short forms run alone."""
    parser.addoption("--run-slow", action="store_true", help="run the long proofs whole")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Daemons first, since they mostly wait; the long proofs left out unless asked for."""
    items.sort(key=lambda item: "e2e" not in item.path.parts)
    if config.getoption("--run-slow"):
        return
    skip = pytest.mark.skip(reason="a long proof; its short form runs, --run-slow runs it whole")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The daemon runs on asyncio alone."""
    return "asyncio"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file, from the model store (pulled once); KVYARD_TEST_MODEL names another."""
    from kvyard.front.models import DEFAULT, resolve_or_pull

    named = os.environ.get("KVYARD_TEST_MODEL")
    return Path(named) if named else resolve_or_pull(DEFAULT).path
