"""One submitted job and the stream of its deltas; what the HTTP and control APIs iterate over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from kvyard.front.service import Delta, FinishReason
from kvyard.link.messages import TokenLogprobs


class Canceller(Protocol):
    """What a generation needs of the serving side."""

    def end(self, sequence_id: int, reason: FinishReason) -> None:
        """End a sequence from the front's side; nothing more of it comes."""


class LiveGeneration:
    """Deltas of `n` continuations. A slow reader costs memory for its own tokens only: its deltas merge."""

    def __init__(self, canceller: Canceller, ids: list[int]) -> None:
        self.cached_tokens = 0
        self._canceller = canceller
        self._ids = ids
        self._open = set(range(len(ids)))
        self._pending: deque[Delta] = deque()
        self._last: dict[int, Delta] = {}
        self._waiter: asyncio.Future[None] | None = None

    # ---- the serving side's end

    def push(
        self,
        index: int,
        token: int,
        hash_: int | None = None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
    ) -> None:
        """One output token of continuation `index`."""
        delta = self._last.get(index)
        if delta is None:
            delta = self._last[index] = Delta(index, [])
            self._pending.append(delta)
        delta.tokens.append(token)
        if hash_ is not None:
            delta.hashes.append(hash_)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
        if prompt_logprobs is not None:
            delta.prompt_logprobs = prompt_logprobs
        self._wake()

    def finish(self, index: int, reason: FinishReason, error: tuple[str, str] | None = None) -> None:
        """Continuation `index` ends; told once."""
        if index not in self._open:
            return
        self._open.discard(index)
        delta = self._last.pop(index, None)
        if delta is None:
            delta = Delta(index, [])
            self._pending.append(delta)
        delta.finish, delta.error = reason, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the API's end

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._pending or self._open:
            if not self._pending:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None
                continue
            delta = self._pending.popleft()
            if self._last.get(delta.index) is delta:
                del self._last[delta.index]
            yield delta

    def stop(self, index: int) -> None:
        """A stop string was found: end this continuation; no further delta of it comes."""
        self._end(index, "stop")

    def cancel(self) -> None:
        """End all continuations and free their blocks. Safe to call at any time."""
        for index in sorted(self._open):
            self._end(index, "cancelled")
        self._wake()

    def _end(self, index: int, reason: FinishReason) -> None:
        if index in self._open:
            self._open.discard(index)
            self._drop_pending(index)
            self._canceller.end(self._ids[index], reason)

    def _drop_pending(self, index: int) -> None:
        self._last.pop(index, None)
        self._pending = deque(delta for delta in self._pending if delta.index != index)
