"""What the control server asks of the daemon: one async method per method of the protocol.

The daemon implements it; the server knows nothing else of the daemon. A method raises OperationError
for what an operator must be told; anything else is a defect, is logged with its traceback and reaches the
client as `internal`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct

from kvyard.control.schema import PolicyListing, RequestPage, Role, Status, SwapResult
from kvyard.front.events import EventLog, Feed
from kvyard.front.http.requests import MaxTokens, Priority, Seed, Temperature, TokenId
from kvyard.link.record import StepRecord


class OperationError(Exception):
    """An operation was refused: a stable word for programs, a sentence for people, what to do."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Who:
    """The peer of a control connection, as the kernel knows it."""

    pid: int
    uid: int
    gid: int
    role: Role
    user: str = ""
    """Name of the uid, empty when it has none."""

    def __str__(self) -> str:
        return f"{self.user or self.uid} (uid {self.uid}, pid {self.pid})"


class GenerateCall(Struct, forbid_unknown_fields=True):
    """Parameters of `generate`, with the ranges and the meaning that they have over HTTP; null is the default."""

    prompt: str | list[TokenId]
    chat: bool | None = None
    """Apply the chat template to a text prompt."""
    max_tokens: MaxTokens | None = None
    """By default 128, or what the window still holds."""
    temperature: Temperature | None = None
    """By default 1."""
    seed: Seed | None = None
    """By default another each time."""
    priority: Priority | None = None
    stream: bool | None = None
    """Send each delta as a `generate` event, too."""


class Operations(Protocol):
    """The daemon as the control server sees it."""

    @property
    def log(self) -> EventLog:
        """The event log; topic `events`."""
        ...

    @property
    def steps(self) -> Feed[StepRecord]:
        """Step records as they come; topic `steps`."""
        ...

    @property
    def policy_pids(self) -> Collection[int]:
        """Processes that run policies: they may not use the control socket."""
        ...

    async def status(self) -> Status:
        """Everything the first screen shows."""
        ...

    async def requests(self, limit: int) -> RequestPage:
        """Unfinished sequences, running first, then waiting in order."""
        ...

    async def explain(self, request_id: str) -> Mapping[str, Any]:
        """Why a request waits, who gave way for whom, who overtook it; also after it ended, within retention."""
        ...

    async def policy_list(self) -> PolicyListing:
        """Installed policies and disciplines."""
        ...

    async def policy_show(self, kind: str, name: str) -> Mapping[str, Any]:
        """What is in force; both empty for everything in charge."""
        ...

    async def policy_swap(self, kind: str, name: str, params: Mapping[str, Any], who: Who) -> SwapResult:
        """Put another policy (or `kind` discipline) in charge; returns when it is."""
        ...

    async def policy_set(self, kind: str, params: Mapping[str, Any], who: Who) -> SwapResult:
        """Change live parameters."""
        ...

    async def policy_release(self, policy: str, who: Who) -> Mapping[str, Any]:
        """Release `kind/name` from quarantine."""
        ...

    async def cancel(self, request_id: str, who: Who) -> Mapping[str, Any]:
        """Cancel a request."""
        ...

    async def pause(self, who: Who) -> Mapping[str, Any]:
        """Stop scheduling."""
        ...

    async def resume(self, who: Who) -> Mapping[str, Any]:
        """Schedule again."""
        ...

    async def drain(self, stop: bool, who: Who) -> Mapping[str, Any]:
        """Refuse what comes and finish what runs; with `stop` exit then. Returns when draining has begun."""
        ...

    async def dump(self) -> Mapping[str, Any]:
        """The whole state as JSON values."""
        ...

    def generate(self, call: GenerateCall, who: Who) -> AsyncIterator[Mapping[str, Any]]:
        """One request: deltas (`text`, `token_ids`), then a last item with `finish_reason` and `usage`.

        Closing the iterator cancels the request.
        """
        ...

    async def model_list(self) -> Mapping[str, Any]:
        """The served model."""
        ...

    async def config_show(self) -> list[Mapping[str, Any]]:
        """Every setting with value, default, origin, change and doc (`Settings.describe`)."""
        ...
