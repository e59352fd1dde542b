"""The load of `prefill_decode` on a live daemon, driven over HTTP as clients would.

Every stream has a thread of its own that notes when each token arrives. Prompts are the same random token ids in
every measurement, under a cache salt of its own: the load is equal, and nothing of an earlier one is found in the
prefix cache. Answers go on at the end-of-text token.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvyard.sim.figures import percentiles
from kvyard.sim.prefill_decode import ANSWER, DECODER_PROMPT, DECODERS, EVERY, PROMPT

TOKEN_IDS = (1000, 30000)
"""Range of the random prompt tokens: ordinary words in any vocabulary."""
PATIENCE = 120.0
"""Seconds without a token after which a stream is given up."""
DECODE_RATE = 250.0
"""Tokens a second that no decoder exceeds. What it may make follows, and no more: some disciplines reserve it all."""


class LiveError(RuntimeError):
    """The daemon did not answer as the measurement needs; the text says what it said."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the daemon's HTTP API is, and what it serves."""

    address: str
    model: str
    max_model_len: int


@dataclass
class Stream:
    """One streamed completion. Times in seconds of a monotonic clock."""

    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    """When each token arrived."""
    problem: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def run(self, target: Target, prompt: list[int], max_tokens: int, salt: str) -> None:
        """Ask and read until the end, or until stopped; never raises."""
        url = urlsplit(target.address)
        connection = HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=PATIENCE)
        try:
            self.sent = time.monotonic()
            connection.request("POST", "/v1/completions", _body(target, prompt, max_tokens, salt), _HEADERS)
            self._read(connection.getresponse())
        except (OSError, HTTPException) as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
        finally:
            self.begun.set()
            with suppress(OSError):
                connection.close()

    def _read(self, response: HTTPResponse) -> None:
        if response.status != 200:
            self.problem = f"status {response.status}: {response.read(500).decode(errors='replace')}"
            return
        for count in _token_counts(response):
            self.tokens += [time.monotonic()] * count
            self.begun.set()
            if self.stopped.is_set():
                return


_HEADERS = {"Content-Type": "application/json"}


def _body(target: Target, prompt: list[int], max_tokens: int, salt: str) -> str:
    return json.dumps(
        {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
    )


def _token_counts(response: HTTPResponse) -> Iterator[int]:
    """Tokens of each event as it arrives."""
    while line := response.readline():
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        choices = json.loads(line[6:]).get("choices") or [{}]
        yield len(choices[0].get("token_ids") or ())


def measure(target: Target, prompts: int, seed: int = 1) -> dict[str, Any]:
    """The same figures as in virtual time, of so many long prompts. Raises LiveError."""
    draw, salt = np.random.default_rng(seed), secrets.token_hex(8)
    most = min(int(EVERY * (prompts + 5) * DECODE_RATE), target.max_model_len - DECODER_PROMPT - 1)
    decoders = [_start(target, draw, DECODER_PROMPT, most, salt) for _ in range(DECODERS)]
    for stream, _ in decoders:
        stream.begun.wait(PATIENCE)
    began = time.monotonic()
    readers = []
    for number in range(prompts):
        time.sleep(max(0.0, began + EVERY * (number + 1) - time.monotonic()))
        readers.append(_start(target, draw, PROMPT, ANSWER, salt))
    for _, thread in readers:
        thread.join(PATIENCE)
    ended = time.monotonic()
    for stream, _ in decoders:
        stream.stopped.set()
    for _, thread in decoders:
        thread.join(PATIENCE)
    return _figures([stream for stream, _ in decoders], [stream for stream, _ in readers], began, ended)


def _start(
    target: Target, draw: np.random.Generator, prompt: int, max_tokens: int, salt: str
) -> tuple[Stream, threading.Thread]:
    stream = Stream()
    ids = draw.integers(*TOKEN_IDS, prompt).tolist()
    thread = threading.Thread(target=stream.run, args=(target, ids, max_tokens, salt), daemon=True)
    thread.start()
    return stream, thread


def _figures(decoders: list[Stream], readers: list[Stream], began: float, ended: float) -> dict[str, Any]:
    failed = [stream.problem for stream in (*decoders, *readers) if stream.problem or not stream.tokens]
    if failed:
        raise LiveError(
            f"{len(failed)} of {len(decoders) + len(readers)} streams failed: {failed[0] or 'no token came'}"
        )
    gaps = np.concatenate([np.diff([at for at in stream.tokens if began <= at <= ended]) for stream in decoders])
    waits = np.array([stream.tokens[0] - stream.sent for stream in readers])
    tokens = sum(began <= at <= ended for stream in (*decoders, *readers) for at in stream.tokens)
    return {
        "decode_itl_s": percentiles(gaps),
        "decode_worst_s": float(gaps.max()),
        "prompt_ttft_s": percentiles(waits),
        "output_tokens_per_s": tokens / (ended - began),
    }
