"""Requests of random shapes, and everything a client is told of them, in a form that two runs can be compared by."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, wait_until
from tests.e2e.streams import MODEL


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which token ids prompts are made of, and what may be asked of outputs."""

    ids: tuple[int, int]
    """The first, and the first beyond."""
    stops: tuple[str, ...]
    """Stop strings that turn up now and then."""

    def text(self, rng: random.Random, length: int) -> list[int]:
        """Random token ids."""
        return [rng.randrange(*self.ids) for _ in range(length)]


WORDS = Vocabulary((1000, 40000), (" the", "e ", "\n", ". ", "er", " of a"))
"""The default model's."""
BYTES = Vocabulary((0, 256), ("e", "A", "zz", "\n", "\ufffd\ufffd"))
"""The quick model's."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Bounds of a request: tokens of its prompt and of each output."""

    prompt: tuple[int, int]
    output: tuple[int, int]


@dataclass(slots=True)
class Choice:
    """One continuation as its client saw it."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None

    def add(self, part: dict[str, Any]) -> None:
        """A choice of an answer, or of a chunk."""
        self.text += part["text"]
        self.tokens += part.get("token_ids") or []
        self.hashes += part.get("logits_hashes") or []
        if (logprobs := part.get("logprobs")) is not None:
            self.logprobs += zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)
        if part["finish_reason"] is not None:
            assert self.finish is None, "one end per choice"
            self.finish, self.stop_reason = part["finish_reason"], part["stop_reason"]


@dataclass(slots=True)
class Answer:
    """Everything a client is told, but for what says how the daemon came to it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    counted: tuple[int, int] = (0, 0)
    """Prompt and output tokens of the usage."""
    cached: int = 0
    """Tokens from the prefix cache; no part of the comparison."""
    error: str = ""

    def add(self, body: dict[str, Any]) -> None:
        """A whole answer, or a chunk of it."""
        if "error" in body:
            self.error = json.dumps(body["error"])
            return
        for part in body["choices"]:
            self.choices.setdefault(part["index"], Choice()).add(part)
        if (usage := body.get("usage")) is not None:
            self.counted = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached = usage["prompt_tokens_details"]["cached_tokens"]

    def same(self, other: Answer) -> bool:
        """Equal in all that does not depend on the cache."""
        mine, others = (self.choices, self.counted, self.error), (other.choices, other.counted, other.error)
        return mine == others


