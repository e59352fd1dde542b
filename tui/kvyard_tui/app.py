"""`kvyard top`: the screen that operators watch."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvyard.control.schema import RequestRow
from textual.app import App, SystemCommand
from textual.screen import Screen
from textual.timer import Timer

from kvyard_tui.dialogs.base import DIALOG_CSS
from kvyard_tui.feed import Feed
from kvyard_tui.glyphs import ASCII, UNICODE, Glyphs, given_environment, wants_ascii
from kvyard_tui.model import NOTICE_FOR, Notice, Shown, Yard
from kvyard_tui.operator import Operator
from kvyard_tui.screen import LAYOUT_CSS, MainScreen
from kvyard_tui.signals import leaving_on_signals
from kvyard_tui.theme import DARK, LIGHT, TONE_CSS
from kvyard_tui.views.requests import rows

REDRAW_GAP = 0.3
"""Least seconds between two drawings of news; what a person does is drawn at once."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the person has chosen to see."""

    filter: str = ""
    sort: str = "order"
    reverse: bool = False
    selected: int | None = None


class TopApp(App[None]):
    """Holds the yard and the person's choices, and draws both."""

    TITLE = "kvyard"
    CSS: ClassVar[str] = LAYOUT_CSS + DIALOG_CSS + TONE_CSS
    ENABLE_COMMAND_PALETTE = True

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool = True,
        theme: str | None = None,
        glyphs: Glyphs = UNICODE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.path = path
        self.clock = clock
        self.yard = Yard()
        self.choice = Choice()
        self.feed = Feed(path, self.yard, self.news)
        self.operator = Operator(self, not readonly)
        self._glyphs = glyphs
        self._wanted_theme = theme
        self._frozen: Yard | None = None
        self._frozen_at: float | None = None
        self._notice: Notice | None = None
        self._drawn_at = -REDRAW_GAP
        self._pending: Timer | None = None
        self._loop_to_leave: asyncio.AbstractEventLoop | None = None

    def get_default_screen(self) -> Screen[Any]:
        """There is one screen; everything else is a dialog on it."""
        return MainScreen()

    def on_mount(self) -> None:
        """Begin to watch; a second's tick moves ages and lets notices fade."""
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = self._wanted_theme or os.environ.get("TEXTUAL_THEME") or DARK.name
        self.set_class(self._glyphs is ASCII, "-ascii")
        self.run_worker(self.feed.run(), group="feed")
        self.set_interval(1.0, self._tick)
        self._loop_to_leave = asyncio.get_running_loop()

    def leave(self) -> None:
        """Exit from outside the event loop, as a signal handler does."""
        if self._loop_to_leave is not None:
            self._loop_to_leave.call_soon_threadsafe(self.exit)

    # ---- drawing -----------------------------------------------------------------------------------------------

    def news(self) -> None:
        """The yard changed: draw now, or when the gap is over; whatever comes in between is drawn with it."""
        if self._frozen is not None or self._pending is not None or not self.is_running:
            return
        wait = max(0.0, self._drawn_at + REDRAW_GAP - self.clock())
        self._pending = self.set_timer(max(wait, 0.001), self.redraw)

    def redraw(self) -> None:
        """Draw what is known and chosen, on the main screen and on whatever is open above it."""
        if self._pending is not None:
            self._pending.stop()
            self._pending = None
        self._drawn_at = self.clock()
        self._drop_vanished()
        shown = self.shown()
        for screen in self.screen_stack:
            if isinstance(screen, MainScreen) or hasattr(screen, "show"):
                screen.show(shown)

    def shown(self) -> Shown:
        """What views draw from."""
        choice = self.choice
        return Shown(
            yard=self._frozen or self.yard,
            now=self.clock(),
            wall=time.time(),
            socket=str(self.path),
            writable=self.writable,
            frozen_at=self._frozen_at,
            filter=choice.filter,
            sort=choice.sort,
            reverse=choice.reverse,
            selected=choice.selected,
            notice=self._notice,
            glyphs=self._glyphs,
        )

    def _drop_vanished(self) -> None:
        """A selected request that is finished, or hidden by the filter, is no longer selected."""
        if self.choice.selected is not None and self.selected_row() is None:
            self.choice = replace(self.choice, selected=None)

    def _tick(self) -> None:
        self.operator.tick()
        shown = self.shown()
        notice = self._notice
        fading = notice is not None and self.clock() - notice.at < NOTICE_FOR + 2
        if fading or shown.stale is not None or shown.frozen_at is not None or self.yard.phase != "live":
            self.redraw()

    # ---- what the person does ----------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether keys may change the daemon."""
        return self.operator.writable

    def choose(self, choice: Choice) -> None:
        """Another filter, order or selection."""
        self.choice = choice
        self.redraw()

    def selected_row(self) -> RequestRow | None:
        """The selected request, if it is among the rows on screen."""
        return next((row for row in rows(self.shown()) if row.id == self.choice.selected), None)

    def freeze(self) -> None:
        """Hold the picture, or go on with what has come meanwhile."""
        frozen = self._frozen is None
        self._frozen = self.yard.copy() if frozen else None
        self._frozen_at = self.clock() if frozen else None
        self.redraw()

    def tell(self, text: str, tone: Literal["good", "warn", "bad"]) -> None:
        """Answer the person in the message line; a newer answer takes the older's place."""
        self._notice = Notice(text, tone, self.clock())
        self.redraw()

    def refresh_keys(self) -> None:
        """Dim or light the keys that change the daemon."""
        for screen in self.screen_stack:
            screen.refresh_bindings()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Textual's own and every key of the main screen, for the command palette."""
        yield from super().get_system_commands(screen)
        for known in screen.active_bindings.values():
            binding = known.binding
            if known.enabled and isinstance(known.node, MainScreen) and not binding.action.startswith("app."):
                action = binding.action
                text = f"{binding.tooltip} (key {self.get_key_display(binding)})"
                yield SystemCommand(binding.description, text, self._doing(action))

    def _doing(self, action: str) -> Callable[[], None]:
        def do() -> None:
            self.call_later(self.screen.run_action, action)

        return do


def run(socket: str, *, readonly: bool = True, theme: str | None = None, ascii_only: bool | None = None) -> int:
    """Show the daemon behind a control socket until the person leaves; the process's exit status.

    `readonly` is how the session begins; the person may change it. `ascii_only` None asks the locale.
    Without a terminal it says so on stderr and returns 2.
    """
    # Textual draws on stderr, so all three must be the terminal.
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or os.environ.get("TERM", "") in ("", "dumb"):
        print(  # noqa: T201 - there is no screen to say it on
            "kvyard top draws on a terminal and there is none (or TERM is dumb). "
            "For scripts and logs use `kvyard status --json`.",
            file=sys.stderr,
        )
        return 2
    for name in ("COLUMNS", "LINES"):  # exported by some shells; they would hide every later size from Textual
        os.environ.pop(name, None)
    if ascii_only is None:
        ascii_only = wants_ascii(given_environment(), sys.stdout.encoding)
    app = TopApp(Path(socket), readonly=readonly, theme=theme, glyphs=ASCII if ascii_only else UNICODE)
    with leaving_on_signals(app.leave):
        app.run()
    return app.return_code or 0
