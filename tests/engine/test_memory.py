"""Free memory: the machine's, and every cgroup's above this process, in a made-up file tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvyard.engine.backends.memory import available_bytes, step_bytes
from kvyard.engine.model_config import ModelConfig, Rope

_GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 16 GiB available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n", encoding="utf-8")
    return tmp_path


def _group(root: Path, name: str, limit: str, used: int, droppable: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n", encoding="utf-8")
    (folder / "memory.current").write_text(f"{used}\n", encoding="utf-8")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\n", encoding="utf-8")


def _in_group(root: Path, name: str) -> None:
    (root / "proc/self/cgroup").write_text(f"0::/{name}\n", encoding="utf-8")


def test_the_machine_alone(root: Path) -> None:
    assert available_bytes(root) == 16 * _GIB


def test_a_limit_of_the_own_group(root: Path) -> None:
    _in_group(root, "a/b")
    _group(root, "a/b", str(4 * _GIB), 1 * _GIB)
    assert available_bytes(root) == 3 * _GIB


def test_page_cache_that_can_be_dropped_does_not_count(root: Path) -> None:
    _in_group(root, "a")
    _group(root, "a", str(4 * _GIB), 3 * _GIB, droppable=2 * _GIB)
    assert available_bytes(root) == 3 * _GIB


def test_a_tighter_group_above(root: Path) -> None:
    _in_group(root, "a/b")
    _group(root, "a/b", "max", 1 * _GIB)
    _group(root, "a", str(2 * _GIB), 1 * _GIB)
    assert available_bytes(root) == 1 * _GIB


def test_use_beyond_the_limit_is_nothing_left(root: Path) -> None:
    _in_group(root, "a")
    _group(root, "a", str(1 * _GIB), 2 * _GIB)
    assert available_bytes(root) == 0


def test_the_older_hierarchy(root: Path) -> None:
    folder = root / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{3 * _GIB}\n", encoding="utf-8")
    (folder / "memory.usage_in_bytes").write_text(f"{_GIB}\n", encoding="utf-8")
    (folder / "memory.stat").write_text("total_inactive_file 0\n", encoding="utf-8")
    assert available_bytes(root) == 2 * _GIB


def test_without_any_source_nothing_is_promised(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0


def test_this_machine() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_a_step_needs_room_for_its_widest_layer_and_its_logits() -> None:
    rope = Rope(10000.0, 8)
    config = ModelConfig(
        "llama",
        97,
        32,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=64,
        max_context=256,
        norm_eps=1e-5,
        rope=rope,
    )
    layer, residual = 3 * 64 + 2 * 32, 4 * 32
    assert step_bytes(config, 2, 10, 0) == 10 * (2 * layer + residual)
    assert step_bytes(config, 2, 0, 5) == 5 * 97 * (4 + 2)
