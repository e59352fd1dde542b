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

_BAD = ("ejected", "error", "restart")
_WARN = ("pause", "drain", "cancel", "release")


def event_line(event: Event, glyphs: Glyphs) -> Line:
    """Time, sign, name and text of one event."""
    name, text = describe(event)
    tone = tone_of(name)
    sign = {"bad": glyphs.failed, "warn": glyphs.warning}.get(tone, glyphs.dot)
    return line((clock(event.at), "dim"), (f" {sign} ", tone), (name, tone), f" {text}")


def describe(event: Event) -> tuple[str, str]:
    """Kind and text of an event: its message, and whatever else it carries as `name=value`."""
    data = {key: value for key, value in event.data.items() if key not in ("number", "kind", "message")}
    kind = str(event.data.get("kind") or event.topic)
    text = str(event.data.get("message") or "")
    rest = _fields(data)
    return clean(kind), clean(f"{text}  {rest}" if text and rest else text or rest)


def _fields(data: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in data.items() if value not in (None, "", {}, []))


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{_value(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ",".join(_value(one) for one in value)
    return fmt.value(value)


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
