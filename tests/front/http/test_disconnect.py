"""Clients that go away, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import msgspec
import pytest
from kvyard.front.http.settings import HttpSettings

from tests.front.http.conftest import MODEL, PATIENCE, Serve, Served
from tests.front.http.scripted import Wait


def raw(fields: dict[str, Any]) -> bytes:
    body = msgspec.json.encode({"prompt": "Hello", **fields})
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def ask(served: Served, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(raw(fields))
    await writer.drain()
    return reader, writer


def drop(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, as a crashed client does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
async def test_DISCONNECT_02_04_all_choices_end_with_the_client(serve: Serve, stream: bool, n: int) -> None:
    async with serve([300] * 5000, step_s=0.005, max_model_len=8192) as served:
        _, writer = await ask(served, stream=stream, n=n, max_tokens=2000)
        await served.eventually(lambda: served.service.tokens_made > 10 * n)
        drop(writer)
        await served.eventually(lambda: served.service.live == 0)
        assert served.service.cancelled == n
        made = served.service.tokens_made
        await asyncio.sleep(0.1)
        assert served.service.tokens_made == made


async def test_DISCONNECT_02_an_orderly_close_counts_too(serve: Serve) -> None:
    async with serve([300] * 5000, step_s=0.005, max_model_len=8192) as served:
        _, writer = await ask(served, max_tokens=2000)
        await served.eventually(lambda: served.service.live == 1)
        writer.close()
        await served.eventually(lambda: served.service.live == 0)
        assert served.service.cancelled == 1
        assert served.service.tokens_made < 2000


async def test_DISCONNECT_03_queued_requests_leave_with_their_clients(serve: Serve) -> None:
    never = asyncio.Event()
    async with serve([Wait(never), 300]) as served:
        writers = [(await ask(served, max_tokens=5, stream=i % 2 == 0))[1] for i in range(5)]
        await served.eventually(lambda: served.service.live == 5)
        for writer in writers:
            drop(writer)
        await served.eventually(lambda: served.service.live == 0)
        assert served.service.tokens_made == 0


async def test_DISCONNECT_04_prompts_of_one_request_end_together(serve: Serve) -> None:
    async with serve([300] * 5000, step_s=0.005, max_model_len=8192) as served:
        _, writer = await ask(served, prompt=[[1], [2], [3]], n=2, max_tokens=2000, stream=True)
        await served.eventually(lambda: served.service.tokens_made > 20)
        drop(writer)
        await served.eventually(lambda: served.service.live == 0)
        assert served.service.cancelled == 6


async def test_DISCONNECT_05_the_next_request_of_a_dropped_client_is_served(serve: Serve) -> None:
    async with serve([300] * 40, step_s=0.001) as served:
        for _ in range(20):
            reader, writer = await ask(served, stream=True, max_tokens=40)
            await reader.readuntil(b"data: ")
            drop(writer)
            answer = await served.complete(max_tokens=5)
            assert answer.json()["usage"]["completion_tokens"] == 5
        await served.eventually(lambda: served.service.live == 0)


async def test_a_client_that_leaves_while_it_sends_is_no_error(serve: Serve) -> None:
    async with serve(" a") as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(raw({})[:-5])
        await writer.drain()
        drop(writer)
        assert (await served.complete()).status_code == 200
        assert len(served.service.jobs) == 1


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_starts_nothing(serve: Serve) -> None:
    async with serve(" a", max_model_len=200_000) as served:
        _, writer = await ask(served, prompt="some words " * 50_000)
        await asyncio.sleep(0.05)
        drop(writer)
        await asyncio.sleep(0.6)
        assert served.service.live == 0
        assert served.service.tokens_made == 0


async def test_DISCONNECT_07_a_client_that_does_not_read_is_cut_and_forgotten(serve: Serve) -> None:
    settings = HttpSettings(MODEL, stall_timeout_s=0.4)
    async with serve([[300] * 200] * 5000, settings=settings, max_model_len=2_000_000, write_buffer=4096) as served:
        before = len(asyncio.all_tasks())
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", served.port))
        await asyncio.get_running_loop().sock_sendall(sock, raw({"stream": True, "max_tokens": 1_000_000}))
        await served.eventually(lambda: served.service.live == 1)
        await served.eventually(lambda: served.service.live == 0, within_s=3 * PATIENCE)
        await served.eventually(lambda: len(asyncio.all_tasks()) <= before, within_s=2 * PATIENCE)
        async with asyncio.timeout(2 * PATIENCE):  # closed, not left hanging
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                    pass
        sock.close()
        assert (await served.complete(max_tokens=5)).status_code == 200


async def stuck(served: Served, **fields: object) -> socket.socket:
    """A client that sends its request and never reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", served.port))
    await loop.sock_sendall(sock, raw(dict(fields)))
    return sock


