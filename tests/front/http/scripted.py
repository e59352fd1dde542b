"""A `Service` that emits scripted token ids, so that every turn a stream can take is driven exactly.

It keeps an engine's rules at the edges the API sees (the token limit, end ids, `min_tokens`), and counts
what still runs, was stopped and was cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from kvyard.front.service import Delta, FinishReason, Job, Refusal
from kvyard.link.messages import TokenLogprobs


def digest(token: int) -> int:
    """The hash that stands for a token's logits, 64 bits."""
    return token * 0x9E3779B97F4A7C15 % 2**64


@dataclass
class Fail:
    """An error in a script: the continuation ends by it."""

    code: str
    message: str = "it went wrong"


@dataclass
class Wait:
    """A pause in a script until `event` is set."""

    event: asyncio.Event


Item = int | list[int] | Fail | Wait
"""One step of a script: a token, several tokens in one delta, an error, a pause."""
Script = Sequence[Item]


@dataclass
class ScriptedService:
    """Serves each job by `script(job, index)`; `step_s` passes between two deltas."""

    script: Callable[[Job, int], Script]
    eos_ids: tuple[int, ...] = (2,)
    max_model_len: int = 256
    step_s: float = 0.0
    ready: bool = True
    not_ready_reason: str = ""
    cached_tokens: int = 0
    refusal: Refusal | None = None
    """Raised by `submit`."""
    no_room: Refusal | None = None
    """Raised by `check_room`."""
    most: int = 10_000
    """Continuations that may run or wait."""
    jobs: list[Job] = field(default_factory=list)
    live: int = 0
    """Continuations that still run."""
    cancelled: int = 0
    stopped: int = 0
    tokens_made: int = 0
    logprob: Callable[[int], float] = lambda token: -0.5
    """Log-probability of a token that is chosen."""
    alternatives: Callable[[int], list[tuple[int, float]]] = lambda token: [(token, -0.5)]
    """Alternatives of a token, the best first."""

    def check_room(self, sequences: int, ahead: int = 0) -> None:
        if self.no_room is not None:
            raise self.no_room
        if self.live + ahead + sequences > self.most:
            raise Refusal(429, "queue_full", f"{self.live + ahead} run or wait and {self.most} is the most", 1)

    def submit(self, job: Job) -> ScriptedGeneration:
        if self.refusal is not None:
            raise self.refusal
        self.jobs.append(job)
        return ScriptedGeneration(self, job)


class ScriptedGeneration:
    """One job's continuations, each walked by a task of its own."""

    def __init__(self, service: ScriptedService, job: Job) -> None:
        self.cached_tokens = service.cached_tokens
        self._service = service
        self._job = job
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._tasks = {index: asyncio.create_task(self._walk(index)) for index in range(job.n)}
        service.live += job.n

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._tasks or not self._deltas.empty():
            delta = await self._deltas.get()
            if delta is not None:
                yield delta

    def stop(self, index: int) -> None:
        if self._end(index):
            self._service.stopped += 1

    def cancel(self) -> None:
        for index in list(self._tasks):
            if self._end(index):
                self._service.cancelled += 1

    def _end(self, index: int) -> bool:
        task = self._tasks.pop(index, None)
        if task is None:
            return False
        task.cancel()
        self._service.live -= 1
        self._deltas.put_nowait(None)  # wakes an iterator that has nothing left to wait for
        return True

    async def _walk(self, index: int) -> None:
        made = 0
        for item in self._service.script(self._job, index):
            await asyncio.sleep(self._service.step_s)
            if isinstance(item, Wait):
                await item.event.wait()
            elif isinstance(item, Fail):
                self._put(Delta(index, [], finish="error", error=(item.code, item.message)))
                return
            else:
                delta = self._delta(index, [item] if isinstance(item, int) else item, made)
                made += len(delta.tokens)
                self._put(delta)
                if delta.finish is not None:
                    return
        self._put(Delta(index, [], finish="length"))

    def _delta(self, index: int, tokens: list[int], made: int) -> Delta:
        job, sampling = self._job, self._job.sampling
        tokens = tokens[: job.max_new - made]
        finish: FinishReason | None = "length" if made + len(tokens) >= job.max_new else None
        for at, token in enumerate(tokens):
            ends = token in sampling.stop_token_ids or (token in self._service.eos_ids and not sampling.ignore_eos)
            if ends and made + at + 1 > sampling.min_tokens:
                tokens, finish = tokens[: at + 1], "stop"
                break
        self._service.tokens_made += len(tokens)
        delta = Delta(index, list(tokens), hashes=[digest(token) for token in tokens], finish=finish)
        if sampling.logprobs >= 0:
            delta.logprobs = [self._entry(token, sampling.logprobs) for token in tokens]
        if sampling.prompt_logprobs >= 0 and made == 0 and index == 0:
            rest = [self._entry(token, sampling.prompt_logprobs) for token in job.prompt[1:]]
            delta.prompt_logprobs = [None, *rest]
        return delta

    def _entry(self, token: int, wanted: int) -> TokenLogprobs:
        return TokenLogprobs(token, self._service.logprob(token), 1, self._service.alternatives(token)[:wanted])

    def _put(self, delta: Delta) -> None:
        self._deltas.put_nowait(delta)
        if delta.finish is not None and self._tasks.pop(delta.index, None) is not None:
            self._service.live -= 1
