"""Taking the socket's path: stale ones replaced, live ones refused, foreign objects never touched."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvyard.front.control.listener import SocketError, claim

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "run" / "kvyard.sock"


def test_a_claimed_path_listens_and_is_given_back(path: Path) -> None:
    listener = claim(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()
    listener.close()
    assert not path.exists()
    claim(path).close()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_lifecycle_08_the_mode_does_not_depend_on_the_umask(path: Path, mask: int) -> None:
    with umask(mask):
        listener = claim(path)
        assert os.umask(mask) == mask, "the caller's umask is as it was"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    listener.close()


def test_lifecycle_08_never_wider_at_any_moment(path: Path) -> None:
    path.parent.mkdir(0o700)
    seen: set[int] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.add(stat.S_IMODE(path.lstat().st_mode))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with umask(0):
            for turn in range(2000):
                claim(path).close()
                if seen and turn > 200:
                    break
    finally:
        stop.set()
        thread.join()
    assert seen, "the watcher saw the socket"
    assert all(mode & ~0o660 == 0 for mode in seen), [oct(mode) for mode in seen]


@AS_ROOT
def test_lifecycle_08_another_user_cannot_connect(path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    path.parent.parent.chmod(0o755)
    listener = claim(path)
    path.parent.chmod(0o755)  # so that it is the socket's own mode that holds
    child = os.fork()
    if child == 0:  # nothing but plain system calls here
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
        with socket.socket(socket.AF_UNIX) as stranger:
            os._exit(stranger.connect_ex(str(path)))
    _, status = os.waitpid(child, 0)
    listener.close()
    assert os.waitstatus_to_exitcode(status) == errno.EACCES


def test_lifecycle_05_a_left_over_socket_is_replaced_five_times(path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from kvyard.front.control.listener import claim;"
        "claim(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    for _ in range(5):
        killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
        assert killed.returncode == -9
        assert path.is_socket(), "the kill left the socket behind"
    listener = claim(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()


def test_a_live_daemon_is_refused_and_named(path: Path) -> None:
    listener = claim(path)
    inode = path.lstat().st_ino
    with pytest.raises(SocketError) as caught:
        claim(path)
    assert str(os.getpid()) in caught.value.message
    assert "kvyard drain" in caught.value.hint
    assert path.lstat().st_ino == inode
    listener.close()


def test_two_daemons_at_once_one_wins(path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from kvyard.front.control.listener import SocketError, claim\n"
        "try: claim(Path(sys.argv[1]))\n"
        "except SocketError as error: sys.exit(9)\n"
        "print('mine', flush=True); sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    racers = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=pipe, stdout=pipe, text=True)
        for _ in range(4)
    ]
    try:
        statuses = []
        for racer in racers:
            assert racer.stdout is not None
            statuses.append(racer.stdout.readline().strip())
        assert sorted(statuses) == ["", "", "", "mine"]
    finally:
        for racer in racers:
            racer.communicate("", timeout=20)


class TestLifecycle07ForeignObjects:
    """LIFECYCLE-07: whatever else lies at the path stays as it is, and the daemon does not start."""

    def refused(self, path: Path, words: str) -> None:
        before = path.lstat()
        with pytest.raises(SocketError, match=words) as caught:
            claim(path)
        assert caught.value.hint
        after = path.lstat()
        assert (before.st_ino, before.st_mode, before.st_mtime_ns) == (after.st_ino, after.st_mode, after.st_mtime_ns)

    @pytest.fixture(autouse=True)
    def parent(self, path: Path) -> None:
        path.parent.mkdir(0o700)

    def test_a_text_file(self, path: Path) -> None:
        path.write_text("notes")
        self.refused(path, "is a file")
        assert path.read_text() == "notes"

    def test_an_empty_file(self, path: Path) -> None:
        path.touch()
        self.refused(path, "is a file")

    def test_a_folder(self, path: Path) -> None:
        path.mkdir()
        self.refused(path, "is a folder")

    def test_a_link_to_a_file(self, path: Path) -> None:
        target = path.with_name("precious")
        target.write_text("x")
        path.symlink_to(target)
        self.refused(path, "is a link")
        assert target.read_text() == "x"

    def test_a_link_that_leads_nowhere(self, path: Path) -> None:
        path.symlink_to(path.with_name("nowhere"))
        self.refused(path, "is a link")

    def test_a_pipe(self, path: Path) -> None:
        os.mkfifo(path)
        self.refused(path, "special file")

    def test_a_socket_at_which_another_program_answers(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen(1)
            self.refused(path, "another program listens")

    def test_a_socket_whose_program_is_too_busy_to_answer(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as other, contextlib.ExitStack() as crowd:
            other.bind(str(path))
            other.listen(0)
            for _ in range(3):  # fill the backlog
                client = crowd.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(str(path))
            self.refused(path, "another program listens")

    def test_a_datagram_socket_in_use(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.bind(str(path))
            self.refused(path, "another program listens")

    @pytest.mark.parametrize("content", ["a diary", "12 34", "-5"])
    def test_a_foreign_file_under_the_locks_name(self, path: Path, content: str) -> None:
        lock = path.with_name("kvyard.sock.lock")
        lock.write_text(content)
        with pytest.raises(SocketError, match="not a lock file"):
            claim(path)
        assert lock.read_text() == content

    def test_a_link_under_the_locks_name(self, path: Path) -> None:
        target = path.with_name("precious")
        target.write_text("x")
        path.with_name("kvyard.sock.lock").symlink_to(target)
        with pytest.raises(SocketError, match="lock file"):
            claim(path)
        assert target.read_text() == "x"


def test_a_folder_that_others_may_write_to_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(SocketError, match="others could replace"):
        claim(path)
    path.parent.chmod(0o1777)  # sticky, as /tmp is
    claim(path).close()


@AS_ROOT
def test_a_folder_of_another_user_is_refused(path: Path) -> None:
    path.parent.mkdir(0o700)
    os.chown(path.parent, pwd.getpwnam("nobody").pw_uid, -1)
    with pytest.raises(SocketError, match="others could replace"):
        claim(path)


@AS_ROOT
def test_the_left_over_of_another_user_is_refused(path: Path) -> None:
    path.parent.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    os.chown(path, pwd.getpwnam("nobody").pw_uid, -1)
    with pytest.raises(SocketError, match="belongs to uid"):
        claim(path)
    assert path.is_socket()


@AS_ROOT
def test_an_operators_group_gets_the_socket_and_may_enter_the_folder(path: Path) -> None:
    import grp

    group = grp.getgrnam("nogroup" if _has_group("nogroup") else "nobody")
    listener = claim(path, group.gr_name)
    assert path.stat().st_gid == group.gr_gid
    assert path.parent.stat().st_gid == group.gr_gid
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
    listener.close()


def _has_group(name: str) -> bool:
    import grp

    return any(group.gr_name == name for group in grp.getgrall())


def test_an_unknown_group_is_named(path: Path) -> None:
    with pytest.raises(SocketError, match="no-such-group"):
        claim(path, "no-such-group")
    assert not path.parent.exists()


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(SocketError, match="cannot use the folder"):
        claim(folder / "file" / "x" / "kvyard.sock")


def test_closing_leaves_a_successors_socket_alone(path: Path) -> None:
    listener = claim(path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(path))
        listener.close()
        assert path.is_socket()
