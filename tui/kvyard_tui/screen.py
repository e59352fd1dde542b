"""The main screen: panels, the table, the filter line, and the keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer, Input

from kvyard_tui.dialogs.reading import Reading, details_view, events_view, help_view
from kvyard_tui.model import Shown
from kvyard_tui.spans import Line
from kvyard_tui.views.capacity import brief_lines, capacity
from kvyard_tui.views.events import events_panel
from kvyard_tui.views.header import banner, header, message
from kvyard_tui.views.latency import latency
from kvyard_tui.views.layout import TALL, mode, too_small
from kvyard_tui.views.policies import policies, totals
from kvyard_tui.views.requests import SORTS, requests_heading
from kvyard_tui.widgets.panel import Panel
from kvyard_tui.widgets.table import RequestTable

if TYPE_CHECKING:
    from kvyard_tui.app import TopApp

CHANGING = frozenset({"swap", "set_params", "cancel_request", "pause", "drain", "release"})
"""Actions that change the daemon: dimmed while the session is read-only."""


LAYOUT_CSS = """
MainScreen { background: $background; }
#header { background: $panel; }
#top { height: auto; }
#capacity { margin-left: 2; }
#side { width: 46; margin-left: 2; height: 1fr; display: none; }
#left { height: 1fr; }
#filter { height: 1; border: none; padding: 0 1; background: $panel; display: none; }
#brief, #small { display: none; }
.-wide #side { display: block; }
.-tall #policies, .-tall #heading { margin-top: 1; }
.-tall #body { margin-top: 1; }
.-compact #top, .-compact #policies, .-compact #totals { display: none; }
.-compact #brief { display: block; }
.-tiny #header, .-tiny #banner, .-tiny #body, .-tiny #message, .-tiny Footer { display: none; }
.-tiny #small { display: block; height: 1fr; }
"""
"""Belongs to the application: the default screen's own CSS is not read."""


