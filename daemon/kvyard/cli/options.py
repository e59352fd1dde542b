"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

SocketOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--socket", help="Control socket of the daemon.", show_default=False, metavar="PATH"),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)]
RequestArgument: TypeAlias = Annotated[
    str,
    typer.Argument(help="Id of the request, at least 8 signs of its beginning, or its number in `kvyard top`."),
]
