"""The table of requests. Cells are made for visible rows only and a line is drawn only when it changed.

Textual's DataTable formats and draws every visible cell again whenever one changes, which at ten updates a
second costs more than half a core; here the cost is that of the lines that differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvyard.control.schema import RequestRow
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from kvyard_tui.glyphs import ASCII
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line
from kvyard_tui.views.requests import DIGITS, Column, columns_for, digits_of, rows, table_head, table_row
from kvyard_tui.widgets.toned import TONE_CLASSES, toned_strip


class RequestTable(ScrollView, can_focus=True):
    """Shows `rows(shown)`; the selection is a sequence id, so it stays with its request wherever that moves."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES
    DEFAULT_CSS: ClassVar[str] = """
    RequestTable { height: 1fr; min-height: 2; overflow-x: hidden; scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "Next request", tooltip="Next request", show=False),
        Binding("up,k", "move(-1)", "Previous request", tooltip="Previous request", show=False),
        Binding("pagedown", "page(1)", "Page down", tooltip="Page down", show=False),
        Binding("pageup", "page(-1)", "Page up", tooltip="Page up", show=False),
        Binding("home,g", "edge(-1)", "First request", tooltip="First request", show=False),
        Binding("end,G", "edge(1)", "Last request", tooltip="Last request", show=False),
    ]

    @dataclass
    class Selected(Message):
        """The person selected a request, or nothing (None)."""

        sequence: int | None

    @dataclass
    class SortBy(Message):
        """The person clicked a column's title."""

        column: str

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._shown: Shown | None = None
        self._rows: list[RequestRow] = []
        self._digits = DIGITS
        self._drawn: list[Line] = []
        self._selected: int | None = None
        """Ahead of `shown.selected` while keys come faster than drawings."""

    def show(self, shown: Shown) -> None:
        """Take the rows and draw the visible lines that changed."""
        self._shown = shown
        self._selected = shown.selected
        self._rows = rows(shown)
        self._digits = digits_of(self._rows)
        wanted = Size(self.size.width, len(self._rows) + 1)
        if self.virtual_size != wanted:
            self.virtual_size = wanted
        self._redraw()

    @property
    def _columns(self) -> list[tuple[Column, int]]:
        return columns_for(self.size.width, self._digits)

    @property
    def visible_rows(self) -> list[RequestRow]:
        """The rows after filter and order: those that an action may touch."""
        return self._rows

    def _redraw(self) -> None:
        width = self.size.width
        before = self._drawn
        self._drawn = [self._line(y) for y in range(self.size.height)]
        if len(before) != len(self._drawn):
            self.refresh()
            return
        changed = [Region(0, y, width, 1) for y, line in enumerate(self._drawn) if line != before[y]]
        if changed:
            self.refresh(*changed)

    def _line(self, y: int) -> Line:
        """The toned text of a line of the viewport; the selected row's differs, so that moving it is a change."""
        if self._shown is None:
            return ()
        columns = self._columns
        if y == 0:
            return table_head(columns, self._shown)
        row = self._row_at(y)
        if row is None:
            return ()
        cursor: Line = (("", "accent"),) if row.id == self._shown.selected else ()
        return (*table_row(row, columns, self._shown), *cursor)

    def _row_at(self, y: int) -> RequestRow | None:
        index = self.scroll_offset.y + y - 1
        return self._rows[index] if y >= 1 and 0 <= index < len(self._rows) else None

    def render_line(self, y: int) -> Strip:
        """The header stays; rows scroll below it."""
        row = self._row_at(y)
        selected = self._shown.selected if self._shown is not None else None
        spans = self._line(y)
        if y < len(self._drawn):  # after scrolling, what is on screen is no longer what `show` drew
            self._drawn[y] = spans
        ascii_only = self._shown is not None and self._shown.glyphs is ASCII
        cursor = row is not None and row.id == selected
        return toned_strip(self, spans, self.size.width, cursor=cursor, ascii_only=ascii_only)

    def on_resize(self) -> None:
        """Another size shows other columns and rows."""
        if self._shown is not None:
            self.virtual_size = Size(self.size.width, len(self._rows) + 1)
        self._redraw()

    # ---- moving ------------------------------------------------------------------------------------------------

    def _index(self) -> int | None:
        return next((i for i, row in enumerate(self._rows) if row.id == self._selected), None)

    def _select(self, index: int) -> None:
        if not self._rows:
            return
        index = max(0, min(index, len(self._rows) - 1))
        top, page = self.scroll_offset.y, max(1, self.size.height - 1)
        if index < top:
            self.scroll_to(y=index, animate=False)
        elif index >= top + page:
            self.scroll_to(y=index - page + 1, animate=False)
        self._selected = self._rows[index].id
        self.post_message(self.Selected(self._selected))

    def action_move(self, by: int) -> None:
        """Select the next or previous row; the first visible one when none is selected."""
        index = self._index()
        self._select(self.scroll_offset.y if index is None else index + by)

    def action_page(self, by: int) -> None:
        """Move by a page."""
        index = self._index()
        page = max(1, self.size.height - 2)
        self._select((self.scroll_offset.y if index is None else index) + by * page)

    def action_edge(self, which: int) -> None:
        """Go to the first or the last row."""
        self._select(0 if which < 0 else len(self._rows) - 1)

    def on_click(self, event: events.Click) -> None:
        """A title sorts, a row is selected."""
        if event.y == 0:
            left = 0
            for column, size in self._columns:
                if left <= event.x < left + size + 1:
                    self.post_message(self.SortBy(column.key))
                    return
                left += size + 1
        row = self._row_at(event.y)
        if row is not None:
            self.post_message(self.Selected(row.id))
