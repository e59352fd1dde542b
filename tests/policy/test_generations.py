"""Module generations: a new version loads beside the old one, and a broken one changes nothing."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvyard.policy.generations import import_generation

NAME = "kvyard_test_plugin"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def write(package: Path, version: int) -> None:
    (package / "helper.py").write_text(f"VERSION = {version}\n")
    (package / "policy.py").write_text(f"from {NAME}.helper import VERSION\n\nclass Policy:\n    version = VERSION\n")


def test_a_new_version_loads_and_the_old_one_lives_on(package: Path) -> None:
    write(package, 1)
    old = import_generation(f"{NAME}.policy").Policy()
    write(package, 2)
    new = import_generation(f"{NAME}.policy").Policy()
    assert (old.version, new.version) == (1, 2)
    assert type(old) is not type(new)
    assert sys.modules[f"{NAME}.helper"].VERSION == 2


@pytest.mark.parametrize("broken", ["raise ValueError('no')", "def", "raise SystemExit(1)"])
def test_a_broken_version_changes_nothing(package: Path, broken: str) -> None:
    write(package, 1)
    before = import_generation(f"{NAME}.policy")
    (package / "policy.py").write_text(f"import {NAME}.helper\n{broken}\n")
    with pytest.raises((ValueError, SyntaxError, SystemExit)):
        import_generation(f"{NAME}.policy")
    assert sys.modules[f"{NAME}.policy"] is before
    assert importlib.import_module(f"{NAME}.helper").VERSION == 1


def test_old_generations_are_given_back(package: Path) -> None:
    write(package, 1)
    seen = [weakref.ref(import_generation(f"{NAME}.policy")) for _ in range(20)]
    gc.collect()
    assert sum(ref() is not None for ref in seen) == 1


@pytest.mark.parametrize("module", ["kvyard_policies.vllm", "json"])
def test_what_is_not_a_plugin_is_shared(module: str) -> None:
    before = importlib.import_module(module)
    assert import_generation(module) is before
    assert json is importlib.import_module("json")
