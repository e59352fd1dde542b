"""What the screen knows: the last answers of the daemon, when they came, and how the connection stands.

No I/O and no clock: every change is told the time (seconds of a monotonic clock). `Shown` adds what the
person at the screen has chosen; views are functions of it alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

from kvyard.control.schema import Event, Hello, RequestPage, RequestRow, Status
from msgspec import Struct

from kvyard_tui.glyphs import UNICODE, Glyphs

Phase = Literal["connecting", "live", "lost"]

KEPT_SAMPLES = 240
KEPT_EVENTS = 200
KEPT_PREEMPTIONS = 1000
STALE_AFTER = 3.0
"""Seconds without news after which the age of the data is shown."""
OTHER_DAEMON = 2.0
"""Seconds by which the start of the daemon must have moved for it to be another one."""
NOTICE_FOR = 10.0
"""Seconds that the answer to a key press stays on screen."""


@dataclass(slots=True)
class History:
    """One sample a second for the sparklines; a second without data is None, so a gap shows as a gap."""

    output: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    prompt: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    step: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    last: int | None = None

    def add(self, status: Status, now: float) -> None:
        """Take a sample; several within one second replace each other."""
        second = int(now)
        rates = status.rates
        series = (self.output, self.prompt, self.step)
        if self.last is not None and second == self.last:
            for one in series:
                one.pop()
        elif self.last is not None:
            for one in series:
                one.extend([None] * min(second - self.last - 1, KEPT_SAMPLES))
        self.last = second
        for one, value in zip(series, (rates.output_tokens, rates.prompt_tokens, rates.step_p50), strict=True):
            one.append(value)

    def copy(self) -> History:
        """A history that later samples do not change."""
        return History(self.output.copy(), self.prompt.copy(), self.step.copy(), self.last)


class Preempted(Struct):
    """Who gave way for whom, as a step record tells it."""

    id: int
    by: int
    """The sequence that needed the room; its own id when it became its own victim."""
    cause: str
    how: str
    tokens: int


class Step(Struct):
    """What the screen reads of a step record."""

    step: int
    preempted: list[Preempted] = []


@dataclass(slots=True)
class Yard:
    """The daemon as last seen."""

    phase: Phase = "connecting"
    problem: str = ""
    """Why there is no connection."""
    retry_at: float | None = None
    hello: Hello | None = None
    status: Status | None = None
    status_at: float | None = None
    requests: RequestPage | None = None
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    """Oldest first."""
    history: History = field(default_factory=History)
    began: float | None = None
    """When the daemon started, on the screen's clock."""
    daemons: int = 0
    """How often another daemon has answered than before; what was allowed for one is not for the next."""
    _greeted: bool = False
    """A connection is new: its first status tells whether it is still the same daemon."""
    preempted: dict[int, Preempted] = field(default_factory=dict)
    """The last preemption of each sequence; the oldest are forgotten."""

    def connected(self, hello: Hello) -> None:
        """The daemon greeted."""
        if self.hello is not None and hello.pid != self.hello.pid:
            self.daemons += 1
        self.phase = "live"
        self._greeted = True
        self.problem = ""
        self.retry_at = None
        self.hello = hello

    def lost(self, problem: str, retry_at: float) -> None:
        """There is no connection; what was seen last stays."""
        self.phase = "lost"
        self.problem = problem
        self.retry_at = retry_at

    def saw_status(self, status: Status, now: float) -> None:
        """A new status came."""
        began = now - status.uptime_s
        if self._greeted and self.began is not None and abs(began - self.began) > OTHER_DAEMON:
            # Another daemon numbers its sequences anew: what was selected must not become somebody else's.
            self.daemons += 1
            self.requests = None
            self.preempted.clear()
        self.began, self._greeted = began, False
        self.status = status
        self.status_at = now
        self.history.add(status, now)

    def saw_requests(self, page: RequestPage) -> None:
        """A new list of unfinished sequences came."""
        self.requests = page

    def saw_log(self, events: list[Event]) -> None:
        """The event log as the daemon has it replaces what was known."""
        self.events.clear()
        self.events.extend(sorted(events, key=lambda event: event.at))

    def saw_event(self, event: Event) -> None:
        """A new entry of the event log; one that the log already brought is not doubled."""
        if event not in self.events:
            self.events.append(event)

    def saw_step(self, step: Step) -> None:
        """A step ran; what it took from whom is kept."""
        for one in step.preempted:
            self.preempted.pop(one.id, None)
            self.preempted[one.id] = one
        while len(self.preempted) > KEPT_PREEMPTIONS:
            del self.preempted[next(iter(self.preempted))]

    def why(self, row: RequestRow) -> str:
        """Why a sequence waits: the daemon's reason, and for whom it gave way."""
        taken = self.preempted.get(row.id)
        if taken is None or row.state not in ("preempted", "swapped"):
            return row.reason
        winner = self.row(taken.by)
        name = winner.request_id if winner is not None else f"sequence {taken.by}"
        text = f"for {'itself' if taken.by == row.id else name} ({taken.cause})"
        return f"{text}; {row.reason}" if row.reason else text

    def age(self, now: float) -> float | None:
        """Seconds since the data on screen came; None before there was any."""
        return None if self.status_at is None else max(0.0, now - self.status_at)

    def row(self, sequence: int | None) -> RequestRow | None:
        """The row of a sequence, if it is still unfinished."""
        rows = self.requests.rows if self.requests is not None else []
        return next((row for row in rows if row.id == sequence), None)

    def copy(self) -> Yard:
        """A yard that later news does not change, for the frozen screen."""
        return replace(self, events=self.events.copy(), history=self.history.copy(), preempted=self.preempted.copy())


@dataclass(frozen=True, slots=True)
class Notice:
    """The answer to something the person did."""

    text: str
    tone: Literal["good", "warn", "bad"]
    at: float


@dataclass(frozen=True, slots=True)
class Shown:
    """Everything that a view draws from."""

    yard: Yard
    now: float
    wall: float = 0.0
    """Seconds since the epoch, for what the daemon gives in these."""
    socket: str = ""
    writable: bool = False
    frozen_at: float | None = None
    filter: str = ""
    sort: str = "order"
    reverse: bool = False
    selected: int | None = None
    notice: Notice | None = None
    glyphs: Glyphs = UNICODE

    @property
    def stale(self) -> float | None:
        """Age of the data when it is old enough to say so, or when there is no connection."""
        age = self.yard.age(self.now)
        if age is None or (age < STALE_AFTER and self.yard.phase == "live"):
            return None
        return age

    @property
    def live_notice(self) -> Notice | None:
        """The notice while it is fresh."""
        fresh = self.notice is not None and self.now - self.notice.at < NOTICE_FOR
        return self.notice if fresh else None
