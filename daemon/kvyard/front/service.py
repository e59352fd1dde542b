"""What the HTTP and control APIs ask of the serving side: submit a request, read its tokens, cancel it.

The implementation keeps the journal, so that a stream goes on over an engine's death: what the caller
sees is one unbroken sequence of deltas.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvyard.link.messages import Sampling, TokenLogprobs

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Refusal(Exception):
    """A request was not accepted; nothing was allocated for it.

    `status` is the HTTP status (400 it can never be served, 429 the queue is full, 503 draining or no
    engine), `retry_after` seconds for 429 and 503, `code` a stable word for programs.
    """

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after


@dataclass(slots=True)
class Job:
    """One prompt and `n` continuations of it, as the API understood the client."""

    request_id: str
    prompt: list[int]
    max_new: int
    sampling: Sampling
    """Of sequence 0; the others use the same with their own sequence index."""
    n: int = 1
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    """CLOCK_MONOTONIC seconds."""
    queue_timeout: float | None = None
    """Seconds it may wait for its first admission."""
    cache_salt: str = ""


@dataclass(slots=True)
class Delta:
    """New output of one continuation; `tokens` may be empty only together with a finish."""

    index: int
    tokens: list[int]
    hashes: list[int] = field(default_factory=list)
    """Logits hashes of the tokens, in deterministic mode."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Those of the job's prompt, once: with the first delta of continuation 0."""
    finish: FinishReason | None = None
    error: tuple[str, str] | None = None
    """Code and message, with finish `error`."""


class Generation(Protocol):
    """A submitted job."""

    cached_tokens: int
    """Prompt tokens found in the prefix cache, known with the first delta."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas of all continuations as they come, until every one has finished."""
        ...

    def stop(self, index: int) -> None:
        """A stop string was found: end this continuation; no further delta of it comes."""
        ...

    def cancel(self) -> None:
        """The client is gone: end all continuations and free their blocks. Safe to call at any time."""
        ...


class Service(Protocol):
    """The serving side as the APIs see it."""

    @property
    def ready(self) -> bool:
        """An engine serves and nothing is draining (`/ready`)."""
        ...

    @property
    def not_ready_reason(self) -> str:
        """Why not, for `/ready`'s body; empty when ready."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may hold, prompt and output."""
        ...

    def submit(self, job: Job) -> Generation:
        """Take a job or raise Refusal."""
        ...

    def check_room(self, sequences: int, ahead: int = 0) -> None:
        """Raise Refusal when that many more sequences would not be accepted; before any tokenising.

        `ahead` are sequences that were let in and are not submitted yet.
        """
        ...
