"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Triton settles at import time whether kernels run in its interpreter; any test module may be the first to import it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


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
