"""Reading a file that somebody named, which may turn out to be anything.

Standard library only: `kvyard status` goes through here before anything heavy is imported.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

MOST_CONFIG_BYTES = 1 << 20
"""Of a configuration file."""


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """The open file, never waited for: a named pipe has nothing to read until somebody writes.

    `flags` are those of `os.open`; a file that they create is its owner's alone. Raises OSError, whose strerror is
    for people, for what cannot be opened and for everything but regular files.
    """

    return cast(BinaryIO, open(path, mode, opener=lambda name, _: _descriptor(name, flags)))


def _descriptor(name: str, flags: int) -> int:
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # How Linux names a socket.
        raise (_not_regular(name) if error.errno == errno.ENXIO else error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(name)
    return descriptor


def read_text(path: Path, most: int = MOST_CONFIG_BYTES) -> str:
    """Its UTF-8 text. Raises OSError as `open_regular` does, also above `most` bytes, and UnicodeDecodeError."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return content.decode("utf-8")


def _not_regular(name: str) -> OSError:
    return OSError(errno.EINVAL, "it is no regular file", name)
