"""The engine's own step loop in this process, stepped by hand; the test speaks and hears as the front does."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from kvyard.core.guard import Guard
from kvyard.core.plan import Limits
from kvyard.core.policy_set import PolicySet
from kvyard.core.scheduler import Scheduler
from kvyard.engine.channel import Channel
from kvyard.engine.control import Controls
from kvyard.engine.loading import Loaded
from kvyard.engine.loop import EngineLoop, Parts
from kvyard.engine.policies import Loader
from kvyard.engine.recorder import Recorder
from kvyard.engine.sampler import Sampler
from kvyard.link.codec import decode_to_front, encode, encode_sampling
from kvyard.link.frames import HEADER, Inbox
from kvyard.link.messages import Cancel, Failed, Outputs, Sampling, Sequence, Submit, TokenLogprobs
from kvyard.link.progress import ProgressPage
from kvyard.link.record import StepRecord

GREEDY = Sampling(seed=1, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Got:
    """What the front heard of one sequence."""

    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompts: list[list[TokenLogprobs | None]] = field(default_factory=list)
    """Every list of prompt log-probabilities that was told."""
    cached: int = -1
    finish: str = ""
    error: str = ""


class Rig:
    """One engine; `blocks` and `swap_blocks` of the backend's pool are allocated anew."""

    def __init__(
        self, loaded: Loaded, policies: PolicySet | None = None, *, hashes: bool = False, **limits: int
    ) -> None:
        size = loaded.backend.geometry.block_size
        values: dict[str, Any] = {
            "blocks": 64,
            "max_running": 16,
            "max_step_tokens": 64,
            "max_model_len": 256,
            **limits,
        }
        self.limits = Limits(block_size=size, **values)
        loaded.backend.allocate(self.limits.blocks, self.limits.swap_blocks)
        loader = Loader()
        policies = policies or loader.at_start("vllm", {}, [])
        guard = Guard(clock_ns=time.perf_counter_ns)
        self.scheduler = Scheduler(self.limits, policies, clock_ns=time.perf_counter_ns, guard=guard, salt=b"rig")
        recorder = Recorder(self.scheduler, time.monotonic_ns)
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._ours.setblocking(False)
        self._inbox = Inbox()
        slots = 2 * self.limits.max_running
        parts = Parts(
            channel=Channel(theirs),
            scheduler=self.scheduler,
            backend=loaded.backend,
            sampler=Sampler(loaded.config.vocab_size, loaded.eos_ids, slots, hashes=hashes),
            page=ProgressPage(ProgressPage.create()),
            recorder=recorder,
            controls=Controls(self.scheduler, loader, recorder),
            block_size=size,
        )
        self.loop = EngineLoop(parts, clock=time.monotonic, clock_ns=time.monotonic_ns, faults=None)
        self.got: dict[int, Got] = {}
        self.records: list[StepRecord] = []
        self._next = 1

    def submit(
        self, prompt: Many[int], max_new: int = 4, sampling: Sampling = GREEDY, *, n: int = 1, first_index: int = 0
    ) -> list[int]:
        """The sequences of one new request; their ids."""
        request = self._next
        return [self.add(request, first_index + at, n, prompt, max_new, sampling) for at in range(n)]

    def add(
        self,
        request: int,
        index: int,
        n: int,
        prompt: Many[int],
        max_new: int,
        sampling: Sampling,
        emitted: Many[int] = (),
    ) -> int:
        """One sequence of a request; its id."""
        id = self._next
        self._next += 1
        sequence = Sequence(
            id=id,
            request=request,
            index=index,
            arrived=float(id),
            prompt=np.array(prompt, np.int32).tobytes(),
            max_new=max_new,
            sampling=encode_sampling(msgspec.structs.replace(sampling, index=index)),
            scored=sampling.prompt_logprobs >= 0,
            emitted=np.array(emitted, np.int32).tobytes(),
            n=n,
        )
        self.got[id] = Got()
        self._say(Submit(sequence))
        return id

    def cancel(self, *ids: int) -> None:
        """What the front says when a client is gone."""
        self._say(Cancel(list(ids)))

    def _say(self, message: Submit | Cancel) -> None:
        body = encode(message)
        self._ours.send(HEADER.pack(len(body), 0) + body)
        self.loop._inbox()

    def step(self) -> None:
        """One step; what the front hears of it is in `got` and `records`."""
        self.loop._step()
        self.loop._p.channel.flush()
        self._hear()
        assert self.scheduler.ledger.audit() == []

    def run(self, most: int = 2000) -> None:
        """Steps until nothing is left."""
        for _ in range(most):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"no end after {most} steps")

    def _hear(self) -> None:
        while True:
            try:
                data = self._ours.recv(1 << 20)
            except BlockingIOError:
                return
            for body in self._inbox.feed(data):
                match decode_to_front(body):
                    case Outputs() as outputs:
                        self._take(outputs)
                    case StepRecord() as record:
                        self.records.append(record)
                    case Failed() as failed:
                        self.got[failed.id].error = failed.code

    def _take(self, outputs: Outputs) -> None:
        ids = np.frombuffer(outputs.ids, np.int64).tolist()
        tokens = np.frombuffer(outputs.tokens, np.int32).tolist()
        hashes = np.frombuffer(outputs.hashes, np.uint64).tolist()
        for id, _, cached in outputs.admitted:
            self.got[id].cached = cached
        for row, (id, token) in enumerate(zip(ids, tokens, strict=False)):
            got = self.got[id]
            got.tokens.append(token)
            got.hashes += hashes[row : row + 1]
            if id in outputs.logprobs:
                got.logprobs.append(outputs.logprobs[id])
            if id in outputs.prompt_logprobs:
                assert len(got.tokens) == 1, "they come with the first output token"
                got.prompts.append(outputs.prompt_logprobs[id])
        for id, reason in outputs.finished:
            self.got[id].finish = reason