def bodies(count: int, seed: int, shape: Shape, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """`count` requests. Some prompts begin like others, so that a prefix cache has something to find."""
    rng = random.Random(seed)
    heads = [vocabulary.text(rng, rng.randint(shape.prompt[1] // 4, shape.prompt[1] // 2)) for _ in range(4)]
    return [_body(rng, shape, vocabulary, heads) for _ in range(count)]


def _body(rng: random.Random, shape: Shape, vocabulary: Vocabulary, heads: list[list[int]]) -> dict[str, Any]:
    # Short outputs are likelier, as in life; both ends of the range occur.
    output = min(rng.randint(*shape.output), rng.randint(*shape.output))
    head = rng.choice(heads) if rng.random() < 0.3 else []
    # Half are short: those are the ones that outgrow what they were let in with.
    longest = rng.choice((shape.prompt[1], max(shape.prompt[0], shape.prompt[1] // 6)))
    length = max(1, rng.randint(shape.prompt[0], longest) - len(head))
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": head + vocabulary.text(rng, length),
        "max_tokens": output,
        "n": rng.choice((1, 1, 1, 1, 2, 3)),
        "seed": rng.randrange(2**31),
        "return_token_ids": True,
        "return_logits_hash": True,
        "stream": rng.random() < 0.5,
    }
    body |= _sampling(rng, vocabulary) | _ends(rng, vocabulary, output)
    if rng.random() < 0.3:
        body["logprobs"] = rng.randint(0, 5)
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body


def _sampling(rng: random.Random, vocabulary: Vocabulary) -> dict[str, Any]:
    """Greedy for a third, else a temperature with cuts; penalties and biases with either."""
    chosen: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7, 1.3))}
    if chosen["temperature"]:
        cuts = {"top_k": rng.randint(1, 50), "top_p": rng.uniform(0.3, 1.0), "min_p": rng.uniform(0.0, 0.2)}
        chosen |= {name: value for name, value in cuts.items() if rng.random() < 0.4}
    penalties = {
        "presence_penalty": rng.uniform(-1.0, 2.0),
        "frequency_penalty": rng.uniform(-1.0, 2.0),
        "repetition_penalty": rng.uniform(0.8, 1.6),
        "logit_bias": {str(rng.randrange(*vocabulary.ids)): rng.uniform(-5.0, 20.0) for _ in range(3)},
    }
    return chosen | {name: value for name, value in penalties.items() if rng.random() < 0.3}


def _ends(rng: random.Random, vocabulary: Vocabulary, output: int) -> dict[str, Any]:
    """What may end it before its length, and what holds that off."""
    ends: dict[str, Any] = {"ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.3:
        ends["stop"] = rng.sample(vocabulary.stops, rng.randint(1, 3))
        ends["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.2:
        ends["stop_token_ids"] = vocabulary.text(rng, 3)
    if rng.random() < 0.3:
        ends["min_tokens"] = rng.randint(0, output)
    return ends


# ---- running them --------------------------------------------------------------------------------------------


def run_alone(base: str, wanted: Sequence[dict[str, Any]]) -> list[Answer]:
    """One after the other, each alone in the engine, none streamed."""
    answers = []
    with httpx.Client(base_url=base, timeout=300, verify=False) as client:
        for body in wanted:
            whole = {name: value for name, value in body.items() if name != "stream_options"} | {"stream": False}
            reply = client.post("/v1/completions", json=whole)
            assert reply.status_code == 200, reply.text
            answers.append(Answer())
            answers[-1].add(reply.json())
    return answers


async def run_together(
    base: str, wanted: Sequence[dict[str, Any]], leavers: Sequence[dict[str, Any]], at_once: int
) -> list[Answer]:
    """`at_once` of them at any time, among clients that go away in mid-stream; what those got is nobody's."""
    room = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=300, limits=limits, verify=False) as client:

        async def one(body: dict[str, Any]) -> Answer:
            async with room:
                return await ask(client, body)

        async def leaver(body: dict[str, Any]) -> None:
            async with room:
                await leave(client, body, after=len(body["prompt"]) % 5)

        every = [asyncio.create_task(one(body)) for body in wanted]
        gone = [asyncio.create_task(leaver(body)) for body in leavers]
        answers = await asyncio.gather(*every)
        await asyncio.gather(*gone)
        return answers


async def run_at_once(running: DaemonProcess, wanted: Sequence[dict[str, Any]]) -> list[Answer]:
    """All of them, in this order: nothing is scheduled until the last has come, so they run beside each other."""
    limits = httpx.Limits(max_connections=len(wanted))
    with Client(running.socket, timeout=60) as client:
        client.call("pause")
        try:
            async with httpx.AsyncClient(base_url=running.base, timeout=300, limits=limits, verify=False) as http:
                tasks, sequences = [], 0
                for body in wanted:
                    tasks.append(asyncio.create_task(ask(http, body)))
                    sequences += body.get("best_of") or body.get("n") or 1
                    await asyncio.to_thread(wait_until, partial(_known, client, sequences), 60, "its arrival")
                client.call("resume")
                return await asyncio.gather(*tasks)
        finally:
            client.call("resume")


def _known(client: Client, sequences: int) -> bool:
    return bool(client.call("requests", {"limit": 1})["total"] == sequences)


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """One request to its end, streamed or not."""
    answer = Answer()
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200 or not body["stream"]:
            answer.add(json.loads(await reply.aread()))
            return answer
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                answer.add(json.loads(line[6:]))
    return answer


async def leave(client: httpx.AsyncClient, body: dict[str, Any], after: int) -> None:
    """Stream, and go away after that many events; with 0 before the first, wherever the request then is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2 if after == 0 else 60):
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
                seen = 0
                async for line in reply.aiter_lines():
                    seen += line.startswith("data: ")
                    if seen >= max(1, after):
                        return
