"""Turns toned lines into strips; each tone is a component class of the widget, so that themes style it."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from kvyard_tui.spans import TONES, Line, Tone, fit_line
from kvyard_tui.text import to_ascii

TONE_CLASSES = {f"tone--{tone}" for tone in TONES} | {"tone--cursor"}
"""Component classes of every widget that draws toned lines."""


def toned_strip(widget: Widget, spans: Line, width: int, *, cursor: bool = False, ascii_only: bool = False) -> Strip:
    """A line as exactly `width` cells; the cursor's line takes the cursor's background."""
    segments = [
        Segment(to_ascii(text) if ascii_only else text, _look(widget, tone, cursor))
        for text, tone in fit_line(spans, width)
    ]
    return Strip(segments, width)


def _look(widget: Widget, tone: Tone, cursor: bool) -> Style:
    """Textual keeps these styles until theme or focus change; colours with an alpha are blended."""
    names = [f"tone--{tone}"] if tone else []
    if cursor:
        names.append("tone--cursor")
    return widget.get_visual_style(*names).rich_style
