"""Limits and names of the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the API allows; the defaults suit a daemon that the internet does not reach."""

    model_id: str
    """Name by which clients ask for the model, and which answers carry."""
    created: int = 0
    """`created` of the model's entry in /v1/models, seconds since the epoch."""
    max_body_bytes: int = 8 << 20
    """Larger bodies get 413. A prompt of the longest window is far below."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser; `*` is all."""
    most_unsent: int = 4 << 20
    """Bytes of a stream that may wait for their reader; a client further behind is cut off."""
    stall_timeout_s: float = 30.0
    """A client that takes nothing for this long, with its buffers full, is cut off."""
