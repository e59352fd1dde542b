"""Who is at the other end of a control connection, and what they may do."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from pathlib import Path

from kvyard.control.schema import Role
from kvyard.front.operations import Who

RANK: dict[Role, int] = {"viewer": 0, "operator": 1, "admin": 2}
_UCRED = struct.Struct("3i")
_ANCESTORS = 16
"""Parents looked at; an engine that starts processes is put out by the guard long before."""


def identify(connection: socket.socket, operator_group: str | None) -> Who:
    """The peer by its kernel credentials: root and the daemon's own user are admins."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = ""
    return Who(pid, uid, gid, _role(uid, gid, user, operator_group), user)


def _role(uid: int, gid: int, user: str, operator_group: str | None) -> Role:
    if uid in (0, os.geteuid()):
        return "admin"
    if operator_group is not None and _is_member(gid, user, operator_group):
        return "operator"
    return "viewer"


def _is_member(gid: int, user: str, group: str) -> bool:
    try:
        wanted = grp.getgrnam(group).gr_gid
    except KeyError:
        return False
    return wanted == gid or (bool(user) and wanted in os.getgrouplist(user, gid))


def belongs_to(pid: int, host: int) -> bool:
    """Whether a process is `host`, which runs policies, in the session that it leads, or among its descendants.

    Policies run with the daemon's own rights, so this keeps a faulty one from operating the daemon; it is no
    sandbox.
    """
    if pid <= 0:
        return False
    try:
        if os.getsid(pid) == host:
            return True
    except OSError:
        return pid == host
    for _ in range(_ANCESTORS):
        if pid == host:
            return True
        pid = _parent(pid)
        if pid <= 1:
            return False
    return False


def _parent(pid: int) -> int:
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(line.rpartition(")")[2].split()[1])  # the name in parentheses may hold anything
    except (OSError, ValueError, IndexError):
        return 0
