"""A sequence as the core keeps it. While it runs, its lengths live in the columns, under its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvyard.core.lifecycle import Event, State, after
from kvyard.core.plan import SequenceSpec, Tokens

if TYPE_CHECKING:
    from kvyard.core.fork import Family
    from kvyard.core.queue import Key
    from kvyard.core.snapshot import View

NO_ROW = -1
IN_ROW = b""
"""In the place of tokens that are known: they are in its row, and so only once in memory."""


class SequenceState:
    """One sequence from its arrival to its end."""

    __slots__ = (
        "admissions",
        "admitted_step",
        "arrival",
        "arrived",
        "attached",
        "computed",
        "deadline",
        "digests",
        "family",
        "host",
        "id",
        "key",
        "lined_up",
        "max_new",
        "number",
        "place",
        "preemptions",
        "priority",
        "promised",
        "prompt_len",
        "published",
        "reason",
        "request",
        "root",
        "row",
        "scored",
        "short",
        "state",
        "tenant",
        "tokens",
        "total",
        "view",
    )

    def __init__(self, spec: SequenceSpec, tokens: Tokens | None) -> None:
        self.number = 0
        """Its place at its arrival: they count upwards."""
        self.lined_up = 0
        """Its place when it was last put at the end of the queue."""
        self.place = 0
        """Where it stands in the order of arrival. All three are given by `kvyard.core.queue`."""
        self.id = spec.id
        self.request = spec.request
        self.arrival = spec.arrival
        self.arrived = spec.arrived
        self.priority = spec.priority
        self.tenant = spec.tenant
        self.deadline = spec.deadline
        self.prompt_len = spec.prompt_len
        self.max_new = spec.max_new
        self.scored = spec.scored
        self.attached = spec.attached
        self.state = State.WAITING
        self.row = NO_ROW
        self.tokens = tokens
        """Prompt and output so far while it has no row, `IN_ROW` while it has; None where only lengths count."""
        self.total = spec.prompt_len if spec.emitted is None else spec.prompt_len + len(spec.emitted)
        """Prompt and output tokens, valid while it has no row."""
        self.computed = 0
        """Tokens whose KV is kept, valid while it has no row."""
        self.root = b""
        """Start of its digest chain; empty without a prefix cache."""
        self.family: Family | None = None
        """All unfinished sequences of its request, where it has several."""
        # Empty ones are shared, as the numbers are where they can be: see the queue.
        self.digests: bytearray | bytes = b""
        """Of its full blocks, one behind the other, as far as they were asked for."""
        self.published = 0
        """Blocks of its table that the prefix index knows."""
        self.host: Sequence[int] = ()
        """Host blocks that hold its KV."""
        self.key: Key = ()
        self.preemptions = 0
        self.admissions = 0
        self.admitted_step = -1
        self.promised = 0
        """Tokens that it had to be able to hold when it was last admitted; below 0: all it has."""
        self.reason = ""
        """Why it waits, when that is its own reason and not the whole queue's."""
        self.short = 0
        """Blocks that were missing when it was last refused."""
        self.view: View | None = None
        """What policies see of it; made by the ledger when first asked for."""

    def own_digests(self) -> bytearray:
        """Its digests, to be added to."""
        digests = self.digests
        if not isinstance(digests, bytearray):
            digests = self.digests = bytearray()
        return digests

    def move(self, event: Event) -> None:
        """Go where the lifecycle table says. Raises IllegalTransition."""
        self.state = after(self.state, event)

    @property
    def limit(self) -> int:
        """Prompt and output tokens at its longest."""
        return self.prompt_len + self.max_new
