"""The base of both widgets: turns toned lines into strips and looks tones up in the theme."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual.strip import Strip
from textual.widget import Widget

from kvyard_tui.spans import TONES, Line, fit_line


class Toned(Widget):
    """A widget that draws toned lines; each tone is a component class that themes style."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"tone--{tone}" for tone in TONES} | {"tone--cursor"}

    def strip(self, spans: Line, width: int, *, cursor: bool = False) -> Strip:
        """A line as exactly `width` cells; the cursor's line takes the cursor's background."""
        base = self.rich_style
        if cursor:
            base += self.get_component_rich_style("tone--cursor", partial=True)
        segments = [
            Segment(text, base + self.get_component_rich_style(f"tone--{tone}", partial=True) if tone else base)
            for text, tone in fit_line(spans, width)
        ]
        return Strip(segments, width)
