"""Taking the control socket's path: never wider than 0660, never over somebody else's object.

The lock file beside the socket decides between two daemons; the socket itself is only removed when it is a
socket of this user at which nobody answers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

MODE = 0o660
BACKLOG = 128
PROBE_TIMEOUT = 2.0
"""Seconds in which a live daemon accepts a connection; a full backlog counts as live."""


class SocketError(Exception):
    """The path cannot be taken; nothing at it was changed. Message and hint are for the operator."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(slots=True)
class Listener:
    """A bound, listening socket and the lock that goes with it."""

    socket: socket.socket
    path: Path
    lock: int
    """Descriptor of the lock file; closing it gives the path up."""
    identity: tuple[int, int]
    """Device and inode of the socket file, so that only our own is ever removed."""

    def close(self) -> None:
        """Remove the socket file if it is still ours, and give the path up. Safe to call twice."""
        self.socket.close()
        if self.lock < 0:
            return
        with contextlib.suppress(OSError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self.identity:
                self.path.unlink()
        os.close(self.lock)
        self.lock = -1


def claim(path: Path, group: str | None = None) -> Listener:
    """Bind and listen at `path`, owned by `group` if given. Raises SocketError, leaving the path as it was."""
    gid = _group_id(group)
    _make_folder(path.parent, gid)
    lock = _take_lock(path)
    try:
        _remove_stale(path)
        listening = _bind(path, gid)
    except BaseException:
        os.close(lock)
        raise
    found = path.lstat()
    return Listener(listening, path, lock, (found.st_dev, found.st_ino))


def _group_id(group: str | None) -> int | None:
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise SocketError(f"there is no group {group!r} on this machine", "check operator_group") from None


def _make_folder(folder: Path, gid: int | None) -> None:
    """Make the socket's folder for this user (and the operators' group) alone; trust no one else's."""
    try:
        if not folder.exists():
            for missing in reversed([parent for parent in folder.parents if not parent.exists()]):
                missing.mkdir(mode=0o755, exist_ok=True)
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)
            if gid is not None:
                os.chown(folder, -1, gid)
                folder.chmod(0o750)
        found = folder.stat()
    except OSError as error:
        raise SocketError(
            f"cannot use the folder {folder} for the control socket: {error.strerror or error}",
            "choose another path with --socket",
        ) from error
    foreign = found.st_uid not in (os.geteuid(), 0)
    if foreign or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
        raise SocketError(
            f"others could replace what lies in {folder} (owner {found.st_uid}, mode {found.st_mode & 0o7777:o})",
            "choose a folder that only you may write to",
        )


def _take_lock(path: Path) -> int:
    name = path.with_name(path.name + ".lock")
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise SocketError(
            f"cannot open the lock file {name}: {error.strerror or error}", "choose another path with --socket"
        ) from error
    try:
        _check_lock_file(lock, name)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise SocketError(
            f"another kvyard daemon{f' (pid {holder})' if holder else ''} has the control socket {path}",
            "stop it with `kvyard drain`, or give this one another --socket and --port",
        ) from None
    except BaseException:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _check_lock_file(lock: int, name: Path) -> None:
    """A foreign file that happens to have the lock's name stays as it is."""
    found = os.fstat(lock)
    content = os.pread(lock, 33, 0).strip() if stat.S_ISREG(found.st_mode) else b"?"
    if found.st_uid != os.geteuid() or (content and not content.isdigit()):
        raise SocketError(f"{name} is not a lock file of kvyard", "remove it, or choose another path with --socket")


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketError(
            f"{path} is {_kind(found.st_mode)}, not a socket; kvyard does not remove it",
            "remove it yourself, or choose another path with --socket",
        )
    if _answers(path):
        raise SocketError(f"another program listens at {path}", "stop it, or choose another path with --socket")
    if found.st_uid != os.geteuid():
        raise SocketError(
            f"the left-over socket {path} belongs to uid {found.st_uid}", "remove it, or choose another --socket"
        )
    path.unlink()


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a link"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file" if stat.S_ISREG(mode) else "a special file"


def _answers(path: Path) -> bool:
    """Anything but a plain refusal counts as an answer: better not to start than to push somebody out."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno != errno.ECONNREFUSED
        return True


def _bind(path: Path, gid: int | None) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    # The file appears with bind: the mask makes it 0600 until it has its group, whatever the caller's umask.
    mask = os.umask(0o177)
    try:
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise SocketError(f"cannot bind {path}: {error.strerror or error}", "choose another --socket") from error
    finally:
        os.umask(mask)
    try:
        if gid is not None:
            os.chown(path, -1, gid)
        path.chmod(MODE)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        path.unlink(missing_ok=True)
        raise SocketError(f"cannot set up {path}: {error.strerror or error}", "check operator_group") from error
    return listening
