"""Many requests at once against a real daemon, and what each of them got."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Wish:
    """One request: a prompt of token ids and how it is to be continued."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 7
    banned: tuple[int, ...] = ()
    """Token ids that its output must not have."""

    def body(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
        """The request's JSON."""
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_logits_hash": True,
            **({"logit_bias": {str(token): -100 for token in self.banned}} if self.banned else {}),
            **more,
        }


@dataclass(slots=True)
class Result:
    """What a request got."""

    tokens: list[int] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    error: str = ""


def wishes(
    count: int,
    seed: int,
    prompt: tuple[int, int] = (4, 60),
    output: tuple[int, int] = (2, 14),
    ids: tuple[int, int] = (1000, 40000),
) -> list[Wish]:
    """Mixed lengths, greedy and sampled, from one seed; token ids are ordinary words' (no special ids)."""
    rng = random.Random(seed)
    return [
        Wish(
            prompt=tuple(rng.randrange(*ids) for _ in range(rng.randint(*prompt))),
            max_tokens=rng.randint(*output),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(2**31),
        )
        for _ in range(count)
    ]


async def stream(
    client: httpx.AsyncClient, wish: Wish, on_token: Callable[[Result], None] = lambda result: None
) -> Result:
    """Stream one completion to its end."""
    result = Result()
    async with client.stream("POST", "/v1/completions", json=wish.body(stream=True)) as response:
        if response.status_code != 200:
            result.error = (await response.aread()).decode()
            return result
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            _take(result, json.loads(line[6:]))
            on_token(result)
    return result


def _take(result: Result, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        result.error = json.dumps(chunk["error"])
        return
    for choice in chunk["choices"]:
        result.tokens += choice.get("token_ids") or []
        result.hashes += choice.get("logits_hashes") or []
        if choice.get("finish_reason"):
            result.finishes.append(choice["finish_reason"])


async def at_once(count: int) -> None:
    """Nobody waits for those before him."""


async def run_all(
    base: str,
    wanted: list[Wish],
    on_token: Callable[[Result], None] = lambda result: None,
    sent: Callable[[int], Awaitable[None]] = at_once,
) -> list[Result]:
    """All together; `sent(count)` is awaited when so many are on their way, before the next one."""
    limits = httpx.Limits(max_connections=len(wanted) + 4)
    async with httpx.AsyncClient(base_url=base, timeout=300, limits=limits, verify=False) as client:
        tasks = []
        for count, wish in enumerate(wanted, 1):
            tasks.append(asyncio.create_task(stream(client, wish, on_token)))
            await sent(count)
        return await asyncio.gather(*tasks)


def run_each(base: str, wanted: list[Wish]) -> list[Result]:
    """One after the other, each alone in the engine."""
    results = []
    with httpx.Client(base_url=base, timeout=300, verify=False) as client:
        for wish in wanted:
            answer = client.post("/v1/completions", json=wish.body())
            assert answer.status_code == 200, answer.text
            result = Result()
            _take(result, answer.json())
            results.append(result)
    return results
