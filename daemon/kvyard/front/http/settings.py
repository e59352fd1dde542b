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
    stall_timeout_s: float = 30.0
    """A client that takes nothing for this long, with its buffers full, is cut off."""
