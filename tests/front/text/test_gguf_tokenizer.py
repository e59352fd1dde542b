"""The cache of converted tokenizers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvyard.front.text.gguf_tokenizer import cache_root, tokenizer_folder

from tests.front.text import gguf_files


@pytest.fixture()
def model(tmp_path: Path) -> Path:
    return gguf_files.write(tmp_path / "m.gguf", gguf_files.byte_level())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVYARD_CACHE_DIR", str(folder))
    return folder


def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    assert cache_root() == cache
    monkeypatch.delenv("KVYARD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "kvyard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "kvyard"


def test_a_second_start_uses_the_first_ones_files(model: Path) -> None:
    folder = tokenizer_folder(model)
    stamp = (folder / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer_folder(model) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == stamp
    assert sorted(file.name for file in folder.parent.iterdir()) == [folder.name]


def test_a_changed_model_is_converted_anew(model: Path) -> None:
    first = tokenizer_folder(model)
    gguf_files.write(model, gguf_files.byte_level("smollm"))
    os.utime(model, ns=(1, 1))
    assert tokenizer_folder(model) != first


def test_an_unwritable_cache_is_no_reason_to_fail(model: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    folder = tokenizer_folder(model)
    assert (folder / "tokenizer.json").is_file()
    assert not folder.is_relative_to(cache)


def test_a_left_over_of_a_killed_start_is_not_taken_for_a_tokenizer(model: Path, cache: Path) -> None:
    folder = tokenizer_folder(model)
    (folder / "tokenizer.json").unlink()
    for file in folder.iterdir():
        file.unlink()
    again = tokenizer_folder(model)
    assert again == folder
    assert (again / "tokenizer.json").is_file()
