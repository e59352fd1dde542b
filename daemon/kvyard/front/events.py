"""The event log (restarts, swaps, ejections, drains, errors, who did what) and feeds to subscribers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from kvyard.control.schema import Event

T = TypeVar("T")

KEPT = 1000
"""Events kept in memory for `kvyard events`; older ones are in the daemon's own log."""

KINDS: dict[str, str] = {
    "start": "the front started",
    "engine": "the engine changed its state: starting, ready, recovering, failed",
    "restart": "the engine died and is being replaced",
    "swap": "another policy or discipline took charge",
    "set": "parameters of a policy in charge changed",
    "ejected": "a policy was put out, before, while or after it was in charge; the message says what followed",
    "release": "a policy was released from quarantine",
    "cancel": "an operator cancelled a request",
    "pause": "scheduling stopped or went on",
    "drain": "draining began or ended",
    "reload": "the configuration was read again",
    "control": "a client of the control socket changed something or was refused",
    "error": "something failed that needs a look",
}
"""Every kind of event, with its meaning; `EventLog.add` takes no other."""
FIELDS: dict[str, tuple[str, ...]] = {
    "start": ("model",),
    "engine": ("pid", "kv_blocks"),
    "restart": ("returncode", "step", "in_step", "stack"),
    "swap": ("who", "generation", "version", "pause_ms"),
    "set": ("who", "generation"),
    "ejected": ("policy", "code", "step", "traceback", "until", "snapshot", "dump", "decisions"),
    "release": ("who",),
    "cancel": ("who",),
    "pause": ("who",),
    "drain": ("who", "sequences", "limit_s", "left"),
    "reload": ("live", "restart"),
    "control": ("method", "params", "who", "outcome", "pid"),
    "error": ("code", "hint", "wanted", "kinds"),
}
"""What an event of a kind may have beside `number`, `kind` and `message`: for those who read them by program."""


class Subscription(Generic[T]):
    """A subscriber's bounded queue: a slow reader loses the oldest items and learns how many."""

    def __init__(self, limit: int, close: Callable[[Subscription[T]], None]) -> None:
        self._items: deque[T] = deque(maxlen=limit)
        self._wake = asyncio.Event()
        self._close = close
        self.dropped = 0
        """Items lost since it was last read; the reader sets it back."""

    def push(self, item: T) -> None:
        """Queue an item, dropping the oldest when full."""
        if len(self._items) == self._items.maxlen:
            self.dropped += 1
        self._items.append(item)
        self._wake.set()

    def close(self) -> None:
        """Take no more items; safe to call twice."""
        self._close(self)

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            while self._items:
                yield self._items.popleft()
            self._wake.clear()
            await self._wake.wait()


class Feed(Generic[T]):
    """One publisher, any number of subscribers; publishing to nobody costs one comparison."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription[T]] = set()

    def __len__(self) -> int:
        return len(self._subscriptions)

    def publish(self, item: T) -> None:
        """Hand an item to every subscriber; never blocks."""
        for subscription in self._subscriptions:
            subscription.push(item)

    def subscribe(self, limit: int = 256) -> Subscription[T]:
        """A subscription that holds at most `limit` unread items; close it when done."""
        subscription: Subscription[T] = Subscription(limit, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        return subscription


class EventLog:
    """Bounded log with a running number per event."""

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.time) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._clock = clock
        self._numbers = itertools.count(1)
        self.feed: Feed[Event] = Feed()
        self.written: Callable[[Event], None] = lambda event: None
        """Told of every event: the daemon's own log, which outlives these."""

    def add(self, kind: str, message: str, **data: object) -> Event:
        """Log an event of one of KINDS; `data` are JSON values that a program may want. Returns it.

        An unknown kind is a mistake of the caller and raises ValueError.
        """
        if kind not in KINDS:
            raise ValueError(f"event kind {kind!r} is not in KINDS")
        body = {"number": next(self._numbers), "kind": kind, "message": message, **data}
        event = Event("events", self._clock(), body)
        self._events.append(event)
        self.feed.publish(event)
        self.written(event)
        return event

    def last(self, limit: int) -> list[Event]:
        """The last `limit` events, oldest first."""
        skip = max(0, len(self._events) - max(0, limit))
        return list(itertools.islice(self._events, skip, None))
