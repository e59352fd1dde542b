"""Commands that look at the running daemon or tell it what to do: status, events, pause, drain, dump and so on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvyard.cli import status as status_command
from kvyard.cli.errors import CliError
from kvyard.cli.options import JsonOption, RequestArgument, SocketOption
from kvyard.cli.output import clean, say, say_json, until_readable
from kvyard.control.client import Client
from kvyard.control.paths import client_socket
from kvyard.control.schema import Event


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, events, cancel, pause, resume, drain, dump):
        app.command()(command)


def status(socket: SocketOption = None, json: JsonOption = False) -> None:
    """Show what the daemon does now."""
    status_command.run(socket, json)


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with events as they come.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="How many past events.")] = 50,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show the event log: restarts, swaps, ejections, drains, errors, and who did what."""
    with Client(client_socket(socket)) as client:
        for event in msgspec.convert(client.call("events", {"limit": limit}), list[Event]):
            _say_event(event, json)
        if follow:
            client.before_wait = until_readable
            for event in client.subscribe(["events"]):
                _say_event(event, json)


def cancel(
    request_id: RequestArgument,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Cancel a request; its client is told."""
    _do("cancel", {"request_id": request_id}, "cancelled {request_id}", socket, json)


def pause(socket: SocketOption = None, json: JsonOption = False) -> None:
    """Stop scheduling; requests are still taken and wait."""
    _do("pause", {}, "paused; `kvyard resume` goes on", socket, json)


def resume(socket: SocketOption = None, json: JsonOption = False) -> None:
    """Schedule again after `pause`; take requests again after `drain --no-stop`."""
    _do("resume", {}, "scheduling again", socket, json)


def drain(
    stop: Annotated[bool, typer.Option("--stop/--no-stop", help="Leave when everything has finished.")] = True,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Refuse new requests, finish what runs, and stop the daemon."""
    _do(
        "drain",
        {"stop": stop},
        "draining" + (", then it stops" if stop else "; `kvyard resume` takes requests again"),
        socket,
        json,
    )


def dump(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Write the daemon's whole state as JSON, for a report; serving is not disturbed."""
    with Client(client_socket(socket), timeout=60.0) as client:
        state = client.call("dump")
    if output is None:
        say_json(state)
        return
    try:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror or error}") from error
    say_json({"written": str(output)}) if json else say(f"written to {output}")


def _do(method: str, params: dict[str, Any], done: str, socket: Path | None, json: bool) -> None:
    with Client(client_socket(socket), timeout=60.0) as client:
        result = client.call(method, params)
    if json:
        say_json(result)
    else:
        told = {**params, **result} if isinstance(result, dict) else params
        say(clean(str(told.get("message") or done.format_map(told))))


def _say_event(event: Event, json: bool) -> None:
    if json:
        say(msgspec.json.encode(event).decode())
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    if event.topic == "dropped":
        say(f"{at}  ({event.data.get('count')} events were not shown: this reader is too slow)")
    else:
        record = "; its exit record: `kvyard events --json`" if event.data.get("kind") == "ejected" else ""
        say(f"{at}  {event.data.get('kind', ''):<8}  {clean(str(event.data.get('message', '')))}{record}")
