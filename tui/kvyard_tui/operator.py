"""What the person may change, each after a question: the session is read-only until `w` says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kvyard.control.client import ControlError
from kvyard.control.schema import Status

from kvyard_tui.connection import CALL_TIMEOUT, SWAP_TIMEOUT
from kvyard_tui.dialogs.confirm import Confirm
from kvyard_tui.dialogs.params import ParamsDialog
from kvyard_tui.dialogs.swap import SwapDialog
from kvyard_tui.dialogs.values import said
from kvyard_tui.feed import operate
from kvyard_tui.text import clean
from kvyard_tui.views.requests import progress

if TYPE_CHECKING:
    from kvyard_tui.app import TopApp

T = TypeVar("T")

ELEVATED_FOR = 900.0
"""Seconds after the last change when the session is read-only again."""


class Operator:
    """The changing half of the screen. Every call goes over a connection of its own."""

    def __init__(self, app: TopApp, writable: bool) -> None:
        self._app = app
        self._allowed_now = writable
        self._daemon = app.yard.daemons
        self._last = app.clock()

    @property
    def writable(self) -> bool:
        """Whether changes are allowed, of the daemon for which they were."""
        return self._allowed_now and self._daemon == self._app.yard.daemons

    # ---- read-only and back ------------------------------------------------------------------------------------

    def toggle(self) -> None:
        """Ask before changes are allowed; never before they are forbidden."""
        if self.writable:
            self._set(False, "Read-only again")
            return
        hello = self._app.yard.hello
        if hello is None:
            self._app.tell("No connection to the daemon yet: nothing to change", "warn")
        elif hello.role == "viewer":
            self._app.tell("The daemon lets you look only; it gives changes to the operator group", "warn")
        else:
            texts = [
                f"Your role at the daemon is {hello.role}. Every change still asks first and is written to its log.",
                f"After {ELEVATED_FOR / 60:.0f} minutes without a change the session is read-only again.",
            ]
            self._app.push_screen(Confirm("Allow changes in this session?", texts, "Allow"), self._allowed)

    def _allowed(self, yes: bool | None) -> None:
        if yes:
            self._set(True, "Changes are allowed: x swap, m set, c cancel, P pause, D drain. w forbids them")

    def _set(self, writable: bool, text: str) -> None:
        self._allowed_now = writable
        self._daemon = self._app.yard.daemons
        self._last = self._app.clock()
        self._app.tell(text, "warn" if writable else "good")
        self._app.refresh_keys()

    def tick(self) -> None:
        """Forget the permission after a while, and with the daemon that it was for."""
        if self._allowed_now and not self.writable:
            self._set(False, "Read-only again: another daemon answers now")
        elif self.writable and self._app.clock() - self._last > ELEVATED_FOR:
            self._set(False, "Read-only again: no change was made for a while")

    # ---- the changes -------------------------------------------------------------------------------------------

    def swap(self) -> None:
        """Pick a policy or discipline."""
        if (status := self._ready()) is not None:
            self._app.push_screen(SwapDialog(self._slow_call, status), self._changed)

    def set_params(self) -> None:
        """Pick a parameter."""
        if (status := self._ready()) is not None:
            self._app.push_screen(ParamsDialog(self._slow_call, status), self._changed)

    def _changed(self, outcome: str | None) -> None:
        if outcome:
            self._app.tell(outcome, "good")

    def cancel(self) -> None:
        """The selected request, if it is on screen: what a filter hides is not touched."""
        if self._ready() is None:
            return
        row = self._app.selected_row()
        if row is None:
            self._app.tell("Select a request first, with the arrow keys", "warn")
            return
        name = row.request_id
        texts = [
            f"{clean(name)} is {clean(row.state)}, {progress(row)[1]}.",
            "Its client gets an error; what it has received stays.",
        ]
        dialog = Confirm("Cancel this request?", texts, "Cancel request", decline="Keep it")
        self._ask(dialog, "cancel", {"request_id": name}, f"{clean(name)} cancelled")

    def pause(self) -> None:
        """Stop scheduling, or go on."""
        status = self._ready()
        if status is None:
            return
        if status.paused:
            dialog = Confirm("Resume scheduling?", ["Requests that wait go on."], "Resume")
            self._ask(dialog, "resume", {}, "Scheduling goes on")
            return
        counts = status.requests
        texts = [f"{counts.running} running and {counts.waiting} waiting requests stand still until you resume."]
        self._ask(Confirm("Pause scheduling?", texts, "Pause"), "pause", {}, "Scheduling is paused: P resumes")

    def drain(self) -> None:
        """Cannot be taken back, so its name is typed."""
        status = self._ready()
        if status is None:
            return
        counts = status.requests
        texts = [
            f"{counts.running + counts.waiting} unfinished requests are served to their end, new ones are refused, "
            "then the daemon exits. This cannot be taken back."
        ]
        dialog = Confirm(f"Drain {clean(status.model.id)}?", texts, "Drain", word="drain")
        self._ask(dialog, "drain", {"stop": True}, "Draining")

    def release(self) -> None:
        """The policy that was put out last."""
        status = self._ready()
        if status is None:
            return
        if not status.quarantine:
            self._app.tell("No policy is in quarantine", "warn")
            return
        entry = status.quarantine[-1]
        texts = [f"{clean(entry.policy)} was put out: {clean(entry.code)}. {clean(entry.message)}"]
        dialog = Confirm("Release from quarantine?", texts, "Release")
        self._ask(dialog, "policy.release", {"policy": entry.policy}, f"{clean(entry.policy)} released")

    # ---- calls -------------------------------------------------------------------------------------------------

    def _ready(self) -> Status | None:
        """The live status when a change can be sent, else None after saying why not."""
        yard = self._app.yard
        if yard.phase != "live" or yard.status is None:
            self._app.tell("No connection to the daemon: nothing was sent", "bad")
            return None
        return yard.status

    def _ask(self, dialog: Confirm, method: str, params: Mapping[str, Any], done: str) -> None:
        async def send() -> None:
            try:
                await self._call(method, object, params)
            except ControlError as error:
                self._app.tell(f"Not done: {said(error)}", "bad")
            else:
                self._app.tell(done, "good")

        def answered(yes: bool | None) -> None:
            if yes:
                self._app.run_worker(send(), group="operator")

        self._app.push_screen(dialog, answered)

    async def _call(self, method: str, result: type[T], params: Mapping[str, Any]) -> T:
        self._last = self._app.clock()
        return await operate(self._app.path, method, result, params, CALL_TIMEOUT)

    async def _slow_call(self, method: str, result: type[T], params: Mapping[str, Any]) -> T:
        self._last = self._app.clock()
        return await operate(self._app.path, method, result, params, SWAP_TIMEOUT)
