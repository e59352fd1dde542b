"""The `kvyard` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvyard.cli import status
from kvyard.cli.errors import FAILED, INTERRUPTED, OK, CliError, status_of, tell
from kvyard.control.client import ControlError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status (errors.STATUSES)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    try:
        code = _run(words)
        sys.stdout.flush()
    except ControlError as error:
        tell(error.message, error.hint, error.code, as_json)
        return status_of(error.code)
    except CliError as error:
        tell(error.message, error.hint, error.code, as_json)
        return error.status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone: point stdout elsewhere, so that the flush at exit says nothing either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if os.environ.get("KVYARD_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {error}"
        tell(f"a defect of kvyard: {what}", "KVYARD_TRACEBACK=1 shows where; please report it", "internal", as_json)
        return FAILED
    return code


def _run(words: list[str]) -> int:
    if (plain := status.fast(words)) is not None:
        return status.run(*plain)
    from kvyard.cli.app import run  # typer and what it imports cost more than a whole `kvyard status`

    return run(words)


def entry() -> None:
    """For `python -m kvyard.cli.main`."""
    sys.exit(main())


if __name__ == "__main__":
    entry()

__all__ = ["OK", "main"]
