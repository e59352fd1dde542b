"""The typer application. Only the modules of the command that was asked for are imported."""

from __future__ import annotations

import importlib
from typing import Annotated, Final

import typer
from typer._click.exceptions import ClickException

from kvyard import __version__
from kvyard.cli.commands import App
from kvyard.cli.errors import INTERRUPTED, USAGE, CliError

HELP: Final = """Serve a large language model, and operate the daemon that does.

`kvyard serve` runs it in the foreground; every other command speaks to it over its control socket.
"""

MODULES: Final[dict[str, str]] = {
    "serve": "serve",
    "status": "operate",
    "top": "top",
    "generate": "generate",
    "explain": "explain",
    "events": "operate",
    "cancel": "operate",
    "pause": "operate",
    "resume": "operate",
    "drain": "operate",
    "dump": "operate",
    "policy": "policy",
    "model": "model",
    "sim": "sim",
    "config": "config",
    "key": "key",
    "doctor": "doctor",
}
"""Command to the module of kvyard.cli that registers it."""


def build(word: str | None = None) -> typer.Typer:
    """The application, with every command or with those of the module of `word` alone."""
    app = App(name="kvyard", help=HELP, pretty_exceptions_enable=False)
    app.callback()(_callback)
    modules = [MODULES[word]] if word in MODULES else list(dict.fromkeys(MODULES.values()))
    for name in modules:
        importlib.import_module(f"kvyard.cli.{name}").register(app)
    return app


def run(words: list[str]) -> int:
    """Parse and run a command line; the exit status."""
    command = typer.main.get_command(build(words[0] if words else None))
    as_json = "--json" in words
    try:
        result = command.main(args=words, prog_name="kvyard", standalone_mode=not as_json)
    except typer.TyperException as error:  # what the library would draw a box around
        message = error.format_message() if isinstance(error, ClickException) else str(error)
        context = getattr(error, "ctx", None)
        hint = f"`{context.command_path if context is not None else 'kvyard'} --help` shows how it is used"
        raise CliError(message, hint, USAGE, "usage") from error
    except typer.Abort:
        return INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return result if isinstance(result, int) else 0


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvyard {__version__}")
        raise typer.Exit


def _callback(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass
