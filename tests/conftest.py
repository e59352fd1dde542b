"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The daemon runs on asyncio alone."""
    return "asyncio"
