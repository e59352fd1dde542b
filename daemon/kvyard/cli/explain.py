"""`kvyard explain REQUEST`: why it waits, who gave way for whom, who overtook it."""

from __future__ import annotations

from typing import Any

import typer

from kvyard.cli.options import JsonOption, RequestArgument, SocketOption
from kvyard.cli.output import clean, duration, say, say_json, size
from kvyard.control.client import Client
from kvyard.control.paths import client_socket


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(explain)


def explain(
    request_id: RequestArgument,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Say why a request waits and what would wake it, who gave way for whom at what cost, and who overtook it."""
    with Client(client_socket(socket)) as client:
        answer: dict[str, Any] = client.call("explain", {"request_id": request_id})
    if json:
        say_json(answer)
        return
    for number, sequence in enumerate(answer["sequences"]):
        if number:
            say()
        for line in lines(sequence):
            say(clean(line))


def lines(s: dict[str, Any]) -> list[str]:
    """One sequence's answer in sentences."""
    told = [f"{s['request_id']} (sequence {s['sequence']}): {s['state']}, arrived {duration(s['age_s'])} ago"]
    waiting = s["waiting_for"]
    if waiting is not None:
        told.append(f"  {_waits(waiting)}")
        told.append(f"    rule:  {waiting['rule'] or 'none has decided yet'}")
        told.append(f"    wakes: {waiting['wakes']}")
    told += [f"  gave way to {_winner(h, s)} {_cost(h)}" for h in s["preempted"]]
    told += [f"  {_who(h, 'victim')} gave way to it {_cost(h)}" for h in s["made_way_for_it"]]
    overtaken = s["overtaken_by"]
    if overtaken["count"]:
        names = ", ".join(row["request_id"] for row in overtaken["requests"][:5])
        more = f" and {overtaken['count'] - 5} more" if overtaken["count"] > 5 else ""
        arrivals = "later arrival" if overtaken["count"] == 1 else "later arrivals"
        told.append(f"  overtaken by {overtaken['count']} {arrivals}: {names}{more}")
    told += [f"  {_moment(h)}" for h in s["history"] if h["what"] in ("admitted", "engine-lost", "finished")]
    after = {name.replace("_", " "): at for name, at in s["after_s"].items() if at is not None}
    if after:
        told.append("  after its arrival: " + ", ".join(f"{name} {duration(at)}" for name, at in after.items()))
    return told


NOUNS = ("slots", "blocks", "budget", "chunk", "sibling")
"""Reasons that name what is waited for; the others, and a policy's own, are sentences."""


def _waits(waiting: dict[str, Any]) -> str:
    reason, since = str(waiting["reason"]), duration(waiting["since_s"])
    if waiting["waiting_s"] > waiting["since_s"] + 0.1:
        since += f" ({duration(waiting['waiting_s'])} in all)"
    if reason.partition(":")[0] in NOUNS:
        return f"waits for {reason} for {since}"
    return f"waits for {since}: {reason}"


def _winner(h: dict[str, Any], s: dict[str, Any]) -> str:
    return "itself" if h["by"] == s["sequence"] else _who(h, "by")


def _who(happening: dict[str, Any], name: str) -> str:
    return str(happening[f"{name}_request"] or f"sequence {happening[name]}")


def _cost(h: dict[str, Any]) -> str:
    cost = f"{h['tokens']} tokens to compute again"
    if h["how"] == "swap":
        cost = f"{size(h['bytes'])} to copy ({h['tokens']} tokens)"
    cause = "for its growth" if h["cause"] == "growth" else f"({h['cause']})"
    return f"{cause} {duration(h['ago_s'])} ago in step {h['step']}: {cost} (rule: {h['rule']})"


def _moment(h: dict[str, Any]) -> str:
    step = f" in step {h['step']}" if h["step"] >= 0 else ""
    if h["what"] == "engine-lost":
        said = f"the engine {h['how']}{step}, {duration(h['ago_s'])} ago"
        return f"{said}; a new one goes on with it and counts its steps from 1"
    what = f"admitted with {h['cached_tokens']} cached tokens" if h["what"] == "admitted" else f"ended: {h['reason']}"
    return f"{what}{step}, {duration(h['ago_s'])} ago"