class MainScreen(Screen[None]):
    """What a person decides from."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "Help", tooltip="Every key that works here", key_display="?", id="help"),
        Binding("slash", "filter", "Filter", tooltip="Show only matching requests", key_display="/", id="filter"),
        Binding("s", "sort", "Sort", tooltip="Order the requests by the next column", id="sort"),
        Binding("S", "reverse", "Reverse", tooltip="Reverse the order", show=False, id="reverse"),
        Binding(
            "space",
            "freeze",
            "Freeze",
            tooltip="Hold the picture still, or go on",
            key_display="spc",
            id="freeze",
        ),
        Binding("e", "events", "Events", tooltip="The event log in full", show=False, id="events"),
        Binding("enter", "details", "Details", tooltip="The selected request in full", show=False, id="details"),
        Binding("escape", "clear", "Clear", tooltip="Give up the selection, then the filter", show=False, id="clear"),
        Binding("w", "write", "Write", tooltip="Allow changes in this session, or forbid them again", id="write"),
        Binding("x", "swap", "Swap", tooltip="Put another policy or discipline in charge", id="swap"),
        Binding("m", "set_params", "Set", tooltip="Change a live parameter of a policy", id="set"),
        Binding("c", "cancel_request", "Cancel", tooltip="Cancel the selected request", id="cancel"),
        Binding("P", "pause", "Pause", tooltip="Pause scheduling, or resume it", id="pause"),
        Binding("D", "drain", "Drain", tooltip="Finish what runs, refuse what comes, exit", id="drain"),
        Binding("R", "release", "Release", tooltip="Release the last policy in quarantine", show=False, id="release"),
        Binding(
            "colon",
            "app.command_palette",
            "Commands",
            tooltip="Command palette: themes, screenshot, every action",
            key_display=":",
            show=False,
            id="commands",
        ),
        Binding("q,ctrl+c", "app.quit", "Quit", tooltip="Leave; the daemon is not touched", show=False, id="quit"),
    ]

    def compose(self) -> ComposeResult:
        """All parts of all sizes; which are seen is a class of the screen."""
        yield Panel(header, id="header")
        yield Panel(banner, id="banner")
        yield Panel(self._small, id="small")
        with Horizontal(id="body"):
            with Vertical(id="left"):
                with Horizontal(id="top"):
                    yield Panel(latency, id="latency")
                    yield Panel(capacity, id="capacity")
                yield Panel(brief_lines, id="brief")
                yield Panel(policies, id="policies")
                yield Panel(totals, id="totals")
                yield Panel(requests_heading, id="heading")
                yield RequestTable(id="requests")
            yield Panel(events_panel, id="side")
        yield Input(id="filter", placeholder="words to find, !word to leave out; Enter keeps, Esc clears")
        yield Panel(message, id="message")
        yield Footer(compact=True, show_command_palette=False)

    @property
    def top(self) -> TopApp:
        """The application."""
        return cast("TopApp", self.app)

    @property
    def table(self) -> RequestTable:
        """The table of requests."""
        return self.query_one(RequestTable)

    def on_mount(self) -> None:
        """Arrow keys belong to the table."""
        self.table.focus()
        self.top.redraw()

    def on_resize(self, event: events.Resize) -> None:
        """Another size shows other parts."""
        wanted = mode(event.size.width, event.size.height)
        for name in ("tiny", "compact", "normal", "wide"):
            self.set_class(name == wanted, f"-{name}")
        self.set_class(wanted in ("normal", "wide") and event.size.height >= TALL, "-tall")
        self.top.redraw()

    def show(self, shown: Shown) -> None:
        """Draw what changed, in the parts that are seen."""
        for panel in self.query(Panel):
            panel.show(shown)
        for table in self.query(RequestTable):  # there is none yet at the start, and none any more at the end
            table.show(shown)

    def _small(self, shown: Shown, width: int) -> list[Line]:
        return too_small(self.size.width, self.size.height)

    # ---- read-only ---------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dim what changes the daemon while the session is read-only."""
        return None if action in CHANGING and not self.top.writable else True

    def on_key(self, event: events.Key) -> None:
        """A dimmed key says why it does nothing."""
        bindings = self._bindings.key_to_bindings.get(event.key, [])
        if any(binding.action in CHANGING for binding in bindings) and not self.top.writable:
            self.top.tell("This session is read-only: press w to allow changes", "warn")

    # ---- looking -----------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        """Every key that is bound now."""
        self.app.push_screen(Reading("Keys", help_view(self._keys()), self.top.shown()))

    def _keys(self) -> list[tuple[str, str, bool]]:
        """Keys, meaning and whether they work now: this screen's first, keys of one action together."""
        found: dict[str, tuple[list[str], str, bool]] = {}
        known = self.active_bindings.values()
        for node in (self, self.table):
            for entry in (entry for entry in known if entry.node is node):
                binding = entry.binding
                if binding.tooltip:  # those that Textual's own widgets bring have none
                    keys, _, _ = found.setdefault(binding.action, ([], binding.tooltip, entry.enabled))
                    keys.append(self.app.get_key_display(binding))
        return [(" ".join(keys), text, enabled) for keys, text, enabled in found.values()]

    def action_events(self) -> None:
        """The event log in full."""
        self.app.push_screen(Reading("Events", events_view, self.top.shown(), large=True))

    def action_details(self) -> None:
        """The selected request in full."""
        selected = self.top.choice.selected
        if selected is None:
            self.top.tell("Select a request first, with the arrow keys", "warn")
            return
        self.app.push_screen(Reading("Request", details_view(selected), self.top.shown()))

    def action_sort(self) -> None:
        """The next order."""
        following = SORTS[(SORTS.index(self.top.choice.sort) + 1) % len(SORTS)]
        self.top.choose(replace(self.top.choice, sort=following, reverse=False))

    def action_reverse(self) -> None:
        """Turn the order round."""
        self.top.choose(replace(self.top.choice, reverse=not self.top.choice.reverse))

    def action_freeze(self) -> None:
        """Hold the picture still, or let it go on."""
        self.top.freeze()

    def action_clear(self) -> None:
        """Give up the selection; without one, the filter."""
        choice = self.top.choice
        if choice.selected is not None:
            self.top.choose(replace(choice, selected=None))
        elif choice.filter:
            self.query_one("#filter", Input).value = ""
            self.top.choose(replace(choice, filter=""))

    # ---- the filter line ---------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Type a filter."""
        line = self.query_one("#filter", Input)
        line.display = True
        line.focus()

    @on(Input.Changed, "#filter")
    def filter_changed(self, event: Input.Changed) -> None:
        """Rows follow the typing."""
        self.top.choose(replace(self.top.choice, filter=event.value.strip()))

    @on(Input.Submitted, "#filter")
    def filter_kept(self) -> None:
        """Back to the table."""
        self.query_one("#filter").display = False
        self.table.focus()

    def key_escape(self) -> None:
        """Escape in the filter line gives the filter up."""
        line = self.query_one("#filter", Input)
        if line.has_focus:
            line.value = ""
            self.filter_kept()

    @on(RequestTable.Selected)
    def selected(self, event: RequestTable.Selected) -> None:
        """The selection moved."""
        self.top.choose(replace(self.top.choice, selected=event.sequence))

    @on(RequestTable.SortBy)
    def sort_by(self, event: RequestTable.SortBy) -> None:
        """A title was clicked; a second time turns the order round."""
        choice = self.top.choice
        again = choice.sort == event.column
        self.top.choose(replace(choice, sort=event.column, reverse=again and not choice.reverse))

    # ---- changing ----------------------------------------------------------------------------------------------

    def action_write(self) -> None:
        """Allow changes in this session, or forbid them again."""
        self.top.operator.toggle()

    def action_swap(self) -> None:
        """Put another policy in charge."""
        self.top.operator.swap()

    def action_set_params(self) -> None:
        """Change a live parameter."""
        self.top.operator.set_params()

    def action_cancel_request(self) -> None:
        """Cancel the selected request."""
        self.top.operator.cancel()

    def action_pause(self) -> None:
        """Stop scheduling, or go on."""
        self.top.operator.pause()

    def action_drain(self) -> None:
        """Finish what runs and exit."""
        self.top.operator.drain()

    def action_release(self) -> None:
        """Release policies from quarantine."""
        self.top.operator.release()
