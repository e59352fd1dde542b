"""The base of the dialogs that change policies: pick, give values, confirm; the answer is shown in place."""

from __future__ import annotations

from typing import Any, ClassVar

from kvyard.control.client import ControlError
from kvyard.control.schema import SwapResult
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, OptionList

from kvyard_tui import fmt
from kvyard_tui.dialogs.base import Caller, Dialog
from kvyard_tui.dialogs.values import said
from kvyard_tui.model import Notice
from kvyard_tui.text import clean


class ChangeDialog(Dialog[str]):
    """Gives the text of a change that was made, None when nothing was done."""

    TITLE: ClassVar[str] = ""
    DEED: ClassVar[str] = ""
    PROMPT: ClassVar[str] = ""
    METHOD: ClassVar[str] = ""
    FIND: ClassVar[str] = ""
    """Shown in the line that narrows the list; empty for none."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "highlight('down')", "Next choice", show=False),
        Binding("up", "highlight('up')", "Previous choice", show=False),
    ]

    def __init__(self, call: Caller) -> None:
        super().__init__()
        self._call = call
        self._outcome: str | None = None

    def compose(self) -> ComposeResult:
        """List, its explanation, values, what will happen, Cancel and the deed."""
        with Vertical(id="box") as box:
            box.border_title = self.TITLE
            box.border_subtitle = "up/down pick, enter goes on, left/right buttons, esc leaves"
            if self.FIND:
                yield Input(id="find", placeholder=self.FIND, select_on_focus=False)
            yield OptionList(id="choices", markup=False)
            yield Label("", id="about", classes="dim", markup=False)
            yield Label(self.PROMPT, id="prompt", markup=False)
            yield Input(id="values", select_on_focus=False)
            yield Label("", id="plan", markup=False)
            with Horizontal(id="buttons"):
                yield Button("Cancel", id="cancel")
                yield Button(self.DEED, id="deed", variant="error", disabled=True)

    # ---- what a kind of change says ----------------------------------------------------------------------------

    def about(self, choice: str) -> str:
        """What is known of the highlighted choice."""
        raise NotImplementedError

    def plan(self, choice: str, values: str) -> str:
        """What the deed would do. Raises ValueError, with a text for people, when it cannot be done."""
        raise NotImplementedError

    def params(self, choice: str, values: str) -> dict[str, Any]:
        """Parameters of METHOD."""
        raise NotImplementedError

    # ---- the way through ---------------------------------------------------------------------------------------

    def choice(self) -> str | None:
        """Id of the highlighted option."""
        choices = self.query_one("#choices", OptionList)
        index = choices.highlighted
        return choices.get_option_at_index(index).id if index is not None else None

    @on(OptionList.OptionHighlighted)
    @on(Input.Changed)
    def consider(self) -> None:
        """Say what the deed would do with what is picked and typed."""
        if self._done:
            return
        choice, plan = self.choice(), self.query_one("#plan", Label)
        possible = False
        if choice is not None:
            self.query_one("#about", Label).update(clean(self.about(choice)))
            try:
                plan.update(clean(self.plan(choice, self.query_one("#values", Input).value)))
                possible = True
            except ValueError as error:
                plan.update(clean(str(error)))
        plan.set_classes("" if possible else "bad")
        self.query_one("#deed", Button).disabled = not possible

    @property
    def _done(self) -> bool:
        return self._outcome is not None

    @on(OptionList.OptionSelected)
    def chosen(self) -> None:
        """Enter on a choice goes on to its values."""
        self.query_one("#values").focus()

    @on(Input.Submitted, "#find")
    def found(self) -> None:
        """Enter takes the highlighted choice, as it does in the list."""
        self.query_one("#choices", OptionList).action_select()

    def action_highlight(self, way: str) -> None:
        """Up and down move through the list from wherever the typing is."""
        choices = self.query_one("#choices", OptionList)
        if way == "down":
            choices.action_cursor_down()
        else:
            choices.action_cursor_up()

    @on(Input.Submitted, "#values")
    def entered(self) -> None:
        """Enter after the values goes on to the buttons, to Cancel first."""
        self.query_one("#cancel").focus()

    @on(Button.Pressed, "#cancel")
    def leave(self) -> None:
        """Cancel, or Close after the deed."""
        self.dismiss(self._outcome)

    def action_leave(self) -> None:
        """Escape is the same as the left button."""
        self.dismiss(self._outcome)

    @on(Button.Pressed, "#deed")
    def deed(self) -> None:
        """Do it."""
        choice = self.choice()
        if choice is not None:
            self._do(self.params(choice, self.query_one("#values", Input).value))

    @work(exclusive=True)
    async def _do(self, params: dict[str, Any]) -> None:
        """The call is synchronous: when it answers, what it names is in charge."""
        plan, deed = self.query_one("#plan", Label), self.query_one("#deed", Button)
        deed.disabled = True
        plan.set_classes("dim")
        plan.update("Waiting for the daemon ...")
        try:
            result = await self._call(self.METHOD, SwapResult, params)
        except ControlError as error:
            self._show(said(error), "bad")
            deed.disabled = False
            return
        self._outcome = outcome(result) if result.ok else None
        self._show(outcome(result), "good" if result.ok else "bad")
        deed.disabled = result.ok
        if result.ok:
            self.query_one("#cancel", Button).label = "Close"

    def _show(self, text: str, tone: str) -> None:
        plan = self.query_one("#plan", Label)
        plan.set_classes(tone)
        plan.update(clean(text))
        self.query_one("#cancel").focus()


def outcome(result: SwapResult) -> str:
    """What a change did, in one sentence."""
    changed = [
        f"{kind}: {result.previous.get(kind, '?')} -> {name}"
        for kind, name in result.current.items()
        if result.previous.get(kind) != name
    ]
    if result.params:
        changed.append(", ".join(f"{name}={fmt.value(value)}" for name, value in result.params.items()))
    what = "; ".join(changed) or ", ".join(f"{kind} {name}" for kind, name in result.current.items())
    if not result.ok:
        return f"Not done: {result.message or 'the daemon gave no reason'}. In charge: {what}"
    text = f"Done at step {result.step:,}: generation {result.generation}. {what}"
    return f"{text}. {result.message}" if result.message else text


def done(text: str, now: float) -> Notice:
    """The notice that a change leaves on the main screen."""
    return Notice(text, "good", now)
