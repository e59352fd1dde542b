"""Rolling windows behind `status`: rates of ten seconds, quantiles of a minute, counts and reasons.

Fed by `Metrics` with the very events that feed the series. Quantiles come from logarithmic bins of 5 %
width, so memory does not depend on the load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvyard.control.schema import KvStatus, Latency, Quantiles, Rates, RequestCounts
from kvyard.link.messages import EngineInfo
from kvyard.link.record import PolicyCost, StepRecord

RATE_SPAN = 10.0
"""Seconds over which rates and step times are taken."""
LATENCY_SPAN = 60.0
"""Seconds over which the latency quantiles are taken."""
MAX_REASONS = 32
"""Reasons shown by name; policies may give any text, so what goes beyond is summed as `other`."""

_RATIO = math.log(1.05)
_SMALLEST = 1e-7
_LARGEST = 1e5
_BINS = int(math.log(_LARGEST / _SMALLEST) / _RATIO)


class Window:
    """Values of the last `span` seconds, in `slices` parts that expire one by one."""

    def __init__(self, span: float, slices: int, clock: Callable[[], float]) -> None:
        self._width = span / slices
        self._clock = clock
        self._bins: list[dict[int, int]] = [{} for _ in range(slices)]
        self._epochs = [-1] * slices

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, in seconds."""
        epoch = int(self._clock() / self._width)
        place = epoch % len(self._bins)
        if self._epochs[place] != epoch:
            self._epochs[place] = epoch
            self._bins[place] = {}
        bins = self._bins[place]
        bin_ = _bin_of(value)
        bins[bin_] = bins.get(bin_, 0) + count

    def quantiles(self, *shares: float) -> tuple[list[float | None], int]:
        """The quantiles at ascending `shares`, None when there is nothing, and the number of values."""
        oldest = int(self._clock() / self._width) - len(self._bins) + 1
        merged: dict[int, int] = {}
        for epoch, bins in zip(self._epochs, self._bins, strict=True):
            if epoch >= oldest:
                for bin_, count in bins.items():
                    merged[bin_] = merged.get(bin_, 0) + count
        total = sum(merged.values())
        return _at_shares(sorted(merged.items()), total, shares), total


def _bin_of(value: float) -> int:
    if not value > _SMALLEST:  # also a NaN
        return 0
    return _BINS if value >= _LARGEST else int(math.log(value / _SMALLEST) / _RATIO)


def _at_shares(bins: list[tuple[int, int]], total: int, shares: tuple[float, ...]) -> list[float | None]:
    if not total:
        return [None] * len(shares)
    found: list[float | None] = []
    seen, items = 0, iter(bins)
    bin_ = 0
    for share in shares:
        while seen < max(1, math.ceil(share * total)):
            bin_, count = next(items)
            seen += count
        found.append(_SMALLEST * math.exp((bin_ + 0.5) * _RATIO))
    return found


class Rate:
    """Amount per second over the last ten seconds, or since the start while that is less."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = clock()
        self._slots = [0.0] * (int(RATE_SPAN) + 1)
        self._epochs = [-1] * len(self._slots)

    def add(self, amount: float) -> None:
        """Count an amount now."""
        epoch = int(self._clock())
        place = epoch % len(self._slots)
        if self._epochs[place] != epoch:
            self._epochs[place], self._slots[place] = epoch, 0.0
        self._slots[place] += amount

    def per_second(self) -> float:
        """The oldest second counts by the part of it that is still inside the window."""
        now = self._clock()
        oldest = int(now) - int(RATE_SPAN)
        inside = 1.0 - (now - int(now))
        total = 0.0
        for epoch, amount in zip(self._epochs, self._slots, strict=True):
            if epoch >= oldest:
                total += amount * (inside if epoch == oldest else 1.0)
        return total / min(RATE_SPAN, max(1.0, now - self._start))


class Waiting:
    """Why sequences wait, from the changes that step records carry."""

    def __init__(self) -> None:
        self._own: dict[int, str] = {}
        self._queue = ""

    def take(self, record: StepRecord) -> None:
        """Apply a step's changes."""
        for wait in record.waits:
            if wait.id == 0:
                self._queue = wait.reason
            elif wait.reason:
                self._own[wait.id] = wait.reason
            else:
                self._own.pop(wait.id, None)
        for sequence, _ in record.admitted:
            self._own.pop(sequence, None)
        for sequence, _ in record.finished:
            self._own.pop(sequence, None)
        if not record.waiting:
            self._own.clear()  # also what was cancelled while it waited

    def forget(self, sequence: int) -> None:
        """A sequence is gone without having been admitted."""
        self._own.pop(sequence, None)

    def clear(self, reason: str = "") -> None:
        """Forget all reasons; `reason` holds for everybody until the next change."""
        self._own.clear()
        self._queue = reason

    def reason(self, sequence: int) -> str:
        """Why this one waits."""
        return self._own.get(sequence) or self._queue or "queued"

    def by_reason(self, waiting: int) -> dict[str, int]:
        """Waiting sequences by reason; the numbers add up to `waiting`."""
        counts: dict[str, int] = {}
        left = waiting
        for reason in self._own.values():
            if left <= 0:
                break
            name = reason if reason in counts or len(counts) < MAX_REASONS else "other"
            counts[name] = counts.get(name, 0) + 1
            left -= 1
        if left > 0:
            name = self._queue or "queued"
            counts[name] = counts.get(name, 0) + left
        return counts


