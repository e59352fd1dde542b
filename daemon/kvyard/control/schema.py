"""The control protocol: JSON lines over a Unix socket (docs/control.md).

The server greets with `Hello`. A client sends `Request` lines and gets one `Response` per request, in
any order, matched by `id`. `subscribe` makes the server send `Event` lines until the connection ends.
Every method is in `METHODS` with its parameters, its result and the role it needs; `schema` answers
with the JSON Schema of all of it, so a client in any language can find its way. A line may be up to
MAX_LINE bytes. A change here gets a line in CHANGELOG.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

PROTOCOL = 1
MAX_LINE = 4 << 20
"""Longest line the server accepts, in bytes; longer ones get the error `too-large` and the connection ends."""
SLOW_STEP = 5.0
"""Seconds without a step, with work to do, after which the screens say so."""

Role = Literal["viewer", "operator", "admin"]


class Hello(Struct, tag="hello", tag_field="type"):
    """First line from the server."""

    protocol: int
    version: str
    role: Role
    pid: int


class Request(Struct):
    """A call; `id` is the client's and comes back in the response."""

    id: int
    method: str
    params: dict[str, Any] = {}


class ErrorBody(Struct):
    """What happened, what it means, what to do."""

    code: str
    message: str
    hint: str = ""


class Response(Struct, tag="response", tag_field="type", omit_defaults=True):
    """Answer to the request with the same id: `result` or `error`."""

    id: int
    result: Any = None
    error: ErrorBody | None = None


class Event(Struct, tag="event", tag_field="type"):
    """One item of a subscription."""

    topic: str
    at: float
    """Seconds since the epoch."""
    data: dict[str, Any]


# ---- results -----------------------------------------------------------------------------------------------


class Quantiles(Struct):
    """Of the requests of the last minute, in seconds; None before there was one."""

    p50: float | None
    p95: float | None
    p99: float | None
    count: int


class ModelStatus(Struct):
    """The served model."""

    id: str
    family: str
    max_model_len: int
    dtype: str
    backend: str
    device: str
    deterministic: bool


class EngineStatus(Struct):
    """The engine process. `state`: starting, ready, recovering, draining, failed."""

    state: str
    pid: int | None
    restarts: int
    step: int
    uptime_s: float
    last_step_age_s: float | None
    reason: str = ""


class RequestCounts(Struct):
    """Sequences by state and totals since the front started."""

    running: int
    waiting: int
    waiting_by_reason: dict[str, int]
    finished: int
    cancelled: int
    failed: int
    refused: int
    preemptions: int


class KvStatus(Struct):
    """KV blocks: used + cached + free = total."""

    total: int
    used: int
    cached: int
    free: int
    block_size: int
    bytes: int


class Rates(Struct):
    """Per second over the last ten seconds; step times in seconds over the same window."""

    prompt_tokens: float
    output_tokens: float
    requests: float
    step_p50: float | None
    step_p99: float | None


class Latency(Struct):
    """Shown with every throughput: queue time, TTFT, ITL, E2E."""

    queue: Quantiles
    ttft: Quantiles
    itl: Quantiles
    e2e: Quantiles


class PolicyStatus(Struct):
    """A policy in charge."""

    kind: str
    name: str
    version: str
    distribution: str
    params: dict[str, Any]
    calls: int
    """Calls and overrides since it took charge; the times of a call are of the last minute."""
    p50_us: float | None
    p99_us: float | None
    overrides: dict[str, int]
    ejections: int
    """How often a policy of this name was put out since the daemon's start."""
    ejected: dict[str, int] = {}
    """All policies of this kind that were put out since the daemon's start, by name."""


class QuarantineEntry(Struct):
    """A policy that was put out and may not come back before `until` (seconds since the epoch)."""

    policy: str
    code: str
    message: str
    until: float | None
    times: int
    version: str = ""
    """Of the distribution it came from; another version may be loaded. Empty where it is not known: none may."""


class Limits(Struct):
    """The three separate limits, and the queue's."""

    max_running: int
    max_step_tokens: int
    kv_blocks: int
    max_waiting: int


class Status(Struct):
    """Result of `status`."""

    version: str
    uptime_s: float
    ready: bool
    draining: bool
    paused: bool
    address: str
    model: ModelStatus
    engine: EngineStatus
    requests: RequestCounts
    kv: KvStatus
    limits: Limits
    rates: Rates
    latency: Latency
    errors: dict[str, int]
    """Requests that ended with an error since the start, by code."""
    policies: list[PolicyStatus]
    discipline: str | None
    """The named discipline in charge, None after a single part was swapped. Its parameters may differ: `changed`."""
    generation: int
    quarantine: list[QuarantineEntry]
    changed: dict[str, Any] = {}
    """Parameters of the named discipline that an operator set, as `kind.name`."""
    pid: int = 0
    """The daemon's own process; the engine's is in `engine`."""

    @property
    def stuck(self) -> bool:
        """Something runs, nothing has moved for SLOW_STEP seconds, and nobody has asked for that."""
        age = self.engine.last_step_age_s
        return age is not None and age > SLOW_STEP and self.requests.running > 0 and not self.paused

    @property
    def in_charge(self) -> str:
        """The discipline in words: its name, with a mark when parameters differ, or `mixed`."""
        if self.discipline is None:
            return "mixed"
        return self.discipline + (f" (changed: {', '.join(self.changed)})" if self.changed else "")


