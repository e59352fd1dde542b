"""How commands show their help: plain text in two columns, arguments in capitals as everywhere in the docs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import typer
from typer._click.core import Context
from typer.core import TyperArgument, TyperCommand

WIDEST: Final = 100
"""Columns that help takes at most."""


class Command(TyperCommand):
    """A command whose usage line reads `kvyard policy swap [OPTIONS] KIND NAME [NAME=VALUE]...`."""

    def __init__(self, name: str | None, **options: Any) -> None:  # noqa: ANN401 - as the library passes them
        super().__init__(name, **options)
        for argument in self._arguments:
            argument.metavar = argument.metavar or argument.name.upper()

    @property
    def _arguments(self) -> list[TyperArgument]:
        return [param for param in self.params if isinstance(param, TyperArgument)]

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """The usage line's words behind the command's name."""
        return [self.options_metavar or "", *map(usage_word, self._arguments)]

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first paragraph, whole: the list of commands wraps it."""
        return " ".join((self.help or "").strip().partition("\n\n")[0].split())


def usage_word(argument: TyperArgument) -> str:
    """An argument in a usage line: `NAME`, or `[NAME]` when it may be left out."""
    word = argument.metavar or argument.name.upper()
    return word if argument.required or word.startswith("[") else f"[{word}]"


class App(typer.Typer):
    """A group of commands of this kind."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - as `typer.Typer`
        # The library's boxes have six columns, which leaves a text 20 of 80.
        settings = {"max_content_width": WIDEST}
        super().__init__(no_args_is_help=True, rich_markup_mode=None, context_settings=settings, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:  # noqa: ANN401
        """Register a command, as `typer.Typer.command` does."""
        return super().command(name, **{"cls": Command, **options})