@dataclass(slots=True)
class PolicyUse:
    """What the policy in charge of one kind cost and how often it was overridden, since it took charge."""

    window: Window
    name: str = ""
    calls: int = 0
    overrides: dict[str, int] = field(default_factory=dict)

    def take(self, cost: PolicyCost) -> None:
        """Add a step's cost."""
        self.calls += cost.calls
        if cost.calls:
            self.window.add(cost.ns / cost.calls * 1e-9, cost.calls)
        for cause, count in cost.overrides.items():
            self.overrides[cause] = self.overrides.get(cause, 0) + count

    def quantiles_us(self) -> tuple[float | None, float | None]:
        """Median and 99th percentile of a call, in microseconds, over the last minute in charge."""
        (p50, p99), _ = self.window.quantiles(0.5, 0.99)
        return (p50 and p50 * 1e6, p99 and p99 * 1e6)


class Stats:
    """Everything in `Status` that is counted rather than known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.waiting = Waiting()
        self.last: StepRecord | None = None
        """The newest step record."""
        self.last_at: float | None = None
        """When it came, by the clock."""
        self.finished = self.cancelled = self.failed = self.refused = self.preemptions = 0
        self.errors: dict[str, int] = {}
        self._counts: tuple[int, int] = (0, 0)
        self._kv: tuple[int, int, int] = (0, 0, 0)
        self._prompt, self._output, self._requests = Rate(clock), Rate(clock), Rate(clock)
        self._steps = Window(RATE_SPAN, 10, clock)
        self._queue, self._ttft, self._itl, self._e2e = (Window(LATENCY_SPAN, 12, clock) for _ in range(4))
        self._policies: dict[str, PolicyUse] = {}

    def step(self, record: StepRecord) -> None:
        """Take a step record."""
        self.last, self.last_at = record, self._clock()
        self._counts = (record.running, record.waiting)
        self._kv = (record.blocks_used, record.blocks_cached, record.blocks_free)
        self._prompt.add(record.prompt_tokens)
        if record.prompt_tokens or record.decode_tokens:  # others only say what changed
            t = record.timings
            self._steps.add((t.inbox + t.schedule + t.model + t.sample + t.outputs) * 1e-9)
        self.preemptions += len(record.preempted)
        for cost in record.policies:
            self._of(cost.kind, cost.name).take(cost)
        self.waiting.take(record)

    def counts(self, running: int, waiting: int) -> None:
        """Correct the counts between steps: the last cancelled, an engine gone, a queue that grows."""
        self._counts = (running, waiting)

    def engine(self, info: EngineInfo) -> None:
        """A new engine: its pool is empty and nothing has been said about who waits."""
        self._kv = (0, 0, info.kv_blocks)
        self.waiting.clear()

    def engine_restarted(self) -> None:
        """The engine is gone, and what ran waits for the next one."""
        self._counts = (0, sum(self._counts))
        self.waiting.clear("recovering")

    def queued(self, seconds: float) -> None:
        """A sequence was admitted for the first time."""
        self._queue.add(seconds)

    def first_token(self, seconds: float) -> None:
        """A sequence's first output token."""
        self._ttft.add(seconds)
        self._output.add(1)

    def inter_token(self, seconds: float, count: int) -> None:
        """Further output tokens."""
        self._itl.add(seconds, count)
        self._output.add(count)

    def ended(self, reason: str, seconds: float, code: str) -> None:
        """A sequence ended: `stop`, `length`, `cancelled` or `error`, this one with a code."""
        self._requests.add(1)
        if reason == "cancelled":
            self.cancelled += 1
        elif reason in ("stop", "length"):
            self.finished += 1
            self._e2e.add(seconds)
        else:
            self.failed += 1
            self.errors[code] = self.errors.get(code, 0) + 1

    def in_charge(self, names: Mapping[str, str]) -> None:
        """Who decides from now on, by kind: whoever is new begins with nothing."""
        for kind, name in names.items():
            self._of(kind, name)

    def policy(self, kind: str) -> PolicyUse:
        """What the policy in charge of a kind did."""
        use = self._policies.get(kind)
        return self._of(kind, "") if use is None else use

    def _of(self, kind: str, name: str) -> PolicyUse:
        use = self._policies.get(kind)
        if use is None or use.name != name:
            use = self._policies[kind] = PolicyUse(Window(LATENCY_SPAN, 12, self._clock), name)
        return use

    # ---- parts of Status -----------------------------------------------------------------------------------

    def request_counts(self) -> RequestCounts:
        """Sequences by state and the totals."""
        running, waiting = self._counts
        return RequestCounts(
            running=running,
            waiting=waiting,
            waiting_by_reason=self.waiting.by_reason(waiting),
            finished=self.finished,
            cancelled=self.cancelled,
            failed=self.failed,
            refused=self.refused,
            preemptions=self.preemptions,
        )

    def kv_status(self, info: EngineInfo | None) -> KvStatus:
        """The KV pool; all zero without an engine."""
        if info is None:
            return KvStatus(0, 0, 0, 0, 0, 0)
        used, cached, free = self._kv
        return KvStatus(info.kv_blocks, used, cached, free, info.block_size, info.kv_bytes)

    def rates(self) -> Rates:
        """Rates and step times of the last ten seconds."""
        (p50, p99), _ = self._steps.quantiles(0.5, 0.99)
        return Rates(self._prompt.per_second(), self._output.per_second(), self._requests.per_second(), p50, p99)

    def latency(self) -> Latency:
        """Quantiles of the last minute."""
        return Latency(*(_quantiles(window) for window in (self._queue, self._ttft, self._itl, self._e2e)))

    def last_step_age(self) -> float | None:
        """Seconds since the last step record came; None before the first."""
        return None if self.last_at is None else self._clock() - self.last_at


def _quantiles(window: Window) -> Quantiles:
    (p50, p95, p99), count = window.quantiles(0.5, 0.95, 0.99)
    return Quantiles(p50, p95, p99, count)
