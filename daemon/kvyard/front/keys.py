"""API keys: made here, kept as hashes in a file, looked up by their hash.

A line of the file is `name:tenant:sha256$HEX`; an empty tenant means the name. Keys are 256 random bits, so a plain
hash is enough: there is nothing to guess that a slow hash would have to protect.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvyard.control.regular_file import open_regular

PREFIX: Final = "kv-"
_SECRET_BYTES: Final = 32
_SCHEME: Final = "sha256$"
_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_TENANT: Final = re.compile(r"[^:\x00-\x1f\x7f]{0,256}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_OTHERS_MAY_WRITE: Final = 0o002
MOST_BYTES: Final = 1 << 20
"""Of a file of keys: some ten thousand lines."""


class KeyFileError(Exception):
    """The file of keys cannot be used; the text names the file and the line."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who holds a key. The key itself is known to its holder alone."""

    name: str
    tenant: str
    digest: bytes
    """SHA-256 of the key."""

    @property
    def line(self) -> str:
        """The key's line in a file of keys."""
        return f"{self.name}:{'' if self.tenant == self.name else self.tenant}:{_SCHEME}{self.digest.hex()}"


def make_key(name: str, tenant: str = "") -> tuple[str, ApiKey]:
    """A new secret and the key that recognises it. Raises ValueError for a name or tenant that a line cannot hold."""
    tenant = tenant.strip()
    _check_words(name, tenant)
    secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    return secret, ApiKey(name, tenant or name, _digest(secret))


def read_keys(path: Path) -> list[ApiKey]:
    """Keys of a file. Raises KeyFileError; no error text shows more of a line than its number."""
    try:
        lines = _content(path).decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KeyFileError(f"cannot read the API keys {path}: {reason}") from error
    keys: list[ApiKey] = []
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if line and not line.startswith("#"):
            keys.append(_parse(line, f"{path}, line {number}"))
    _check_all(keys, path)
    return keys


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_mode & _OTHERS_MAY_WRITE:
            raise KeyFileError(f"everybody may write to {path}, and so let themselves in: chmod o-w {path}")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise KeyFileError(
            f"{path} is larger than {MOST_BYTES} bytes (1 MiB), the most that a file of API keys may have"
        )
    return content


def _parse(line: str, where: str) -> ApiKey:
    parts = line.split(":")
    if len(parts) != 3 or not parts[2].startswith(_SCHEME):
        raise KeyFileError(f"{where}: a line is name:tenant:sha256$HEX; `kvyard key new NAME` makes one")
    name, tenant, digest = parts[0].strip(), parts[1].strip(), parts[2].removeprefix(_SCHEME).strip()
    if not _DIGEST.fullmatch(digest):
        raise KeyFileError(f"{where}: after sha256$ come 64 hexadecimal digits")
    try:
        _check_words(name, tenant)
    except ValueError as error:
        raise KeyFileError(f"{where}: {error}") from None
    return ApiKey(name, tenant or name, bytes.fromhex(digest))


def _check_words(name: str, tenant: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError("a key's name has 1 to 64 letters, digits or signs of . _ @ -")
    if not _TENANT.fullmatch(tenant):
        raise ValueError("a tenant has at most 256 characters, none of them a colon or a control character")


def _check_all(keys: Sequence[ApiKey], path: Path) -> None:
    if not keys:
        raise KeyFileError(f"there is no key in {path}, so nobody could use the API; `kvyard key new NAME` makes one")
    names: set[str] = set()
    digests: set[bytes] = set()
    for key in keys:
        if key.name in names or key.digest in digests:
            raise KeyFileError(f"{path}: the name or the key of {key.name!r} stands there twice")
        names.add(key.name)
        digests.add(key.digest)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class KeyChange:
    """What reading the file again changed."""

    added: int
    revoked: int
    renamed: int
    """Keys with another name or tenant than before."""

    def __str__(self) -> str:
        """In words, empty for no change."""
        parts = [
            f"{number} {what}"
            for what, number in (("added", self.added), ("revoked", self.revoked), ("renamed", self.renamed))
            if number
        ]
        return f"api keys: {', '.join(parts)}" if parts else ""


class KeyRing:
    """The keys in force; replaced as a whole, so that no request meets half a change."""

    def __init__(self, path: Path | None = None) -> None:
        """Keys of a file; without one the API is open. Raises KeyFileError."""
        self._keys: dict[bytes, ApiKey] | None = None
        """By digest."""
        self.load(path)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return self._keys is not None

    def __len__(self) -> int:
        return len(self._keys or ())

    def load(self, path: Path | None) -> KeyChange:
        """Take over the keys of a file; without one the API is open. Raises KeyFileError and changes nothing then.

        May run in another thread than `find`.
        """
        before, self._keys = self._keys, None if path is None else {key.digest: key for key in read_keys(path)}
        old, new = before or {}, self._keys or {}
        same = old.keys() & new.keys()
        return KeyChange(
            added=len(new) - len(same),
            revoked=len(old) - len(same),
            renamed=sum(old[digest] != new[digest] for digest in same),
        )

    def find(self, secret: str) -> ApiKey | None:
        """The key that a client showed. How long it takes tells of a hash alone, which leads to no key."""
        digest = _digest(secret)
        found = (self._keys or {}).get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None
