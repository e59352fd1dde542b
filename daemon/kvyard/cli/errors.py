"""Exit statuses and how a command's errors are told: on standard error, as JSON where `--json` was asked."""

from __future__ import annotations

import json
import sys
from typing import Final

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
FORBIDDEN: Final = 4
NOT_INSTALLED: Final = 5
NOT_CONFIGURED: Final = 6
NOT_RUNNING: Final = 7
INTERRUPTED: Final = 130

STATUSES: Final = {
    OK: "done",
    FAILED: "failed; the message says why",
    USAGE: "the command line is wrong",
    FORBIDDEN: "your role does not allow it",
    NOT_INSTALLED: "a model, policy or package is not installed",
    NOT_CONFIGURED: "the configuration is wrong",
    NOT_RUNNING: "no daemon answers",
    INTERRUPTED: "interrupted from the keyboard",
}
"""Exit statuses of every command (those below 8 as LSB has them)."""

_BY_CODE: Final = {
    "not-running": NOT_RUNNING,
    "forbidden": FORBIDDEN,
    "bad-params": USAGE,
    "bad-kind": USAGE,
    "unknown-method": USAGE,
    "unknown": NOT_INSTALLED,
}


class CliError(Exception):
    """Ends a command with a message; `status` is one of STATUSES."""

    def __init__(self, message: str, hint: str = "", status: int = FAILED, code: str = "failed") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status
        self.code = code


def status_of(code: str) -> int:
    """Exit status for an error code of the control protocol."""
    return _BY_CODE.get(code, FAILED)


def tell(message: str, hint: str, code: str, as_json: bool) -> None:
    """Say on standard error what happened and what to do."""
    if as_json:
        body = {"error": {"code": code, "message": message, "hint": hint}}
        sys.stderr.write(json.dumps(body, ensure_ascii=False) + "\n")
        return
    sys.stderr.write(f"kvyard: {message}\n")
    if hint:
        sys.stderr.write(f"  {hint}\n")
