"""What a policy sees: read-only views of the scheduler's state, never copies (docs/plugins.md).

The core implements these protocols over its own columns. What a snapshot shows is frozen while a
policy runs, because only the core writes. A policy has no other input: no clock, no randomness, no
I/O, no torch, so that the same object decides the same in the engine, the simulator and a replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]
FloatColumn = npt.NDArray[np.float64]
Kept = Literal["none", "swapped"]


class RequestView(Protocol):
    """A sequence as a policy sees it. Hashable by identity; lengths are in tokens, times in seconds."""

    @property
    def id(self) -> int:
        """The sequence's id, unique over the life of the front."""

    @property
    def arrival(self) -> int:
        """Arrival number: unique, ascending; the tie-breaker."""

    @property
    def arrived(self) -> float:
        """Time of arrival at the front, in seconds on the snapshot's clock."""

    @property
    def priority(self) -> int:
        """Lower is more urgent, on every entrance (HTTP, control socket, TUI). Default 0."""

    @property
    def tenant(self) -> str:
        """Who the request is for; the empty string where the client named nobody."""

    @property
    def deadline(self) -> float | None:
        """When the answer stops being of use, in seconds on the snapshot's clock."""

    @property
    def prompt_len(self) -> int:
        """Prompt tokens."""

    @property
    def max_new(self) -> int:
        """Most output tokens."""

    @property
    def kv_max(self) -> int:
        """Most tokens ever held in KV: `prompt_len + max_new - 1` (the last one is never fed back)."""

    @property
    def total(self) -> int:
        """Prompt and output tokens so far."""

    @property
    def generated(self) -> int:
        """Output tokens so far: `total - prompt_len`."""

    @property
    def remaining(self) -> int:
        """Most output tokens still to come: `max_new - generated`."""

    @property
    def computed(self) -> int:
        """Tokens whose KV is there."""

    @property
    def wanted(self) -> int:
        """Tokens still to compute before the next output token: `total - computed`."""

    @property
    def blocks(self) -> int:
        """KV blocks held."""

    @property
    def hits(self) -> int:
        """Full blocks that this waiting sequence could share now, looked up when asked: found in the prefix cache,

        or held by another sequence of its request (`n` > 1).
        """

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""

    @property
    def kept(self) -> Kept:
        """What a preempted sequence kept: `none` (recompute) or `swapped` (KV in the host pool)."""


class Ended(NamedTuple):
    """A sequence that ran to its end, by a stop or at its length; cancelled ones are not among them."""

    id: int
    tenant: str
    prompt_len: int
    generated: int
    """Output tokens in all."""
    max_new: int


class Counts(Protocol):
    """Cumulative counters since the engine started."""

    @property
    def preempted(self) -> int: ...
    @property
    def finished(self) -> int: ...
    @property
    def admitted(self) -> int: ...
    @property
    def decode_steps(self) -> int:
        """Steps that placed at least one decode."""

    @property
    def last_prefill(self) -> int:
        """The last step that placed prompt tokens; -1 before the first."""


class Columns(Protocol):
    """Read-only numpy columns over the running sequences, in order of admission; made when asked for."""

    @property
    def id(self) -> IntColumn: ...
    @property
    def arrival(self) -> IntColumn: ...
    @property
    def arrived(self) -> FloatColumn: ...
    @property
    def priority(self) -> IntColumn: ...
    @property
    def prompt_len(self) -> IntColumn: ...
    @property
    def total(self) -> IntColumn: ...
    @property
    def computed(self) -> IntColumn: ...
    @property
    def generated(self) -> IntColumn: ...
    @property
    def remaining(self) -> IntColumn: ...
    @property
    def kv_max(self) -> IntColumn: ...
    @property
    def blocks(self) -> IntColumn: ...


class Waiting(Protocol):
    """The waiting sequences in queue order, or in the order of the admission policy's key."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[RequestView]: ...


class StepTime(Protocol):
    """Step-time model fitted on line to the last steps."""

    def seconds(self, decodes: int, prompt_tokens: int) -> float:
        """Expected duration of a step of that many decodes and prompt tokens; 0.0 before it is fitted."""

    def copy_seconds(self, blocks: int) -> float:
        """Expected time to copy that many blocks to the host pool or back; 0.0 before a copy was measured."""


class Snapshot(Protocol):
    """The scheduler's state at one moment of one step."""

    @property
    def step(self) -> int:
        """Number of this step."""

    @property
    def now(self) -> float:
        """Time at the start of the step, in seconds (monotonic in the engine, virtual in the simulator)."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""

    @property
    def blocks(self) -> int:
        """KV blocks of the pool."""

    @property
    def free(self) -> int:
        """Blocks that can be taken now, cached ones that nobody holds included."""

    @property
    def free_cached(self) -> int:
        """How many of `free` hold reusable content."""

    @property
    def budget(self) -> int:
        """Token budget of a step (`max_step_tokens`)."""

    @property
    def left(self) -> int:
        """Tokens of the budget not yet placed in this step."""

    @property
    def left_prompts(self) -> int:
        """Prompt tokens that this step may still place: `left`, and no more than the shape's `prompts`."""

    @property
    def placed(self) -> int:
        """Sequences placed so far in this step."""

    @property
    def slots(self) -> int:
        """Free places for running sequences; can be negative after the limit was lowered."""

    @property
    def max_running(self) -> int:
        """Limit on running sequences."""

    @property
    def running(self) -> Sequence[RequestView]:
        """Running sequences in order of admission."""

    @property
    def waiting(self) -> Waiting:
        """Waiting sequences, walked lazily."""

    @property
    def decoding(self) -> int:
        """Running sequences whose prompt is wholly computed."""

    @property
    def preempted(self) -> Sequence[int]:
        """Ids preempted so far in this step."""

    @property
    def count(self) -> Counts:
        """Cumulative counters."""

    @property
    def ended(self) -> Sequence[Ended]:
        """The last sequences that ran to their end, oldest first, at most 256: what a policy may learn from."""

    @property
    def cols(self) -> Columns:
        """Columns over the running sequences."""

    @property
    def step_time(self) -> StepTime:
        """Step-time model."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""


PolicyState = Mapping[str, Any]
"""A policy's exported state: plain JSON values, with its own version inside."""
