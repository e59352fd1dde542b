"""A tokenizer and a small vocabulary shared by the text tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvyard.front.text.support import TextSupport
from kvyard.front.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def text_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for converted tokenizers, apart from the user's cache."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def support(default_model: Path, text_cache: Path) -> TextSupport:
    """The default model's text side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVYARD_CACHE_DIR", str(text_cache))
        return TextSupport.load(default_model)


@pytest.fixture(scope="session")
def tokenizer(support: TextSupport) -> Tokenizer:
    """The default model's tokenizer."""
    return support.tokenizer
