"""The event log: restarts, swaps, ejections, drains, errors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvyard.control.schema import Event

from kvyard_tui import fmt
from kvyard_tui.glyphs import Glyphs
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line, Tone, fit_line, heading, line
from kvyard_tui.text import clean, wrap

LONGEST_FACT = 60
_TOLD = frozenset({"number", "kind", "message", "traceback", "params", "until"})
_BAD = ("ejected", "error", "restart")
_WARN = ("pause", "drain", "cancel", "release")


def event_line(event: Event, glyphs: Glyphs) -> Line:
    """Time, sign, name and text of one event."""
    name, text = describe(event)
    tone = tone_of(name)
    sign = {"bad": glyphs.failed, "warn": glyphs.warning}.get(tone, glyphs.dot)
    return line((clock(event.at), "dim"), (f" {sign} ", tone), (name, tone), f" {text}")


def describe(event: Event) -> tuple[str, str]:
    """Kind and text of an event: its message, and the short facts that the message does not name itself."""
    kind = str(event.data.get("kind") or event.topic)
    text = str(event.data.get("message") or "")
    rest = " ".join(_facts(event.data, text))
    return clean(kind), clean(f"{text}  {rest}" if text and rest else text or rest)


def is_receipt(event: Event) -> bool:
    """The audit entry of a call that worked: what the call did has an event of its own."""
    return event.data.get("kind") == "control" and event.data.get("outcome") == "ok"


def _facts(data: Mapping[str, Any], text: str) -> list[str]:
    """Tracebacks, snapshots and the like are for `kvyard events --json`."""
    facts: list[str] = []
    for key, value in data.items():
        if key in _TOLD or not isinstance(value, str | int | float):
            continue
        shown = fmt.value(value)
        if shown and len(shown) <= LONGEST_FACT and shown not in text:
            facts.append(f"{key}={shown}")
    return facts


def tone_of(kind: str) -> Tone:
    """How bad an event is, from its kind."""
    if kind in _BAD:
        return "bad"
    return "warn" if kind in _WARN else "accent"


def clock(at: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def events_panel(shown: Shown, width: int, most: int = 200, each: int = 2) -> list[Line]:
    """The newest first, each wrapped into at most `each` lines."""
    glyphs = shown.glyphs
    lines: list[Line] = [heading("Events", width, glyphs.rule, "newest first")]
    if not shown.yard.events:
        return [*lines, fit_line(line(("none yet", "dim")), width)]
    for event in reversed(shown.yard.events):
        lines.extend(_wrapped(event, shown, width, each))
        if len(lines) > most:
            break
    return lines


def _wrapped(event: Event, shown: Shown, width: int, each: int) -> list[Line]:
    name, text = describe(event)
    head = event_line(event, shown.glyphs)[:3]
    indent = len("00:00:00") + 3
    pieces = wrap(f"{name} {text}", max(8, width - indent), each)
    tone = tone_of(name)
    first = pieces[0] if pieces else name
    rest = first[len(name) :] if first.startswith(name) else ""
    shown_name = name if first.startswith(name) else first
    lines = [fit_line(line(*head[:2], (shown_name, tone), rest), width)]
    lines += [fit_line(line(" " * indent, (piece, "")), width) for piece in pieces[1:]]
    return lines