async def test_a_client_is_cut_as_soon_as_more_than_the_buffer_waits_for_it(serve: Serve) -> None:
    settings = HttpSettings(MODEL, most_unsent=64 << 10, stall_timeout_s=600)
    tokens = [[300] * 20] * 100_000
    async with serve(tokens, settings=settings, max_model_len=3_000_000, write_buffer=4096) as served:
        sock = await stuck(served, stream=True, max_tokens=2_000_000)
        await served.eventually(lambda: served.service.live == 1)
        await served.eventually(lambda: served.service.live == 0, within_s=3 * PATIENCE)
        assert served.observer.cuts == ["buffer"]
        assert served.service.cancelled == 1
        # An event of 20 tokens is over 250 bytes: what was made fits the buffer and the kernel's, not more.
        assert served.service.tokens_made < 20 * (64 << 10) / 250 + 20 * 200
        sock.close()


async def test_a_client_within_the_buffer_is_waited_for_and_gets_everything(serve: Serve) -> None:
    settings = HttpSettings(MODEL, most_unsent=1 << 20, stall_timeout_s=600)
    async with serve([[300] * 20] * 500, settings=settings, max_model_len=20_000, write_buffer=4096) as served:
        sock = await stuck(served, stream=True, max_tokens=10_000)
        await served.eventually(lambda: served.service.jobs != [] and served.service.live == 0)  # nobody waits for it
        received = b""
        while b"[DONE]" not in received:
            part = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1 << 16), PATIENCE)
            assert part
            received += part
        assert served.observer.cuts == []
        sock.close()


async def test_a_whole_answer_that_is_never_read_does_not_keep_its_connection(serve: Serve) -> None:
    settings = HttpSettings(MODEL, most_unsent=64 << 10, stall_timeout_s=0.4)
    async with serve([[300] * 20_000], settings=settings, max_model_len=30_000, write_buffer=4096) as served:
        sock = await stuck(served, max_tokens=20_000, return_token_ids=True)
        await served.eventually(lambda: served.observer.cuts == ["stalled"], within_s=6 * PATIENCE)
        received = 0
        async with asyncio.timeout(2 * PATIENCE):
            with contextlib.suppress(ConnectionError):
                while part := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                    received += len(part)
        assert received < 20_000 * len("300,"), "the whole answer came"
        sock.close()


async def test_a_slow_but_reading_client_is_left_alone(serve: Serve) -> None:
    settings = HttpSettings(MODEL, stall_timeout_s=0.5)
    async with serve([[300] * 200] * 40, settings=settings, max_model_len=20_000, write_buffer=4096) as served:
        reader, writer = await ask(served, stream=True, max_tokens=8000)
        received = b""
        while b"[DONE]" not in received:
            part = await asyncio.wait_for(reader.read(8192), 2 * PATIENCE)
            assert part
            received += part
            await asyncio.sleep(0.02)
        writer.close()
        assert served.service.cancelled == 0


@pytest.mark.parametrize("fields", [{"max_tokens": 30}, {"max_tokens": 30, "stream": True}, {"max_tokens": 1}])
async def test_a_client_that_only_stops_sending_gets_its_answer(serve: Serve, fields: dict[str, Any]) -> None:
    async with serve([300] * 40, step_s=0.02) as served:
        reader, writer = await ask(served, **fields)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 5 * PATIENCE)  # to the end: the server closes behind it
        writer.close()
        final = answer[answer.index(b"HTTP/1.1 200") :]
        assert answer[: -len(final)] in (b"", b"HTTP/1.1 102 Processing\r\n\r\n")
        assert (b"[DONE]" in final) == bool(fields.get("stream"))
        assert b'"finish_reason":"length"' in final
        assert served.service.cancelled == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_one_that_stops_sending_and_then_leaves_is_noticed(serve: Serve, stream: bool) -> None:
    async with serve([300] * 5000, step_s=0.01, max_model_len=8192) as served:
        _, writer = await ask(served, max_tokens=4000, stream=stream)
        await served.eventually(lambda: served.service.live == 1)
        writer.write_eof()
        await asyncio.sleep(0.3)
        assert served.service.live == 1
        writer.close()
        await served.eventually(lambda: served.service.live == 0)


async def test_one_that_stops_sending_in_its_request_is_gone(serve: Serve) -> None:
    async with serve(" a") as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(raw({})[:-5])
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()
        assert served.service.jobs == []


async def test_pipelined_requests_of_one_that_stops_sending_are_all_answered(serve: Serve) -> None:
    async with serve([300] * 4, step_s=0.02) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(raw({"max_tokens": 2}) * 3)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 5 * PATIENCE)
        writer.close()
        assert answer.count(b"HTTP/1.1 200") == 3
