"""`kvyard generate`: one request over the control socket, its text as it comes."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvyard.cli.errors import USAGE, CliError
from kvyard.cli.options import JsonOption, SocketOption
from kvyard.cli.output import readable, say_json
from kvyard.control.client import Client
from kvyard.control.paths import client_socket
from kvyard.control.schema import Event


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Apply the model's chat template.")] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most output tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same random numbers.", show_default=False)] = None,
    priority: Annotated[int, typer.Option(help="Lower is more urgent.")] = 0,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Generate text from a prompt."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise CliError("the prompt is empty", "give some text", USAGE, "bad-params")
    call: dict[str, Any] = {
        "prompt": text,
        "chat": chat,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "priority": priority,
        "stream": not json,
    }
    if seed is not None:
        call["seed"] = seed
    shown = readable if sys.stdout.isatty() else str
    with Client(client_socket(socket)) as client:
        for item in client.stream("generate", call):
            if not isinstance(item, Event):
                _end(item, json)
            elif item.topic == "generate":
                sys.stdout.write(shown(str(item.data.get("text", ""))))
                sys.stdout.flush()


def _end(result: dict[str, Any], json: bool) -> None:
    if json:
        say_json(result)
        return
    sys.stdout.write("\n")
    if result.get("finish_reason") == "error":
        error = result.get("error") or {}
        raise CliError(str(error.get("message", "the request failed")), code=str(error.get("code", "failed")))
