"""The cache of converted weights: hit, miss, damage, and folders that cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from kvyard.engine import weights_cache
from kvyard.engine.cache_folder import cache_folder
from kvyard.engine.loading import load_weights
from kvyard.engine.weights import Weights

from tests.engine.tiny import LLAMA, random_tensors, write_folder, write_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("KVYARD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small GGUF."""
    return write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))


def _load(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Weights, bool]:
    """The weights, and whether they were converted."""
    steps: list[str] = []
    return load_weights(path, dtype, lambda what, fraction: steps.append(what), "both"), "converting weights" in steps


def _same(a: Weights, b: Weights) -> bool:
    return (
        a.config == b.config
        and a.eos_ids == b.eos_ids
        and set(a.tensors) == set(b.tensors)
        and all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_load_converts_nothing_and_gives_the_same(cache: Path, model: Path, dtype: torch.dtype) -> None:
    first, converted = _load(model, dtype)
    assert converted
    second, converted = _load(model, dtype)
    assert not converted
    assert _same(first, second)
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]


def test_each_type_has_a_file_of_its_own(cache: Path, model: Path) -> None:
    _load(model, torch.float32)
    weights, converted = _load(model, torch.bfloat16)
    assert converted
    assert weights.tensors["embed"].dtype == torch.bfloat16
    assert len(list(cache.iterdir())) == 2


def test_a_changed_file_is_converted_again(cache: Path, model: Path) -> None:
    old, _ = _load(model)
    write_gguf(model, LLAMA, random_tensors(LLAMA, seed=1))
    new, converted = _load(model)
    assert converted
    assert not _same(old, new)


def test_a_touched_file_of_the_same_size_is_another(model: Path) -> None:
    before = weights_cache.fingerprint(model)
    os.utime(model, ns=(1, 1))
    assert weights_cache.fingerprint(model) != before


@pytest.mark.parametrize("damage", ["truncate", "garbage", "foreign"])
def test_a_damaged_cache_file_is_as_if_it_were_not_there(cache: Path, model: Path, damage: str) -> None:
    first, _ = _load(model)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    if damage == "foreign":
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(1)}, path)
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "truncate" else b"\0" * 100)
    second, converted = _load(model)
    assert converted
    assert _same(first, second)
    assert not _load(model)[1]


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("KVYARD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert _load(model)[1]
    assert _load(model)[1]


def test_a_failed_write_leaves_nothing_behind(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(weights_cache, "save_file", fail)
    assert _load(model)[1]
    assert list(cache.iterdir()) == []


def test_folders_are_read_without_a_cache(cache: Path, tmp_path: Path) -> None:
    _load(write_folder(tmp_path / "folder", LLAMA, random_tensors(LLAMA)))
    assert not cache.exists()


def test_where_caches_lie() -> None:
    assert cache_folder({"KVYARD_CACHE_DIR": "/one", "XDG_CACHE_HOME": "/two"}) == Path("/one")
    assert cache_folder({"XDG_CACHE_HOME": "/two"}) == Path("/two/kvyard")
    assert cache_folder({}) == Path.home() / ".cache" / "kvyard"


def test_a_user_without_a_home_has_no_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("KVYARD_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder({}) is None
    assert _load(model)[1]
    assert _load(model)[1]
