"""Roles by kernel credentials, and keeping those out that run policies."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import subprocess
import sys

import pytest
from kvyard.front.control.peer import _role, belongs_to, identify


def test_the_peer_is_this_process() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        who = identify(ours, None)
    assert (who.pid, who.uid, who.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert who.role == "admin"
    assert who.user == pwd.getpwuid(os.getuid()).pw_name
    assert str(os.getpid()) in str(who)


def test_root_and_the_daemons_user_are_admins_and_others_view() -> None:
    assert _role(0, 0, "root", None) == "admin"
    assert _role(os.geteuid(), 5, "me", None) == "admin"
    assert _role(54321, 54321, "", None) == "viewer"


def test_a_member_of_the_group_operates() -> None:
    group = grp.getgrgid(os.getgid())
    assert _role(54321, group.gr_gid, "", group.gr_name) == "operator", "by primary group"
    assert _role(54321, 54321, "", group.gr_name) == "viewer"
    assert _role(54321, 54321, "", "no-such-group") == "viewer"


def test_supplementary_groups_count() -> None:
    for group in grp.getgrall():
        for member in group.gr_mem:
            try:
                uid = pwd.getpwnam(member).pw_uid
            except KeyError:
                continue
            if uid not in (0, os.geteuid()):
                assert _role(uid, 54321, member, group.gr_name) == "operator"
                return
    pytest.skip("nobody on this machine is in a supplementary group")


class TestTheEngine:
    """The engine's process, its session and its descendants may not use the socket."""

    def test_itself(self) -> None:
        with _sleeper() as engine:
            assert belongs_to(engine.pid, engine.pid)
            engine.kill()

    def test_its_children_and_grandchildren(self) -> None:
        code = (
            "import subprocess, sys, time\n"
            "p = subprocess.Popen([sys.executable, '-c', "
            "'import os, sys, time; os.setsid(); print(os.getpid(), flush=True); sys.stdin.read()'],"
            " stdout=subprocess.PIPE, text=True)\n"
            "print(p.stdout.readline(), end='', flush=True); sys.stdin.read()\n"
        )
        with _python(code) as engine:
            assert engine.stdout is not None
            child = int(engine.stdout.readline())
            assert os.getsid(child) == child, "it left the engine's session"
            assert belongs_to(child, engine.pid)
            engine.communicate("")

    def test_nobody_else(self) -> None:
        with _sleeper() as engine:
            assert not belongs_to(os.getpid(), engine.pid), "its parent is no descendant"
            assert not belongs_to(1, engine.pid)
            engine.kill()

    def test_a_process_that_is_gone(self) -> None:
        with _sleeper() as process:
            process.kill()
        assert not belongs_to(process.pid, os.getpid())


def _python(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _sleeper() -> subprocess.Popen[str]:
    return _python("import time; time.sleep(60)")