class RequestRow(Struct):
    """One unfinished sequence, as `requests` lists it. Ages in seconds."""

    id: int
    request_id: str
    state: str
    """waiting, running, preempted, swapped."""
    reason: str
    age_s: float
    priority: int
    tenant: str
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    max_new: int
    blocks: int
    """KV blocks that it holds, shared ones included; what is swapped out holds none."""
    preemptions: int


class RequestPage(Struct):
    """Result of `requests`: at most `limit` rows, running first, then waiting in order."""

    total: int
    rows: list[RequestRow]


class PolicyRow(Struct):
    """One installed policy or discipline, as `policy.list` shows it. Installed does not mean active."""

    kind: str
    name: str
    distribution: str
    version: str
    api: str
    active: bool
    problem: str = ""
    """Why it cannot be used, empty when it can."""
    doc: str = ""
    installed: str = ""
    """The version that a swap would load, where that is not the one in charge, which `version` names."""


class PolicyListing(Struct):
    """Result of `policy.list`."""

    policies: list[PolicyRow]
    problems: list[str]
    """Distributions that could not be read; they hide nobody else."""


class SwapResult(Struct):
    """Result of `policy.swap` and `policy.set`: synchronous, so `current` is in charge when it arrives."""

    ok: bool
    generation: int
    current: dict[str, str]
    previous: dict[str, str]
    step: int
    message: str = ""
    params: dict[str, Any] = {}
    """Of `policy.set`: the parameters that were set, with the values in force."""
    pause_ms: float = 0.0
    """Of `policy.swap`: milliseconds in which no step ran, since the candidate was imported and constructed."""


class Method(Struct, frozen=True):
    """A method of the protocol, for `schema` and the documentation."""

    name: str
    role: Role
    params: dict[str, str]
    """Name to type and meaning."""
    result: str
    doc: str


METHODS: tuple[Method, ...] = (
    Method("schema", "viewer", {}, "object", "This protocol as JSON Schema."),
    Method("lower", "viewer", {"role": "viewer | operator"}, "object", "Lower this session's role; it never rises."),
    Method("status", "viewer", {}, "Status", "Everything the first screen shows."),
    Method("requests", "viewer", {"limit": "integer, default 200"}, "RequestPage", "Unfinished sequences."),
    Method(
        "explain",
        "viewer",
        {"request_id": "text"},
        "object",
        "Why a request waits, since when, by which rule and what ends it; who gave way for whom; who overtook it; "
        "`after_s`: seconds from arrival to admission, first and last token and end, when it has ended.",
    ),
    Method(
        "events",
        "viewer",
        {"limit": "integer, default 100"},
        "list of Event",
        "The last entries of the event log: restarts, swaps, ejections, drains, errors.",
    ),
    Method(
        "subscribe",
        "viewer",
        {"topics": "list of: status, steps, events", "interval": "seconds between status events, at least 0.1"},
        "object",
        "Events on this connection until it ends.",
    ),
    Method("policy.list", "viewer", {}, "PolicyListing", "Installed policies and disciplines."),
    Method(
        "policy.show",
        "viewer",
        {"kind": "kind or empty", "name": "name or empty for those in charge"},
        "object",
        "What is really in force: parameters, chunking, prefix reuse, victims' way, reserve; with a name, that "
        "policy or discipline, and whether it is in charge.",
    ),
    Method(
        "policy.swap",
        "operator",
        {"kind": "kind, or `discipline`", "name": "name", "params": "object"},
        "SwapResult",
        "Put another policy or discipline in charge at the next step boundary.",
    ),
    Method(
        "policy.set",
        "operator",
        {"kind": "kind", "params": "object"},
        "SwapResult",
        "Change live parameters of a policy in charge.",
    ),
    Method("policy.release", "operator", {"policy": "kind/name"}, "object", "Release a policy from quarantine."),
    Method("cancel", "operator", {"request_id": "text"}, "object", "Cancel a request; its client gets an error."),
    Method("pause", "operator", {}, "object", "Stop scheduling; requests wait."),
    Method(
        "resume", "operator", {}, "object", "Schedule again; take requests again after a drain that does not stop."
    ),
    Method(
        "drain", "admin", {"stop": "boolean, default true"}, "object", "Finish what runs, refuse what comes, exit."
    ),
    Method("dump", "viewer", {}, "object", "The whole state, for a report; it does not disturb serving."),
    Method(
        "generate",
        "viewer",
        {
            "prompt": "text or token ids",
            "chat": "boolean: apply the chat template",
            "max_tokens": "integer from 1, default 128 or what the window still holds",
            "temperature": "number from 0, default 1, under 1e-5 greedy",
            "seed": "integer from -2^63 to 2^63-1, default another each time",
            "priority": "integer from -2^31 to 2^31-1, lower is more urgent",
            "stream": "boolean: send each delta as a `generate` event, too",
        },
        "object",
        "Run one request; with `stream` its deltas come as `generate` events before the response.",
    ),
    Method("model.list", "viewer", {}, "object", "The served model."),
    Method("config.show", "viewer", {}, "object", "Every setting with its value, origin and whether it is live."),
)
