"""Where the engine keeps what it can make again: converted weights, compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """`KVYARD_CACHE_DIR`, else `kvyard` under `XDG_CACHE_HOME` or `~/.cache`; None for a user without a home."""
    if chosen := environment.get("KVYARD_CACHE_DIR"):
        return Path(chosen)
    if base := environment.get("XDG_CACHE_HOME"):
        return Path(base) / "kvyard"
    try:
        return Path.home() / ".cache" / "kvyard"
    except RuntimeError:
        return None
