"""The decision log: why a sequence waits, who gave way for whom, who overtook it. Made from step records.

Kept for `retention_s` after a sequence ended and within a bound on memory; the oldest goes first. Nothing
here asks the engine: what the record says is what happened.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from kvyard.front.serving import Moments
from kvyard.link.record import StepRecord

WAKES: Final = {
    "slots": "a running sequence ends or gives way, so that a place is free",
    "blocks": "enough KV blocks are given back by sequences that end or give way",
    "budget": "the next step, which has a new token budget",
    "chunk": "the next step, in which its prompt may take tokens again",
    "sibling": "the prompt is computed, by another sequence of its request",
    "paused": "`kvyard resume`",
    "recovering": "a new engine, which is being started",
    "queued": "its turn in the queue",
}
"""Reasons of the core and what ends them; any other text is a policy's own."""
EVENT_BYTES: Final = 200
"""What an entry costs, measured roughly; for the bound on memory."""
OVERTAKERS_SHOWN: Final = 20
NEVER: Final = Moments()
KEPT_PER_SEQUENCE: Final = 400
"""Happenings kept of one sequence: its first and its last ones."""


@dataclass(slots=True)
class Happening:
    """One thing that happened to a sequence; `at` is on CLOCK_MONOTONIC."""

    step: int
    at: float
    what: str
    """waits (for a reason of its own), waits-with-all (its own reason was of a policy that is no longer in charge),

    admitted, preempted, made-way (another one gave way for it), engine-lost (a new one goes on with it), finished.
    """
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Timeline:
    """What is known of one sequence."""

    id: int
    request_id: str
    arrived: float
    happenings: list[Happening] = field(default_factory=list)
    ended: float | None = None
    moments: Moments = NEVER
    """Known when it has ended."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An admission: who came in, when."""

    step: int
    at: float
    id: int


