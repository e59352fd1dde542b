"""Where the control socket and the configuration files lie, for daemon and clients alike.

Standard library only: `kvyard status` goes through here before anything heavy is imported.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from kvyard.control.regular_file import read_text

SYSTEM_SOCKET = Path("/run/kvyard/kvyard.sock")
SYSTEM_CONFIG = Path("/etc/kvyard/kvyard.toml")


def default_socket(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """The socket a daemon makes when nothing else is said: per user, or the system's one for root."""
    uid = os.getuid() if uid is None else uid
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvyard" / "kvyard.sock"
    if uid == 0:
        return SYSTEM_SOCKET
    return Path(f"/tmp/kvyard-{uid}/kvyard.sock")


def config_files(explicit: Path | None = None, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Configuration files in rising priority; an explicit one (flag or KVYARD_CONFIG) stands alone.

    Files that do not exist are left out, but for an explicit one.
    """
    if explicit is not None:
        return [explicit]
    if named := environ.get("KVYARD_CONFIG"):
        return [Path(named).expanduser()]
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    return [path for path in (SYSTEM_CONFIG, home / "kvyard" / "kvyard.toml") if _there(path)]


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder that is closed to this user
        return False


def client_socket(explicit: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The socket a client speaks to: flag, KVYARD_SOCKET, configuration, the user's, the system's.

    A configuration that cannot be read is passed over here: `kvyard config check` is what explains it.
    """
    if explicit is not None:
        return explicit
    if named := environ.get("KVYARD_SOCKET"):
        return Path(named).expanduser()
    if configured := _configured_socket(environ):
        return configured
    own = default_socket(environ)
    if not own.exists() and SYSTEM_SOCKET.exists():
        return SYSTEM_SOCKET
    return own


def _configured_socket(environ: Mapping[str, str]) -> Path | None:
    for path in reversed(config_files(None, environ)):
        try:
            value = tomllib.loads(read_text(path)).get("socket")
        except (OSError, ValueError):
            continue
        if isinstance(value, str):
            return Path(value).expanduser()
    return None
