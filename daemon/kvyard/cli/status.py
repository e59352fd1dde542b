"""`kvyard status`, which must answer at once: nothing here imports typer, pydantic or asyncio."""

from __future__ import annotations

from pathlib import Path

from kvyard.cli.errors import OK
from kvyard.cli.output import say, say_json
from kvyard.cli.screen import status_lines
from kvyard.control.client import Client
from kvyard.control.paths import client_socket


def fast(arguments: list[str]) -> tuple[Path | None, bool] | None:
    """Socket and `--json` of a plain `status` command line; None leaves it to the full parser."""
    if not arguments or arguments[0] != "status":
        return None
    socket: Path | None = None
    as_json = False
    rest = iter(arguments[1:])
    for argument in rest:
        if argument == "--json":
            as_json = True
        elif argument.startswith("--socket="):
            socket = Path(argument.partition("=")[2])
        elif argument == "--socket" and (value := next(rest, None)) is not None:
            socket = Path(value)
        else:
            return None
    return socket, as_json


def run(socket: Path | None, as_json: bool) -> int:
    """Ask and print. Raises ControlError."""
    with Client(client_socket(socket)) as client:
        if as_json:
            say_json(client.call("status"))
        else:
            say("\n".join(status_lines(client.status())))
    return OK
