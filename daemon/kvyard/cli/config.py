"""`kvyard config`: the settings in force, where each came from, and checking a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvyard.cli.commands import App
from kvyard.cli.errors import NOT_CONFIGURED, USAGE, CliError
from kvyard.cli.options import JsonOption, SocketOption
from kvyard.cli.output import clean, say, say_json, table
from kvyard.control.client import Client
from kvyard.control.paths import client_socket

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Read this file instead of the default ones.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = App(help="Settings: shown with their origin, checked.")
    for command in (show, check):
        group.command()(command)
    app.add_typer(group, name="config")


def show(
    origin: Annotated[bool, typer.Option("--origin", help="Also where each value came from.")] = False,
    running: Annotated[
        bool, typer.Option("--running", help="Of the running daemon; --socket means it, too.")
    ] = False,
    config: ConfigOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show every setting as `kvyard serve` would take it here and now, or as the running daemon has it."""
    if socket is not None and config is not None:
        raise CliError("--socket asks a running daemon and --config a file", "name one of them", USAGE)
    rows = _of_daemon(socket) if running or socket is not None else _of_serve(config)
    if json:
        say_json(rows)
        return
    head = ("SETTING", "VALUE", "CHANGE", "ORIGIN") if origin else ("SETTING", "VALUE", "CHANGE")
    cells = [(row["name"], _value(row), row["change"], row["origin"])[: len(head)] for row in rows]
    say("\n".join(table(head, cells)))


def check(
    file: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, everything `serve` reads.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check a configuration file, or the files and variables that `kvyard serve` would read."""
    from kvyard.front.settings import check_file, check_variables, unknown_variables

    if file is not None:
        problems, unknown = check_file(file), []
    else:
        problems = [*_problems(), *map(clean, check_variables(os.environ))]
        unknown = unknown_variables(os.environ)
    if json:
        say_json({"ok": not problems, "problems": problems, "unknown_variables": unknown})
        if problems:
            raise typer.Exit(NOT_CONFIGURED)
        return
    if problems:
        raise CliError("\n  ".join(["the configuration has problems:", *problems]), status=NOT_CONFIGURED)
    say("the configuration is good")


def _problems() -> list[str]:
    from kvyard.front.keys import KeyFileError, KeyRing
    from kvyard.front.settings import SettingsError, load_settings

    try:
        settings = load_settings()
        KeyRing(settings.api_key_file)
    except SettingsError as error:
        return error.problems
    except KeyFileError as error:
        return [str(error)]
    return []


def _of_serve(config: Path | None) -> list[dict[str, Any]]:
    from kvyard.front.settings import SettingsError, load_settings

    try:
        return load_settings(config=config).describe()
    except SettingsError as error:
        lines = ["the configuration has problems:", *error.problems]
        raise CliError("\n  ".join(lines), status=NOT_CONFIGURED, code="config") from error


def _of_daemon(socket: Path | None) -> list[dict[str, Any]]:
    with Client(client_socket(socket)) as client:
        rows: list[dict[str, Any]] = client.call("config.show")
        return rows


def _value(row: dict[str, Any]) -> str:
    later = f" ({_text(row['after_restart'])} after a restart)" if "after_restart" in row else ""
    return _text(row["value"]) + later


def _text(value: object) -> str:
    if value is None:
        return "auto"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
