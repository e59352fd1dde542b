"""Puts another policy or discipline in charge."""

from __future__ import annotations

from typing import Any, ClassVar

from kvyard.control.client import ControlError
from kvyard.control.schema import PolicyListing, PolicyRow, Status
from textual import on, work
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from kvyard_tui import fmt
from kvyard_tui.dialogs.base import Caller
from kvyard_tui.dialogs.change import ChangeDialog
from kvyard_tui.dialogs.specs import Described, summary
from kvyard_tui.dialogs.values import parse_values, said
from kvyard_tui.text import clean, fit

KINDS = ("discipline", "admission", "preemption", "prefill")


class SwapDialog(ChangeDialog):
    """Lists what is installed; what cannot be used says why and cannot be picked."""

    TITLE: ClassVar[str] = "Swap a policy"
    DEED: ClassVar[str] = "Swap"
    PROMPT: ClassVar[str] = "Parameters (name=value name=value; empty for the defaults):"
    METHOD: ClassVar[str] = "policy.swap"
    FIND: ClassVar[str] = "type to find a policy"

    def __init__(self, call: Caller, status: Status) -> None:
        super().__init__(call)
        self._status = status
        self._listed: dict[str, PolicyRow] = {}
        self._described: dict[str, str] = {}
        self._problems: list[str] = []

    def on_mount(self) -> None:
        """Ask for the list; until it is there only Cancel can be pressed."""
        self.query_one("#cancel").focus()
        self._load()

    @work
    async def _load(self) -> None:
        try:
            listing = await self._call("policy.list", PolicyListing, {})
        except ControlError as error:
            self._show(said(error), "bad")
            return
        for row in sorted(listing.policies, key=_order):
            self._listed.setdefault(f"{row.kind}/{row.name}", row)
        self._problems = listing.problems
        self.fill()
        if self._listed and self.focused is not None and self.focused.id == "cancel":
            self.query_one("#find").focus()

    @on(Input.Changed, "#find")
    def fill(self) -> None:
        """List what holds every word that is typed; unreadable distributions while nothing is."""
        words = self.query_one("#find", Input).value.casefold().split()
        choices = self.query_one("#choices", OptionList)
        choices.clear_options()
        fitting = [key for key, row in self._listed.items() if all(word in _searched(key, row) for word in words)]
        for key in sorted(fitting, key=lambda key: _closeness(self._listed[key].name, words)):
            row = self._listed[key]
            choices.add_option(Option(option_text(row), id=key, disabled=bool(row.problem)))
        if not words:
            choices.add_options(Option(f"unreadable: {clean(problem)}", disabled=True) for problem in self._problems)
        choices.action_first()
        self.consider()

    @on(OptionList.OptionSelected)
    def describe(self, event: OptionList.OptionSelected) -> None:
        """Ask for the parameters of what was chosen; the daemon loads it in a scratch process for that."""
        row = self._listed.get(str(event.option_id))
        if row is not None:
            self._describe(f"{row.kind}/{row.name}", row)

    @work(exclusive=True, group="describe")
    async def _describe(self, key: str, row: PolicyRow) -> None:
        try:
            described = await self._call("policy.show", Described, {"kind": row.kind, "name": row.name})
        except ControlError as error:
            self._described[key] = said(error)
        else:
            self._described[key] = summary(described)
        self.consider()

    def about(self, choice: str) -> str:
        """Its own description, where it comes from, and its parameters once they are known."""
        row = self._listed[choice]
        version = f"{row.version} runs, {row.installed} is installed" if row.installed else row.version
        text = f"{row.doc or 'no description'} ({row.distribution} {version}, API {row.api})"
        return f"{text}; {self._described[choice]}" if choice in self._described else text

    def plan(self, choice: str, values: str) -> str:
        """From what, to what, with what."""
        row = self._listed[choice]
        given = parse_values(values)
        kind = row.kind
        before = in_charge(self._status, kind)
        if before == row.name and not given and not row.installed:
            raise ValueError(f"{kind} {row.name} is in charge now; give parameters to load it with other ones")
        text = f"{kind}: {before} -> {row.name}"
        if given:
            text += " with " + " ".join(f"{name}={fmt.value(value)}" for name, value in given.items())
        return f"{text}, at the next step boundary"

    def params(self, choice: str, values: str) -> dict[str, Any]:
        """Of `policy.swap`."""
        row = self._listed[choice]
        return {"kind": row.kind, "name": row.name, "params": parse_values(values)}


def in_charge(status: Status, kind: str) -> str:
    """Name of what decides now."""
    if kind == "discipline":
        return status.in_charge
    return next((policy.name for policy in status.policies if policy.kind == kind), "?")


def option_text(row: PolicyRow) -> str:
    """One line of the list."""
    mark = "in charge" if row.active else ""
    tail = f"! {row.problem}" if row.problem else mark
    return clean(f"{'*' if row.active else ' '} {fit(row.kind, 11)} {fit(row.name, 20)} {tail}").rstrip()


def _searched(key: str, row: PolicyRow) -> str:
    return f"{key} {row.doc}".casefold()


def _closeness(name: str, words: list[str]) -> int:
    """0 for the very name, then what begins with it, then names that hold it, then descriptions."""
    if not words or name in words:
        return 0
    if any(name.startswith(word) for word in words):
        return 1
    return 2 if any(word in name for word in words) else 3


def _order(row: PolicyRow) -> tuple[int, str]:
    return (KINDS.index(row.kind) if row.kind in KINDS else len(KINDS), row.name)
