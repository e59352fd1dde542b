"""Policies that were put out and may not come back yet: kept on disk, so that a restart does not forget.

The first ejection keeps a policy out for BASE_S seconds, each further one twice as long as the one
before, up to LONGEST_S. An operator can release it at any time, and another version of it is free.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvyard.control.schema import QuarantineEntry

BASE_S = 60.0
LONGEST_S = 24 * 3600.0


class Quarantine:
    """Entries by `kind/name` and version; times are since the epoch, because they outlive the machine's uptime."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._entries: dict[tuple[str, str], QuarantineEntry] = {}
        self.problem = ""
        """Why the file could not be read or written; empty when all is well."""
        self._load()

    def add(self, policy: str, code: str, message: str, version: str = "") -> QuarantineEntry:
        """Put a policy away, in this version or, where it is not known, in all; a repeated offender for longer."""
        before = self._entries.get((policy, version))
        times = before.times + 1 if before is not None else 1
        until = self._clock() + min(BASE_S * 2 ** (times - 1), LONGEST_S)
        entry = QuarantineEntry(policy, code, message, until, times, version)
        self._entries[policy, version] = entry
        self._save()
        return entry

    def release(self, policy: str) -> bool:
        """Let a policy be loaded again in every version, its record wiped; False when it was not away."""
        known = [key for key in self._entries if key[0] == policy]
        if not known:
            return False
        for key in known:
            del self._entries[key]
        self._save()
        return True

    def blocked(self, policy: str, version: str = "") -> QuarantineEntry | None:
        """The entry if the policy may not be loaded now in this version; one that is not known may be any."""
        return next((entry for entry in self.active() if entry.policy == policy and concerns(entry, version)), None)

    def active(self) -> list[QuarantineEntry]:
        """Those that may not be loaded now."""
        now = self._clock()
        return [entry for entry in self._entries.values() if entry.until is None or entry.until > now]

    def _load(self) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            entries = msgspec.json.decode(self._path.read_bytes(), type=list[QuarantineEntry])
        except (OSError, msgspec.MsgspecError) as error:
            # A daemon that does not start because of its own notes would be worse than one that forgets them.
            self.problem = f"cannot read {self._path}: {error}; starting with an empty quarantine"
            return
        self._entries = {(entry.policy, entry.version): entry for entry in entries}

    def _save(self) -> None:
        if self._path is None:
            return
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new.open("wb") as file:
                file.write(msgspec.json.encode(list(self._entries.values())))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            self.problem = f"cannot write {self._path}: {error}; the quarantine will not survive a restart"
            with contextlib.suppress(OSError):
                new.unlink()


def concerns(entry: QuarantineEntry, version: str) -> bool:
    """Whether what is installed in this version is what was put out; where either is not known, it may be."""
    return not entry.version or not version or entry.version == version


def state_file() -> Path:
    """Where the quarantine is kept: $STATE_DIRECTORY (systemd) or $XDG_STATE_HOME/kvyard."""
    base = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if base:
        return Path(base) / "quarantine.json"
    home = os.environ.get("XDG_STATE_HOME")
    root = Path(home) if home else Path.home() / ".local" / "state"
    return root / "kvyard" / "quarantine.json"
