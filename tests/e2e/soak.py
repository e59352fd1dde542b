"""A crowd that treats the daemon badly: cancels, disconnects, faults, nonsense; and what is left of it."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, wait_until
from tests.e2e.streams import MODEL
from tests.e2e.timing import limit

FAULTY_TOKEN = 255
"""A prompt with this token makes its own sequence fail in the sampler."""
FAULTS = json.dumps([{"point": "sample", "action": "fail", "token": FAULTY_TOKEN}])
AT_ONCE = 24
SO_LINGER_NOW = struct.pack("ii", 1, 0)

BAD_BODIES: tuple[tuple[int, bytes], ...] = (
    (400, b"{x"),
    (400, b""),
    (400, b"[]"),
    (400, b'"a"'),
    (400, b"\xff\xfe"),
    (400, b"[" * 500),
    (400, b'{"prompt": "a", "max_tokens": -1}'),
    (400, b'{"prompt": "a", "temperature": 1e400}'),
    (400, b'{"prompt": "a", "n": 5000000}'),
    (400, b'{"prompt": [99999999], "max_tokens": 1}'),
    (400, b'{"prompt": "' + b"a" * 20000 + b'", "max_tokens": 1}'),
    (400, b'{"prompt": "a", "logit_bias": {"x": 1}}'),
    (404, b'{"prompt": "a", "model": "another"}'),
)
"""Status and body."""


@dataclass
class Connection:
    """One HTTP/1.1 connection, close enough to the socket to drop it in every way."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, base: str) -> Connection:
        """Connect."""
        host = urlsplit(base)
        return cls(*await asyncio.open_connection(host.hostname, host.port))

    async def send(self, body: bytes, path: str = "/v1/completions") -> None:
        """Send a request."""
        kind = f"content-type: application/json\r\ncontent-length: {len(body)}"
        self.writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n{kind}\r\n\r\n".encode() + body)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def answer(self) -> tuple[int, bytes]:
        """Status and whole body of an answer, streamed or not."""
        status, headers = await self.head()
        if "content-length" in headers:
            return status, await self.reader.readexactly(int(headers["content-length"]))
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return status, body

    async def chunk(self) -> bytes:
        """One chunk of a streamed body; empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    def drop(self, *, hard: bool) -> None:
        """Close it; `hard` with a reset, as a crashed client's machine does."""
        if hard:
            socket = self.writer.get_extra_info("socket")
            socket.setsockopt(1, 13, SO_LINGER_NOW)  # SOL_SOCKET, SO_LINGER: no time, so a reset
            self.writer.transport.abort()
        else:
            self.writer.close()


@dataclass
class Crowd:
    """Clients of one daemon; `outcomes` counts what became of their requests."""

    running: DaemonProcess
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)

    def send(self, requests: int) -> None:
        """Send that many, `AT_ONCE` at any time; returns when all have their outcome."""
        asyncio.run(self._send(requests))

    async def _send(self, requests: int) -> None:
        numbers = iter(range(requests))
        with Client(self.running.socket) as control:
            self._control, self._calls = control, asyncio.Lock()
            await asyncio.gather(*(self._client(numbers, worker) for worker in range(AT_ONCE)))

    async def _client(self, numbers: Iterator[int], worker: int) -> None:
        """One client after the other on one connection, which is replaced when it was dropped."""
        rng = random.Random(self.seed * 1000 + worker)
        habits, weights = zip(*HABITS, strict=True)
        connection = await Connection.open(self.running.base)
        for _ in numbers:
            (habit,) = rng.choices(habits, weights)
            try:
                kept = await asyncio.wait_for(habit(self, connection, rng), limit(30))
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                raise AssertionError(f"{habit.__name__}: the daemon closed the connection") from error
            if not kept:
                connection = await Connection.open(self.running.base)
        connection.drop(hard=False)

    async def cancel(self, request_id: str) -> bool:
        """Over the control socket; False when it had ended before."""
        async with self._calls:
            try:
                await asyncio.to_thread(self._control.call, "cancel", {"request_id": request_id})
            except ControlError as error:
                assert error.code == "not-found", error
                return False
            return True


Habit = Callable[[Crowd, Connection, random.Random], Awaitable[bool]]
"""One request; True when its connection can be used again."""


