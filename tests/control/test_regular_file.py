"""Files that somebody named: regular ones are read, and everything else is said at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from kvyard.control.regular_file import open_regular, read_text


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(("flags", "mode"), [(os.O_RDONLY, "rb"), (os.O_RDWR | os.O_APPEND | os.O_CREAT, "r+b")])
def test_nothing_but_a_regular_file_is_opened(tmp_path: Path, kind: str, flags: int, mode: str) -> None:
    path = tmp_path / kind
    SPECIAL[kind](path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match=r"no regular file|Is a directory") as refused:
        open_regular(path, flags, mode)
    assert refused.value.strerror, "people are told what it is"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("grün", "utf-8")
    (tmp_path / "link").symlink_to("real")
    assert read_text(tmp_path / "link") == "grün"


def test_a_new_file_belongs_to_its_owner_alone(tmp_path: Path) -> None:
    with open_regular(tmp_path / "new", os.O_RDWR | os.O_CREAT, "r+b") as file:
        file.write(b"x")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    assert read_text(tmp_path / "new") == "x"


def test_a_text_has_an_end(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("123456")
    assert read_text(tmp_path / "long", 6) == "123456"
    with pytest.raises(OSError, match="larger than 5 bytes"):
        read_text(tmp_path / "long", 5)


def test_what_is_no_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "binary")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")
