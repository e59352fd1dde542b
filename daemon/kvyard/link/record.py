"""The step record: what one step did, and why.

Metrics, the TUI, the decision log, shadow runs, traces and the simulator all read this one record. It
carries block numbers and counts, never token ids or digests. Durations are in nanoseconds.
"""

from __future__ import annotations

from msgspec import Struct


class Preemption(Struct, array_like=True):
    """A sequence that gave way: `id` for `by`."""

    id: int
    by: int
    """The sequence that needed the room; its own id when it became its own victim."""
    cause: str
    """`growth` or `admission`, or `override` when the core had to choose."""
    how: str
    """`recompute` or `swap`."""
    tokens: int
    """Tokens in KV that it loses (recompute) or that are copied (swap)."""


class Wait(Struct, array_like=True):
    """A change of why something waits; sent when the reason changes, not in every step.

    `id` is 0 for the whole queue. `reason` `""` means it waits no longer.
    """

    id: int
    reason: str
    wake: int = -1
    """Step at which it is worth asking again; -1 is every step."""


class PolicyCost(Struct, array_like=True):
    """What one kind of policy did in this step."""

    kind: str
    name: str
    calls: int
    ns: int
    overrides: dict[str, int] = {}
    """Decisions that the core had to override, by cause."""


class Timings(Struct, array_like=True):
    """Where the step's time went, in nanoseconds."""

    inbox: int
    schedule: int
    """Policies, guard, planner and pool together."""
    model: int
    sample: int
    outputs: int
    gap: int
    """From the end of the step before to the start of this one (idle time not counted)."""
    send: int = 0
    """Of the gap: the system call that hands the step before to the front, and wakes it where it sleeps."""


class StepRecord(Struct, array_like=True, tag="step"):
    """One step of the engine."""

    step: int
    at: float
    """Start of the step, CLOCK_MONOTONIC seconds."""
    timings: Timings
    ids: bytes
    """int64: sequences that got tokens, in the order of scheduling."""
    granted: bytes
    """int32: tokens granted to each."""
    prompt_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    swapped: int
    """Of the waiting ones, those whose KV is in the host pool."""
    blocks_used: int
    """Held by sequences."""
    blocks_cached: int
    """Free, with reusable content."""
    blocks_free: int
    """Free and empty; the three add up to the pool."""
    admitted: list[tuple[int, int]] = []
    """Id and cached tokens of each sequence that came in (again)."""
    preempted: list[Preemption] = []
    finished: list[tuple[int, str]] = []
    waits: list[Wait] = []
    policies: list[PolicyCost] = []
    generation: int = 0
    """Number of policy changes so far."""
    resident: list[tuple[int, int]] = []
    """Id and tokens whose KV is there of each one in `admitted` for which that is another number than its cached

    tokens: copied back from the host pool, or taken over from a sequence of its request.
    """