class DecisionLog:
    """Timelines by sequence id, and the admissions in order."""

    def __init__(self, retention_s: float, retention_bytes: int, request_of: Callable[[int], str]) -> None:
        """`request_of` names the request of a sequence id, empty when it is not known any more."""
        self._retention_s = retention_s
        self._most = max(1, retention_bytes // EVENT_BYTES)
        self._request_of = request_of
        self._timelines: OrderedDict[int, Timeline] = OrderedDict()
        self._ended: deque[int] = deque()
        self._admissions: deque[Entry] = deque()
        self._size = 0
        self._queue: tuple[str, int, int, float] = ("", -1, 0, 0.0)
        """Why the whole queue waits, the wake step, and since which step and time."""
        self._rule = ""
        """The admission policy that last decided."""
        self._preemption = ""
        self._block = (1, 0)
        """Tokens and bytes of a KV block; 0 bytes before an engine told."""

    def pool(self, block_size: int, block_bytes: int) -> None:
        """What a KV block holds and takes, so that a swap's cost can be told in bytes."""
        self._block = (block_size, block_bytes)

    def engine_lost(self, at: float, step: int, how: str) -> None:
        """The engine is gone; what is unfinished waits for the next one, whose steps are counted anew."""
        for timeline in self._timelines.values():
            self._append(timeline, Happening(step, at, "engine-lost", {"how": how}))
        self._queue = ("recovering", -1, step, at)

    def engine_up(self) -> None:
        """A new engine takes up what waits."""
        self._queue = ("", -1, 0, 0.0)

    def arrived(self, sequence_id: int, request_id: str, at: float) -> None:
        """A sequence was taken up."""
        self._timelines[sequence_id] = Timeline(sequence_id, request_id, at)
        self._size += 1

    def in_charge(self, policies: Mapping[str, str]) -> None:
        """Names of the policies that decide from now on, by kind; a record names only those that were asked."""
        self._rule = policies.get("admission", self._rule)
        self._preemption = policies.get("preemption", self._preemption)

    def step(self, record: StepRecord) -> None:
        """Take a step record."""
        for cost in record.policies:
            if cost.kind == "admission":
                self._rule = cost.name
            elif cost.kind == "preemption":
                self._preemption = cost.name
        for wait in record.waits:
            if wait.id == 0:
                self._queue = (wait.reason, wait.wake, record.step, record.at)
            elif wait.reason:
                self._note(wait.id, record, "waits", reason=wait.reason, wake=wait.wake, rule=self._rule)
            elif all(wait.id != sequence_id for sequence_id, _ in record.admitted):
                self._note(wait.id, record, "waits-with-all")
        for sequence_id, cached in record.admitted:
            self._admissions.append(Entry(record.step, record.at, sequence_id))
            self._size += 1
            self._note(sequence_id, record, "admitted", cached_tokens=cached, rule=self._rule)
        for p in record.preempted:
            rule = "override" if p.cause == "override" else self._preemption
            shared: dict[str, Any] = {"cause": p.cause, "how": p.how, "tokens": p.tokens, "rule": rule}
            if p.how == "swap":
                tokens, size = self._block
                shared["bytes"] = -(-p.tokens // tokens) * size
            self._note(p.id, record, "preempted", by=p.by, **shared)
            if p.by != p.id:
                self._note(p.by, record, "made-way", victim=p.id, **shared)
        for sequence_id, reason in record.finished:
            self._finish(sequence_id, record, reason)
        self._prune(record.at)

    def ended(self, sequence_id: int, at: float, reason: str, moments: Moments = NEVER) -> None:
        """A sequence ended on the front's side (its client left, a time-out); harmless when it had ended before."""
        timeline = self._timelines.get(sequence_id)
        if timeline is not None and timeline.ended is None:
            timeline.moments = moments
            self._close(timeline, Happening(-1, at, "finished", {"reason": reason}))

    def _finish(self, sequence_id: int, record: StepRecord, reason: str) -> None:
        timeline = self._timelines.get(sequence_id)
        if timeline is not None and timeline.ended is None:
            self._close(timeline, Happening(record.step, record.at, "finished", {"reason": reason}))

    def _close(self, timeline: Timeline, last: Happening) -> None:
        timeline.happenings.append(last)
        timeline.ended = last.at
        self._ended.append(timeline.id)
        self._size += 1

    def _note(self, sequence_id: int, record: StepRecord, what: str, **detail: Any) -> None:  # noqa: ANN401 - JSON values
        timeline = self._timelines.get(sequence_id)
        if timeline is not None:
            self._append(timeline, Happening(record.step, record.at, what, detail))

    def _append(self, timeline: Timeline, happening: Happening) -> None:
        if timeline.ended is not None:
            return
        timeline.happenings.append(happening)
        if len(timeline.happenings) > KEPT_PER_SEQUENCE:
            del timeline.happenings[KEPT_PER_SEQUENCE // 2]
        else:
            self._size += 1

    @property
    def size(self) -> int:
        """Timelines, happenings and admissions that are kept."""
        return self._size

    def _prune(self, now: float) -> None:
        while self._ended:
            oldest = self._timelines[self._ended[0]]
            assert oldest.ended is not None
            if now - oldest.ended <= self._retention_s and self._size <= self._most:
                break
            del self._timelines[self._ended.popleft()]
            self._size -= 1 + len(oldest.happenings)
        while self._admissions and (
            now - self._admissions[0].at > self._retention_s or len(self._admissions) > self._most // 2
        ):
            self._admissions.popleft()
            self._size -= 1

    # ---- answers

    def known(self) -> list[tuple[int, str]]:
        """Numbers and request ids of all sequences that something is known of."""
        return [(timeline.id, timeline.request_id) for timeline in self._timelines.values()]

    def explain(self, request_id: str, now: float) -> list[dict[str, Any]]:
        """One answer per sequence of the request, empty when none is known. Times are ages in seconds."""
        found = [timeline for timeline in self._timelines.values() if timeline.request_id == request_id]
        return [self._explain(timeline, now) for timeline in found]

    def _explain(self, timeline: Timeline, now: float) -> dict[str, Any]:
        state = self._state(timeline)
        return {
            "sequence": timeline.id,
            "request_id": timeline.request_id,
            "state": state,
            "age_s": now - timeline.arrived,
            "waiting_for": self._waiting_for(timeline, now) if state in ("waiting", "preempted", "swapped") else None,
            "after_s": self._after(timeline),
            "preempted": [self._told(h, now) for h in timeline.happenings if h.what == "preempted"],
            "made_way_for_it": [self._told(h, now) for h in timeline.happenings if h.what == "made-way"],
            "overtaken_by": self._overtakers(timeline, now),
            "history": [self._told(h, now) for h in timeline.happenings],
        }

    @staticmethod
    def _state(timeline: Timeline) -> str:
        for happening in reversed(timeline.happenings):
            if happening.what == "finished":
                return f"finished ({happening.detail['reason']})"
            if happening.what == "admitted":
                return "running"
            if happening.what == "preempted":
                return "swapped" if happening.detail["how"] == "swap" else "preempted"
            if happening.what == "engine-lost":
                return "waiting"
        return "waiting"

    @staticmethod
    def _after(timeline: Timeline) -> dict[str, float | None]:
        """Seconds from its arrival to each moment of an ended sequence; None for what never happened."""
        moments = {**timeline.moments._asdict(), "end": timeline.ended}
        return {name: None if at is None else at - timeline.arrived for name, at in moments.items()}

    def _waiting_for(self, timeline: Timeline, now: float) -> dict[str, Any]:
        begin = timeline.arrived
        own: Happening | None = None
        ran = False
        for happening in timeline.happenings:
            if happening.what in ("admitted", "preempted"):
                begin, own = happening.at, None
                ran = happening.what == "admitted"
            elif happening.what == "engine-lost":
                begin, own = happening.at if ran else begin, None
                ran = False
            elif happening.what == "waits":
                own = happening
            elif happening.what == "waits-with-all":
                own = None
        if own is not None:
            reason, wake, at, rule = own.detail["reason"], own.detail["wake"], own.at, own.detail["rule"]
        else:
            reason, wake, _, at = self._queue
            reason, at, rule = reason or "queued", max(at, begin) if reason else begin, self._rule
        ends = WAKES.get(reason, f"the policy {rule or 'in charge'} changes its mind")
        return {
            "reason": reason,
            "since_s": now - at,
            "waiting_s": now - begin,
            "rule": rule,
            "wakes": f"step {wake}, when {rule} wants to be asked again" if wake >= 0 else ends,
        }

    def _told(self, happening: Happening, now: float) -> dict[str, Any]:
        told = {"step": happening.step, "ago_s": now - happening.at, "what": happening.what, **happening.detail}
        for name in ("by", "victim"):
            if name in told:
                told[f"{name}_request"] = self._name(int(told[name]))
        return told

    def _name(self, sequence_id: int) -> str:
        timeline = self._timelines.get(sequence_id)
        return timeline.request_id if timeline is not None else self._request_of(sequence_id)

    def _overtakers(self, timeline: Timeline, now: float) -> dict[str, Any]:
        """Later arrivals that came in while it waited; sequence ids are arrival numbers."""
        seen: list[Entry] = []
        begin: float | None = timeline.arrived
        for happening in timeline.happenings:
            if happening.what == "admitted" and begin is not None:
                seen += self._admitted_between(begin, happening.at, timeline.id)
                begin = None
            elif happening.what == "preempted" or (happening.what == "engine-lost" and begin is None):
                begin = happening.at
        if begin is not None:
            seen += self._admitted_between(begin, timeline.ended if timeline.ended is not None else now)
        later = {
            entry.id: entry for entry in seen if entry.id > timeline.id and not self._related(entry.id, timeline)
        }
        shown = list(later.values())[:OVERTAKERS_SHOWN]
        return {
            "count": len(later),
            "requests": [{"request_id": self._name(e.id), "step": e.step, "ago_s": now - e.at} for e in shown],
        }

    def _related(self, sequence_id: int, timeline: Timeline) -> bool:
        """Whether it is of the same request (n > 1); two requests of one id are told apart by their arrival."""
        other = self._timelines.get(sequence_id)
        return other is not None and (other.request_id, other.arrived) == (timeline.request_id, timeline.arrived)

    def _admitted_between(self, begin: float, end: float, until: int = 0) -> list[Entry]:
        """Admissions in order; those of one step behind its own, which is `until`, came in after it."""
        first = bisect.bisect_left(self._admissions, begin, key=lambda entry: entry.at)
        last = bisect.bisect_right(self._admissions, end, key=lambda entry: entry.at)
        found = list(islice(self._admissions, first, last))
        own = next((at for at in range(len(found) - 1, -1, -1) if found[at].id == until), None)
        return found if own is None else found[:own]
