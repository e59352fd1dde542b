"""How much memory this process may still take: the machine's, the cgroups', and what others use already.

And how much of it a step needs, which the KV pool must leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvyard.engine.model_config import ModelConfig


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without pushing anybody out.

    The least of `MemAvailable` and, for this process's cgroup and each above it, limit minus use (page cache
    that can be dropped at once does not count as use). `root` is for tests.
    """
    rooms = [*_machine(root), *_cgroup_v2(root), *_cgroup_v1(root)]
    return max(0, min(rooms)) if rooms else 0


def step_bytes(config: ModelConfig, item: int, tokens: int, rows: int) -> int:
    """Activations alive at once in a step of `tokens` tokens with `rows` rows of logits; an element has `item` bytes.

    The widest layer's, the residual stream in float32, and the logits twice.
    """
    wide = max(3 * config.intermediate, 2 * config.qkv_rows) + 2 * config.hidden
    return tokens * (wide * item + 4 * config.hidden) + rows * config.vocab_size * (4 + item)


def _machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup_v2(root: Path) -> Iterator[int]:
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        if not line.startswith("0::"):
            continue
        folder = mount / line[3:].strip().lstrip("/")
        while True:
            limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
            if limit is not None and used is not None:
                yield limit - used + _statistic(folder / "memory.stat", "inactive_file")
            if folder == mount or mount not in folder.parents:
                return
            folder = folder.parent


def _cgroup_v1(root: Path) -> Iterator[int]:
    folder = root / "sys/fs/cgroup/memory"
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is not None and used is not None:
        yield limit - used + _statistic(folder / "memory.stat", "total_inactive_file")


def _statistic(path: Path, name: str) -> int:
    for line in _lines(path):
        if line.startswith(name + " "):
            return int(line.split()[1])
    return 0


def _number(path: Path) -> int | None:
    """The number in a file; None for `max` or no such file."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
