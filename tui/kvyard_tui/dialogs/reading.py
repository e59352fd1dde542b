"""Screens to read: help from the live bindings, the event log, one request in full."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll

from kvyard_tui.dialogs.base import Dialog
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line, fit_line, line
from kvyard_tui.text import fit, wrap
from kvyard_tui.views.events import events_panel
from kvyard_tui.views.requests import details
from kvyard_tui.widgets.panel import Panel, View


class Reading(Dialog[None]):
    """A box with one view that stays up to date; Escape or `q` leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,enter", "leave", "Close")]

    def __init__(self, title: str, view: View, shown: Shown, *, large: bool = False) -> None:
        super().__init__(classes="-large" if large else None)
        self._title = title
        self._view = view
        self._first = shown

    def compose(self) -> ComposeResult:
        """The view in a box that scrolls."""
        with VerticalScroll(id="box") as box:
            box.border_title = self._title
            box.border_subtitle = "esc closes"
            yield Panel(self._view, id="view")

    def on_mount(self) -> None:
        """Show what is known."""
        self.show(self._first)
        self.query_one("#box").focus()

    def show(self, shown: Shown) -> None:
        """Newer data came."""
        self.query_one("#view", Panel).show(shown)


def help_view(keys: list[tuple[str, str, bool]]) -> View:
    """The keys as (key, meaning, whether it works now)."""

    def view(shown: Shown, width: int) -> list[Line]:
        off = any(not enabled for _, _, enabled in keys)
        lines = [
            fit_line(
                line((fit(key, 12), "strong" if enabled else "dim"), (f" {text}", "" if enabled else "dim")), width
            )
            for key, text, enabled in keys
        ]
        if off:
            lines += [(), fit_line(line(("Dimmed keys change the daemon: press w first.", "warn")), width)]
        return lines

    return view


def events_view(shown: Shown, width: int) -> list[Line]:
    """The whole log, each event in up to six lines."""
    return events_panel(shown, width, most=1000, each=6)


def details_view(sequence: int) -> View:
    """One request, for as long as it is unfinished."""

    def view(shown: Shown, width: int) -> list[Line]:
        row = shown.yard.row(sequence)
        if row is None:
            return [fit_line(line(("It is no longer among the unfinished requests.", "dim")), width)]
        lines: list[Line] = []
        for name, text in details(row, shown.yard.why(row)):
            for number, piece in enumerate(wrap(text, max(8, width - 12), 4)):
                lines.append(fit_line(line((fit("" if number else name, 12), "dim"), piece), width))
        return lines

    return view
