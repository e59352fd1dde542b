"""An index of the test's own in place of the machine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvyard.front.models import ModelStore

from tests.front.models.index import Index, serving


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Nothing of this machine's pip settings reaches the tests."""
    with serving(Index()) as running:
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_CERT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield running


@pytest.fixture
def store(tmp_path: Path, index: Index) -> ModelStore:
    return ModelStore(tmp_path / "models", {"tiny": index.entry})
