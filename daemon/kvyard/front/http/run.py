"""An order under way: its generations, its continuations, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvyard.front.http.answers import PromptTokensDetails, Usage
from kvyard.front.http.errors import ApiError, from_generation, from_refusal
from kvyard.front.http.order import Order
from kvyard.front.service import Delta, Generation, Refusal, Service
from kvyard.front.text.continuation import Piece


class Run:
    """Submits an order's jobs and turns their deltas into pieces of its continuations."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._generations: list[Generation] = []

    def submit(self, service: Service) -> None:
        """Submit all jobs or none. Raises ApiError with the serving side's refusal."""
        try:
            for job in self.order.jobs:
                self._generations.append(service.submit(job))
        except Refusal as refusal:
            self.cancel()
            raise from_refusal(refusal) from refusal

    def cancel(self) -> None:
        """End everything that still runs. Safe at any time."""
        for generation in self._generations:
            generation.cancel()

    async def progress(self) -> AsyncIterator[int]:
        """Indices of continuations that gained something, until all have finished. Raises ApiError if one failed.

        None is told before the log-probabilities of its prompt are known, where they are asked for.
        """
        order = self.order
        shares = order.scored or order.shown.no_output
        held: set[int] = set()
        async for generation_at, delta in _merged(self._generations):
            at = generation_at * order.n + delta.index
            if not shares:
                if self._accept(at, generation_at, delta):
                    yield at
                continue
            for each in self._shared(at, generation_at, delta, held):
                yield each
        for each in sorted(held):
            yield each
        if any(continuation.finish is None for continuation in order.continuations):
            raise ApiError(500, "The request ended before its answer was complete.", code="incomplete")

    def _shared(self, at: int, generation_at: int, delta: Delta, held: set[int]) -> list[int]:
        """Take a delta that says something for all continuations of its prompt; those that may be told now.

        `held` are those that gained something and wait for the log-probabilities of their prompt.
        """
        order = self.order
        first = at - at % order.n
        siblings = range(first, first + order.n)
        held.update(
            each
            for each in (siblings if order.shown.no_output else (at,))
            if self._accept(each, generation_at, delta)
        )
        if delta.prompt_logprobs is not None:
            for each in siblings:
                order.continuations[each].prompt_logprobs = delta.prompt_logprobs
        known = [
            each for each in sorted(held) if not order.scored or order.continuations[each].prompt_logprobs is not None
        ]
        held.difference_update(known)
        return known

    def _accept(self, at: int, generation_at: int, delta: Delta) -> bool:
        """Whether continuation `at` takes it. Raises ApiError when it failed."""
        continuation = self.order.continuations[at]
        if continuation.finish is not None:
            return False
        if continuation.accept(delta):
            self._generations[generation_at].stop(delta.index)
        elif continuation.finish in ("error", "cancelled"):
            code, message = continuation.error or ("cancelled", "The request was cancelled.")
            raise from_generation(code, message)
        return True

    def usage(self) -> Usage:
        """Tokens so far."""
        order = self.order
        output = 0 if order.shown.no_output else sum(continuation.count for continuation in order.continuations)
        cached = sum(generation.cached_tokens for generation in self._generations)
        prompt = order.prompt_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))

    def chosen(self) -> list[tuple[int, Piece]]:
        """Continuations to show, with all they gained, in the order of their index in the answer.

        Where only some are kept, the best come first: those with the highest log-probability per token.
        """
        order = self.order
        pieces = [continuation.take() for continuation in order.continuations]
        if order.keep == order.n:
            return list(enumerate(pieces))
        shown: list[tuple[int, Piece]] = []
        for start in range(0, len(pieces), order.n):
            group = sorted(range(start, start + order.n), key=lambda at: -_score(pieces[at]))
            shown += [(at, pieces[at]) for at in group[: order.keep]]
        return shown


def _score(piece: Piece) -> float:
    return sum(entry.logprob for entry in piece.logprobs) / max(1, len(piece.logprobs))


async def _merged(generations: list[Generation]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all generations as they come, with the generation's index."""
    if len(generations) == 1:  # by far the most; saves a task and a queue per token
        async for delta in generations[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(at: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                queue.put_nowait((at, delta))
            queue.put_nowait(None)
        except Exception as error:  # handed to the reader, who raises it
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(at, generation)) for at, generation in enumerate(generations)]
    try:
        left = len(pumps)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
