"""The base of both widgets: turns toned lines into strips and looks tones up in the theme."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from kvyard_tui.spans import TONES, Line, Tone, fit_line


class Toned(Widget):
    """A widget that draws toned lines; each tone is a component class that themes style."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"tone--{tone}" for tone in TONES} | {"tone--cursor"}

    def strip(self, spans: Line, width: int, *, cursor: bool = False) -> Strip:
        """A line as exactly `width` cells; the cursor's line takes the cursor's background."""
        segments = [Segment(text, self._look(tone, cursor)) for text, tone in fit_line(spans, width)]
        return Strip(segments, width)

    def _look(self, tone: Tone, cursor: bool) -> Style:
        """Textual keeps these styles until theme or focus change; colours with an alpha are blended."""
        names = [f"tone--{tone}"] if tone else []
        if cursor:
            names.append("tone--cursor")
        return self.get_visual_style(*names).rich_style
