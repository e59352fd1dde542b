"""What all dialogs share: a box in the middle, Escape to leave, arrows between buttons."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

T = TypeVar("T")
Result = TypeVar("Result")


DIALOG_CSS = """
Dialog { align: center middle; background: $background 60%; }
Dialog > #box {
    width: 76; max-width: 100%; height: auto; max-height: 100%;
    background: $surface; border: round $primary; padding: 0 1;
    border-title-color: $primary; border-title-style: bold;
}
Dialog Label { width: 1fr; height: auto; }
Dialog .dim { color: $foreground 60%; }
Dialog .good { color: $success; }
Dialog .bad { color: $error; }
Dialog Input { height: 1; border: none; padding: 0 1; background: $panel; }
Dialog Input:focus { border: none; background: $panel; background-tint: $primary 20%; }
Dialog OptionList { height: auto; max-height: 10; border: none; padding: 0; background: $surface; }
Dialog #buttons { height: 1; margin-top: 1; align-horizontal: right; }
Dialog Button { height: 1; min-width: 10; border: none; margin-left: 2; background: $panel; color: $foreground; }
Dialog Button:focus { background: $primary; color: $background; text-style: bold; }
Dialog Button.-error:focus { background: $error; color: $background; }
Dialog Button:disabled { text-style: dim; }
Dialog.-short #about, Dialog.-short #prompt { display: none; }
Dialog.-short OptionList { max-height: 3; text-wrap: nowrap; text-overflow: ellipsis; }
Dialog.-short #buttons { margin-top: 0; }
.-ascii Dialog > #box { border: ascii $primary; }
Reading.-large > #box { width: 96%; height: 94%; }
"""
"""Belongs to the application: a dialog's own defaults would yield to those of the widgets in it."""


class Caller(Protocol):
    """Calls a method of the daemon with this user's full role. Raises ControlError."""

    def __call__(self, method: str, result: type[T], params: Mapping[str, Any]) -> Awaitable[T]:
        """The decoded result."""
        ...


class Dialog(ModalScreen[Result]):
    """A box over the screen; leaving it with Escape gives None."""

    VERTICAL_BREAKPOINTS = [(0, "-short"), (22, "-roomy")]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Cancel"),
        Binding("left", "app.focus_previous", "Previous button", show=False),
        Binding("right", "app.focus_next", "Next button", show=False),
    ]

    def action_leave(self) -> None:
        """Leave without a result."""
        self.dismiss(None)
