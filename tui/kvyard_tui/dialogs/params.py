"""Changes one live parameter of a policy in charge."""

from __future__ import annotations

from typing import Any, ClassVar

from kvyard.control.client import ControlError
from kvyard.control.schema import Status
from textual import on, work
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from kvyard_tui import fmt
from kvyard_tui.dialogs.base import Caller
from kvyard_tui.dialogs.change import ChangeDialog
from kvyard_tui.dialogs.specs import InForce, Spec, accepts
from kvyard_tui.dialogs.values import parse_value
from kvyard_tui.text import clean, fit


class ParamsDialog(ChangeDialog):
    """Lists the parameters in force; the daemon checks the new value against its declaration."""

    TITLE: ClassVar[str] = "Change a parameter"
    DEED: ClassVar[str] = "Set"
    PROMPT: ClassVar[str] = "New value:"
    METHOD: ClassVar[str] = "policy.set"

    def __init__(self, call: Caller, status: Status) -> None:
        super().__init__(call)
        self._known: dict[str, tuple[str, str, Any]] = {}
        for policy in status.policies:
            for name, value in policy.params.items():
                self._known[f"{policy.kind}/{name}"] = (policy.kind, name, value)
        self._names = {policy.kind: policy.name for policy in status.policies}
        self._specs: dict[str, Spec] = {}

    def on_mount(self) -> None:
        """Fill the list; what the parameters accept comes when the daemon has told it."""
        self._fill()
        if self._known:
            self.query_one("#choices", OptionList).focus()
            self._ask()
        else:
            self._show("The policies in charge have no parameters.", "dim")

    def _fill(self) -> None:
        choices = self.query_one("#choices", OptionList)
        highlighted = choices.highlighted
        choices.clear_options()
        for key, (kind, name, value) in self._known.items():
            spec = self._specs.get(key)
            fixed = spec is not None and spec.change != "live"
            text = f"{fit(kind, 11)} {name} = {fmt.value(value)}  ({self._names[kind]})"
            choices.add_option(
                Option(clean(f"{text}  fixed until a swap" if fixed else text), id=key, disabled=fixed)
            )
        if highlighted is None:
            choices.action_first()
        else:
            choices.highlighted = highlighted

    @work
    async def _ask(self) -> None:
        try:
            in_force = await self._call("policy.show", InForce, {"kind": "", "name": ""})
        except ControlError:
            return  # the values in the status are enough to go on; the daemon checks what is sent
        for policy in in_force.policies:
            self._specs |= {f"{policy.kind}/{spec.name}": spec for spec in policy.params}
        self._fill()
        self.consider()

    @on(OptionList.OptionSelected)
    def prefill(self, event: OptionList.OptionSelected) -> None:
        """Begin with the present value."""
        values = self.query_one("#values", Input)
        values.value = fmt.value(self._known[str(event.option_id)][2])
        values.cursor_position = len(values.value)

    def about(self, choice: str) -> str:
        """Whose parameter it is."""
        kind, name, _ = self._known[choice]
        spec = self._specs.get(choice)
        return f"{name}: {accepts(spec)}" if spec is not None else f"{name} of the {kind} policy {self._names[kind]}"

    def plan(self, choice: str, values: str) -> str:
        """From what to what."""
        kind, name, before = self._known[choice]
        if not values.strip():
            raise ValueError("give a new value")
        after = parse_value(values.strip())
        if after == before and type(after) is type(before):
            raise ValueError("that is its value now")
        return f"{kind}: {name} = {fmt.value(before)} -> {fmt.value(after)}, at the next step boundary"

    def params(self, choice: str, values: str) -> dict[str, Any]:
        """Of `policy.set`."""
        kind, name, _ = self._known[choice]
        return {"kind": kind, "params": {name: parse_value(values.strip())}}
