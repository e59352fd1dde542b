"""`kvyard policy`: what is installed, what is in charge, and putting another in charge."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvyard.cli.commands import App
from kvyard.cli.errors import USAGE, CliError
from kvyard.cli.options import JsonOption, SocketOption
from kvyard.cli.outline import scalar, shown_lines
from kvyard.cli.output import clean, duration, say, say_json, table
from kvyard.control.client import Client, NotRunning
from kvyard.control.paths import client_socket
from kvyard.control.schema import PolicyListing, PolicyRow, SwapResult

SWAP_TIMEOUT = 120.0
"""Seconds: the answer comes when the policy is in charge, after vetting and adoption."""

KindArgument = Annotated[str, typer.Argument(help="admission, preemption, prefill, or discipline.")]
PartArgument = Annotated[str, typer.Argument(help="admission, preemption or prefill, also of a discipline.")]
ParamsArgument = Annotated[
    list[str] | None, typer.Argument(help="Parameters as name=value.", show_default=False, metavar="[NAME=VALUE]...")
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = App(help="Scheduling policies: installed, in charge, swapped.")
    group.command("list")(list_policies)
    for command in (show, swap, release):
        group.command()(command)
    group.command("set")(set_params)
    app.add_typer(group, name="policy")


def list_policies(socket: SocketOption = None, json: JsonOption = False) -> None:
    """List installed policies and disciplines; without a daemon, those of this installation."""
    try:
        with Client(client_socket(socket)) as client:
            listing = msgspec.convert(client.call("policy.list"), PolicyListing)
    except NotRunning:
        if socket is not None:
            raise
        listing = _installed()
    if json:
        say_json(listing)
        return
    head = ("", "KIND", "NAME", "VERSION", "API", "FROM", "WHAT IT DOES")
    rows = [
        ("*" if row.active else "!" if row.problem else "", row.kind, row.name, _versions(row), row.api,
         row.distribution, row.problem or row.doc.strip().partition("\n")[0])
        for row in listing.policies
    ]  # fmt: skip
    say("\n".join(table(head, rows)))
    for problem in listing.problems:
        say(f"! {clean(problem)}")


def _versions(row: PolicyRow) -> str:
    return f"{row.version} ({row.installed} installed)" if row.installed else row.version


def show(
    policy: Annotated[str, typer.Argument(help="KIND, KIND/NAME or discipline/NAME; nothing is all in charge.")] = "",
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show what is really in force: parameters with their ranges, and where each part comes from."""
    kind, _, name = policy.partition("/")
    with Client(client_socket(socket)) as client:
        shown = client.call("policy.show", {"kind": kind, "name": name})
    if json:
        say_json(shown)
    else:
        say("\n".join(shown_lines(shown)))


def swap(
    kind: KindArgument,
    name: Annotated[str, typer.Argument(help="Name as `kvyard policy list` shows it.")],
    params: ParamsArgument = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Put another policy or discipline in charge; returns when it is."""
    _change("policy.swap", {"kind": kind, "name": name, "params": _parse(params)}, socket, json)


def set_params(
    kind: PartArgument, params: ParamsArgument = None, socket: SocketOption = None, json: JsonOption = False
) -> None:
    """Change live parameters of a policy in charge."""
    values = _parse(params)
    if not values:
        raise CliError("no parameter was given", f"for example: kvyard policy set {kind} name=value", USAGE)
    _change("policy.set", {"kind": kind, "params": values}, socket, json)


def release(
    policy: Annotated[str, typer.Argument(help="KIND/NAME as `kvyard status` shows it.")],
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Release a policy from quarantine, so that it may be swapped in again."""
    with Client(client_socket(socket)) as client:
        result = client.call("policy.release", {"policy": policy})
    say_json(result) if json else say(f"{clean(policy)} is released")


def _change(method: str, params: dict[str, Any], socket: Path | None, json: bool) -> None:
    with Client(client_socket(socket), timeout=SWAP_TIMEOUT) as client:
        result = msgspec.convert(client.call(method, params), SwapResult)
    if json:
        say_json(result)
    elif result.ok and result.params:
        values = " ".join(f"{name}={scalar(value)}" for name, value in result.params.items())
        kind = str(params["kind"])
        name = result.current.get(kind, "")
        say(f"{clean(f'{kind} {name}: {values}')} since step {result.step} (generation {result.generation})")
    elif result.ok:
        names = ", ".join(f"{kind} {name}" for kind, name in result.current.items())
        pause = f"; no step ran for {duration(result.pause_ms / 1000)}" if result.pause_ms else ""
        say(f"in charge since step {result.step}: {clean(names)} (generation {result.generation}{pause})")
        if result.message:
            say(clean(result.message))
    if not result.ok:
        raise CliError(result.message or "the change was refused", "what was in charge before still is")


def _parse(params: list[str] | None) -> dict[str, Any]:
    """`name=value` texts: true, false and numbers as such, everything else as text."""
    values: dict[str, Any] = {}
    for text in params or []:
        name, separator, raw = text.partition("=")
        if not (name and separator):
            raise CliError(f"{text!r} is no parameter", "write name=value", USAGE, "bad-params")
        values[name] = _value(raw)
    return values


def _value(raw: str) -> bool | int | float | str:
    try:
        value = json_module.loads(raw)
    except ValueError:
        return raw
    return value if isinstance(value, bool | int | float) else raw


def _installed() -> PolicyListing:
    from kvyard.policy.registry import list_policies as installed

    found = installed()
    rows = [
        PolicyRow(row.kind, row.name, row.distribution, row.version, row.api, False, row.problem, row.doc)
        for row in found.policies
    ]
    return PolicyListing(rows, list(found.problems))