def body(rng: random.Random, **more: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """A short request, which does not come upon the faulty token by itself."""
    prompt = [rng.randrange(0, FAULTY_TOKEN) for _ in range(rng.randint(1, 12))]
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": rng.randint(1, 4)}
    return json.dumps(asked | {"logit_bias": {str(FAULTY_TOKEN): -100}} | more).encode()


async def whole(crowd: Crowd, connection: Connection, rng: random.Random) -> bool:
    """A plain request, some with choices, penalties and log-probabilities."""
    extra = rng.choice(({}, {"n": 2, "presence_penalty": 1.0}, {"logprobs": 2}, {"stop": ["a", "\n"]}))
    await connection.send(body(rng, **extra))
    status, answer = await connection.answer()
    assert status == 200, answer
    crowd.outcomes["whole"] += 1
    return True


async def stream(crowd: Crowd, connection: Connection, rng: random.Random) -> bool:
    """A stream to its end."""
    await connection.send(body(rng, stream=True))
    status, answer = await connection.answer()
    assert status == 200 and answer.endswith(b"data: [DONE]\n\n"), answer
    crowd.outcomes["stream"] += 1
    return True


async def leaves_a_stream(crowd: Crowd, connection: Connection, rng: random.Random) -> bool:
    """Gone after the first token."""
    await connection.send(body(rng, stream=True) if rng.random() < 0.5 else long(rng))
    await connection.head()
    await connection.chunk()
    connection.drop(hard=rng.random() < 0.5)
    crowd.outcomes["left a stream"] += 1
    return False


async def leaves_early(crowd: Crowd, connection: Connection, rng: random.Random) -> bool:
    """Gone before anything came, a few milliseconds after asking or at once."""
    await connection.send(body(rng) if rng.random() < 0.5 else long(rng))
    await asyncio.sleep(rng.choice((0.0, 0.002, 0.01)))
    connection.drop(hard=rng.random() < 0.5)
    crowd.outcomes["left early"] += 1
    return False


async def half_a_request(crowd: Crowd, connection: Connection, rng: random.Random) -> bool:
    """Gone in the middle of its own body."""
    connection.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
    await connection.writer.drain()
    connection.drop(hard=rng.random() < 0.5)
    crowd.outcomes["half a request"] += 1
    return False


async def is_cancelled(crowd: Crowd, connection: Connection, rng: random.Random) -> bool:
    """An operator cancels it."""
    await connection.send(long(rng))
    await connection.head()
    first = await connection.chunk()
    ended = await crowd.cancel(json.loads(first[6:])["id"])
    while await connection.chunk():
        pass
    crowd.outcomes["cancelled" if ended else "cancelled too late"] += 1
    connection.drop(hard=False)  # an error in mid-stream closes it
    return False


async def fails(crowd: Crowd, connection: Connection, rng: random.Random) -> bool:
    """The engine cannot go on with it."""
    await connection.send(body(rng, prompt=[1, 2, FAULTY_TOKEN]))
    status, answer = await connection.answer()
    assert status == 500 and b"model_error" in answer, answer
    crowd.outcomes["failed"] += 1
    return True


async def bad(crowd: Crowd, connection: Connection, rng: random.Random) -> bool:
    """Nonsense."""
    expected, text = rng.choice(BAD_BODIES)
    await connection.send(text)
    status, answer = await connection.answer()
    assert status == expected and b'"error"' in answer, (text[:80], status, answer)
    crowd.outcomes["bad"] += 1
    return True


async def times_out(crowd: Crowd, connection: Connection, rng: random.Random) -> bool:
    """A deadline that it cannot meet."""
    await connection.send(body(rng, max_tokens=400, ignore_eos=True, deadline_ms=1))
    status, answer = await connection.answer()
    assert b"deadline" in answer, (status, answer)
    crowd.outcomes["timed out"] += 1
    return status != 200


def long(rng: random.Random) -> bytes:
    """A stream that its client will not see the end of."""
    return body(rng, stream=True, max_tokens=400, ignore_eos=True)


HABITS: tuple[tuple[Habit, float], ...] = (
    (whole, 50),
    (stream, 15),
    (leaves_a_stream, 8),
    (leaves_early, 8),
    (half_a_request, 2),
    (is_cancelled, 5),
    (fails, 2),
    (bad, 8),
    (times_out, 2),
)
"""Each with its weight."""


# ---- what is left --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the two processes hold."""

    descriptors: tuple[int, int]
    """Of front and engine."""
    rss: tuple[int, int]
    threads: tuple[int, int]

    @classmethod
    def of(cls, running: DaemonProcess, engine: int) -> Holdings:
        """Of this daemon, now."""
        pair = [psutil.Process(pid) for pid in (running.process.pid, engine)]
        front, other = pair
        return cls(
            (front.num_fds(), other.num_fds()),
            (front.memory_info().rss, other.memory_info().rss),
            (front.num_threads(), other.num_threads()),
        )


def check_nothing_left(running: DaemonProcess, client: Client) -> None:
    """No sequence, no block, no call in any table of front or engine, and every invariant of the pool holds."""

    def empty() -> bool:
        dump = client.call("dump")
        engine = dump["engine"]
        return not any(
            (
                *(size for name, size in dump["tables"].items() if name != "engine_calls"),
                *engine["tables"].values(),
                engine["running"],
                engine["waiting"],
                len(engine["sequences"]),
                engine["blocks"]["used"],
                engine["host_blocks_used"],
                dump["requests"]["total"],
            )
        )

    wait_until(empty, limit(5), "every table to be empty")
    dump = client.call("dump")
    assert dump["engine"]["faults"] == []
    assert dump["tables"]["engine_calls"] == 0, "the dump itself was answered"
    assert dump["status"]["engine"]["restarts"] == 0


def settled(running: DaemonProcess, engine: int, base: Holdings) -> Holdings:
    """The holdings once descriptors are back at `base`."""
    wait_until(
        lambda: Holdings.of(running, engine).descriptors <= base.descriptors, limit(5), f"descriptors of {base}"
    )
    time.sleep(0.5)  # an idle moment, in which the engine collects garbage
    return Holdings.of(running, engine)
