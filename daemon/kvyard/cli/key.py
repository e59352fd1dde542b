"""`kvyard key`: API keys for the HTTP API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvyard.cli.commands import App
from kvyard.cli.errors import USAGE, CliError
from kvyard.cli.options import JsonOption
from kvyard.cli.output import say, say_json, table
from kvyard.control.regular_file import open_regular

FileArgument = Annotated[Path, typer.Argument(help="A file of keys, as the setting api_key_file names it.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = App(help="API keys: made, listed.")
    group.command()(new)
    group.command("list")(list_)
    app.add_typer(group, name="key")


def new(
    name: Annotated[str, typer.Argument(help="Who gets the key.")],
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant of its requests; by default the name.", show_default=False)
    ] = "",
    file: Annotated[
        Path | None, typer.Option("--file", help="Append the key's line to this file.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make an API key and the line by which the daemon recognises it; the key itself is shown this once.

    The daemon takes a changed file over on SIGHUP.
    """
    from kvyard.front.keys import make_key

    try:
        secret, key = make_key(name, tenant)
    except ValueError as error:
        raise CliError(str(error), status=USAGE, code="bad-params") from error
    if file is not None:
        _append(file, name, key.line)
    if json:
        say_json({"key": secret, "line": key.line, "file": str(file) if file is not None else None})
        return
    say(f"key   {secret}")
    say(f"line  {key.line}" if file is None else f"its line was added to {file}; SIGHUP makes the daemon read it")


def list_(file: FileArgument, json: JsonOption = False) -> None:
    """List the names and tenants of a file of keys, and check it."""
    from kvyard.front.keys import KeyFileError, read_keys

    try:
        keys = read_keys(file)
    except KeyFileError as error:
        raise CliError(str(error), code="keys") from error
    if json:
        say_json([{"name": key.name, "tenant": key.tenant} for key in keys])
        return
    say("\n".join(table(("NAME", "TENANT"), [(key.name, key.tenant) for key in keys])))


def _append(file: Path, name: str, line: str) -> None:
    hint = "nothing was written; choose another name or file"
    try:
        with open_regular(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, "r+b") as opened:
            text = opened.read()
            if any(old.strip().startswith(name.encode() + b":") for old in text.splitlines()):
                raise CliError(f"{file} has a key of the name {name!r} already", hint, code="keys")
            opened.write((b"" if not text or text.endswith(b"\n") else b"\n") + line.encode() + b"\n")
    except OSError as error:
        raise CliError(f"cannot write to {file}: {error.strerror}", hint, code="keys") from error
