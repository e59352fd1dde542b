"""A panel: the lines of one view, drawn again only where they changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from kvyard_tui.glyphs import ASCII
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line
from kvyard_tui.widgets.toned import TONE_CLASSES, toned_strip

View = Callable[[Shown, int], list[Line]]


class Panel(Widget):
    """Draws a view at its own width; as high as the view has lines unless the style fixes a height."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES
    DEFAULT_CSS: ClassVar[str] = "Panel { height: auto; width: 1fr; }"

    def __init__(self, view: View, *, id: str) -> None:
        super().__init__(id=id)
        self._view = view
        self._shown: Shown | None = None
        self._lines: list[Line] = []

    def show(self, shown: Shown) -> None:
        """Draw what changed."""
        self._shown = shown
        if not self.display:
            return
        width = self.size.width
        # A panel of no lines has no width yet; that of the screen tells whether it gets any.
        before, self._lines = self._lines, self._view(shown, width or self.app.size.width)
        if len(before) != len(self._lines):
            self.refresh(layout=True)
            return
        changed = [Region(0, y, width, 1) for y, line in enumerate(self._lines) if line != before[y]]
        if changed:
            self.refresh(*changed)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Lines of the view at this width."""
        return len(self._view(self._shown, width)) if self._shown is not None and width > 0 else 0

    def on_resize(self, event: events.Resize) -> None:
        """Another width makes other lines."""
        if self._shown is not None:
            self._lines = self._view(self._shown, event.size.width)
            self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line of the view."""
        spans = self._lines[y] if y < len(self._lines) else ()
        ascii_only = self._shown is not None and self._shown.glyphs is ASCII
        return toned_strip(self, spans, self.size.width, ascii_only=ascii_only)
