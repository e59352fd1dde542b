"""Asks before something happens. Declining has the focus; what cannot be undone wants its name typed."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label

from kvyard_tui.dialogs.base import Dialog


class Confirm(Dialog[bool]):
    """True when confirmed. `word` must be typed first, if given."""

    def __init__(self, title: str, texts: list[str], confirm: str, word: str = "", decline: str = "Cancel") -> None:
        super().__init__()
        self._title = title
        self._texts = texts
        self._confirm = confirm
        self._word = word
        self._decline = decline

    def compose(self) -> ComposeResult:
        """Texts, the word to type, Cancel and the deed."""
        with Vertical(id="box") as box:
            box.border_title = self._title
            box.border_subtitle = "left/right choose, enter presses, esc leaves"
            for text in self._texts:
                yield Label(text, markup=False)
            if self._word:
                yield Label(f"Type {self._word!r} to go on:", classes="dim", markup=False)
                yield Input(id="word", select_on_focus=False)
            with Horizontal(id="buttons"):
                yield Button(self._decline, id="cancel")
                yield Button(self._confirm, id="confirm", variant="error", disabled=bool(self._word))

    def on_mount(self) -> None:
        """Nothing happens by Enter alone."""
        self.query_one("#word" if self._word else "#cancel").focus()

    @on(Input.Changed, "#word")
    def check_word(self, event: Input.Changed) -> None:
        """Allow the deed when the word stands there."""
        self.query_one("#confirm", Button).disabled = event.value.strip() != self._word

    @on(Input.Submitted, "#word")
    def word_entered(self) -> None:
        """Enter goes on to the buttons, to Cancel first."""
        self.query_one("#cancel").focus()

    @on(Button.Pressed)
    def pressed(self, event: Button.Pressed) -> None:
        """Leave with the answer."""
        self.dismiss(event.button.id == "confirm")
