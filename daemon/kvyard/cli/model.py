"""`kvyard model`: list, pull and inspect models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvyard.cli.commands import App
from kvyard.cli.errors import NOT_INSTALLED, CliError
from kvyard.cli.options import JsonOption
from kvyard.cli.output import clean, count, say, say_json, size, table

if TYPE_CHECKING:
    from kvyard.front.models import ModelRef, ModelStore

DirOption = Annotated[
    Path | None, typer.Option("--model-dir", help="Folder of pulled models.", show_default=False, metavar="PATH")
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = App(help="Models: listed, pulled, inspected.")
    group.command("list")(list_models)
    for command in (pull, inspect):
        group.command()(command)
    app.add_typer(group, name="model")


def list_models(model_dir: DirOption = None, json: JsonOption = False) -> None:
    """List models that are here or can be pulled."""
    rows = _store(model_dir).list()
    if json:
        say_json(
            [
                {
                    "id": row.id,
                    "pulled": row.path is not None,
                    "path": str(row.path) if row.path else None,
                    "format": row.format,
                    "bytes": row.size,
                    "doc": row.doc,
                }
                for row in rows
            ]
        )
        return
    cells = [(row.id, row.format, size(row.size), str(row.path or "not pulled"), row.doc) for row in rows]
    say("\n".join(table(("MODEL", "FORMAT", "SIZE", "WHERE", "WHAT IT IS"), cells)))


def pull(
    name: Annotated[str, typer.Argument(help="Name as `kvyard model list` shows it.")],
    model_dir: DirOption = None,
    json: JsonOption = False,
) -> None:
    """Fetch a model; an interrupted pull goes on where it stopped."""
    from kvyard.front.models import ModelError, console_progress

    store = _store(model_dir)
    try:
        with console_progress(name) as progress:
            ref = store.pull(name, progress)
    except ModelError as error:
        raise _told(error) from error
    _say_ref(ref, json)


def inspect(
    model: Annotated[str, typer.Argument(help="A name, a GGUF file, or a Hugging Face folder.")],
    metadata: Annotated[bool, typer.Option("--metadata", help="Also every metadata value.")] = False,
    model_dir: DirOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a model's files say: family, size, types, context length."""
    from kvyard.front.models import ModelError
    from kvyard.front.models.inspect import inspect as read

    try:
        details = read(_store(model_dir).resolve(model))
    except ModelError as error:
        raise _told(error) from error
    if json:
        say_json(details)
        return
    types = ", ".join(f"{name} {number}" for name, number in details.tensor_types.items())
    lines = [
        f"{clean(details.id)}  {details.format}, {clean(details.family)}, {size(details.bytes)}",
        f"  path        {clean(details.path)}",
        f"  parameters  {count(details.parameters)} in {details.tensors} tensors ({types})",
        f"  shape       {details.layers} layers, hidden {details.hidden}, {details.heads} heads, "
        f"{details.kv_heads} KV heads, vocabulary {details.vocabulary}",
        f"  context     {details.context_length} tokens",
    ]
    if metadata:
        lines += [f"  {clean(name)} = {clean(str(value))}" for name, value in details.metadata.items()]
    say("\n".join(lines))


def _store(folder: Path | None) -> ModelStore:
    from kvyard.front.models import ModelStore

    return ModelStore(folder)


def _say_ref(ref: ModelRef, json: bool) -> None:
    if json:
        say_json({"id": ref.id, "path": str(ref.path), "format": ref.format})
    else:
        say(f"{ref.id} is at {ref.path}")


def _told(error: Exception) -> CliError:
    message, hint = getattr(error, "message", str(error)), getattr(error, "hint", "")
    return CliError(message, hint, NOT_INSTALLED, "model")
