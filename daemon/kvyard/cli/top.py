"""`kvyard top`: the screen of kvyard_tui on a terminal, a plain refreshing one with --plain."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from kvyard.cli.errors import USAGE, CliError
from kvyard.cli.options import JsonOption, SocketOption
from kvyard.cli.output import say, say_json
from kvyard.cli.screen import request_lines, status_lines
from kvyard.control.client import Client
from kvyard.control.paths import client_socket
from kvyard.control.schema import RequestPage, Status

HOME: Final = "\x1b[H\x1b[J"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one screen and leave.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain text that refreshes, without the full screen.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between screens of --plain.")] = 1.0,
    rows: Annotated[int, typer.Option(min=0, max=10000, help="Most requests listed.")] = 20,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Watch queues, KV usage and policies.

    --json prints one JSON object per refresh (with --once: one).
    """
    path = client_socket(socket)
    if not (once or plain or json):
        raise typer.Exit(_full_screen(path))
    with Client(path) as client:
        if once:
            _show(client, client.status(), rows, json, clear=False)
            return
        for event in client.subscribe(["status"], interval):
            if event.topic == "status":
                with Client(path) as side:
                    _show(side, msgspec.convert(event.data, Status), rows, json, clear=sys.stdout.isatty())
                sys.stdout.flush()


def _show(client: Client, status: Status, rows: int, json: bool, clear: bool) -> None:
    page = msgspec.convert(client.call("requests", {"limit": rows}), RequestPage)
    if json:
        say_json({"status": status, "requests": page})
        return
    lines = status_lines(status)
    if page.rows:
        lines += ["", *request_lines(page, rows, whole=not sys.stdout.isatty())]
    say((HOME if clear else "") + "\n".join(lines) + ("" if clear else "\n"))


def _full_screen(path: Path) -> int:
    if not sys.stdout.isatty():
        raise CliError(
            "top needs a terminal", "--once prints one screen, --plain goes on without one", USAGE, "no-tty"
        )
    if importlib.util.find_spec("kvyard_tui.app") is None:
        raise CliError("the full screen is not installed", "use --plain", FAILED_WITHOUT_TUI, "not-installed")
    from kvyard_tui.app import run  # textual takes a while to import

    return run(str(path))


FAILED_WITHOUT_TUI: Final = 5
