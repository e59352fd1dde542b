"""`kvyard serve`: one flag per setting, made from the settings themselves so that the two cannot differ."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo

from kvyard.cli.errors import NOT_CONFIGURED, USAGE, CliError
from kvyard.front.settings import Settings, SettingsError, load_settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", help=serve.__doc__)(_with_flags(serve))


def serve(config: Path | None, flags: dict[str, Any]) -> None:
    """Serve a model in the foreground until Ctrl-C or SIGTERM, which let running requests finish.

    Each flag is a setting: `kvyard config show` lists them with their values. Flags win over KVYARD_...
    variables, and these over the configuration files.
    """
    settings = _settings(config, flags)
    from kvyard.front.serve import serve as run  # the whole front, for this command alone

    raise typer.Exit(run(settings, lambda: load_settings(flags, config)))


def _settings(config: Path | None, flags: dict[str, Any]) -> Settings:
    try:
        return load_settings(flags, config)
    except SettingsError as error:
        from_flags = all("(flag --" in problem for problem in error.problems)
        raise CliError(
            "\n  ".join(["cannot serve with these settings:", *error.problems]),
            "`kvyard config show --origin` shows where each value comes from",
            USAGE if from_flags else NOT_CONFIGURED,
            "config",
        ) from error


def _with_flags(run: Callable[[Path | None, dict[str, Any]], None]) -> Callable[..., None]:
    """A function whose signature has an option per setting, for typer to read."""

    def command(config: Path | None = None, **flags: object) -> None:
        run(config, flags)

    config = Annotated[
        Path | None,
        typer.Option("--config", help="Configuration file instead of the default ones.", metavar="PATH"),
    ]
    annotations = {"config": config, **{name: _option(name, info) for name, info in Settings.model_fields.items()}}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # read by inspect
    command.__annotations__ = annotations
    return command


def _option(name: str, info: FieldInfo) -> Any:  # noqa: ANN401 - an annotation
    """Values travel as text, so that one place checks them and names the flag; only switches are typed."""
    flag = f"--{name.replace('_', '-')}"
    doc = f"{info.description} [default: {_default(info)}]"
    if info.annotation is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=doc, show_default=False)]
    return Annotated[str | None, typer.Option(flag, help=doc, show_default=False, metavar=_metavar(info))]


def _default(info: FieldInfo) -> str:
    value = info.get_default()
    if info.default_factory is not None or value is None:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"


def _metavar(info: FieldInfo) -> str:
    kind: Any = info.annotation
    if typing.get_origin(kind) is Literal:
        return "[" + "|".join(typing.get_args(kind)) + "]"
    names = {"int": "INTEGER", "float": "NUMBER", "Path": "PATH"}
    text = str(kind)
    return next((word for name, word in names.items() if name in text), "TEXT")
