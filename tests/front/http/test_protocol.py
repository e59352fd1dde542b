"""What never reaches the application: bytes that are no HTTP, heads without end, and upgrades nobody offers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct

import pytest
import structlog.testing
from kvyard.front.http import protocol
from kvyard.front.http.protocol import MOST_HEAD_BYTES

from tests.front.http.conftest import PATIENCE, Serve, Served, events


async def exchange(served: Served, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send raw bytes; the answer's status, headers and body, once the server has closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.01)
    raw = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}, body


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
        b"\x00" * 64,
    ],
)
async def test_no_http_gets_a_400_in_the_shape_of_all_errors(serve: Serve, garbage: bytes) -> None:
    with structlog.testing.capture_logs() as lines:
        async with serve(" a") as served:
            status, headers, body = await exchange(served, garbage)
            assert (await served.complete()).status_code == 200
    assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert [line["code"] for line in lines if line["event"] == "http.invalid"] == ["invalid_http"]
    assert served.observer.refusals == ["invalid_http"]


async def test_a_head_without_end_is_refused_while_it_comes(serve: Serve) -> None:
    async with serve(" a") as served:
        line = b"x" * 30_000
        status, _, body = await exchange(served, b"GET /health HTTP/1.1\r\nx-a: ", line, line, line)
        assert status == 431
        error = json.loads(body)["error"]
        assert error["code"] == "headers_too_large"
        assert str(MOST_HEAD_BYTES) in error["message"]
        assert served.observer.refusals == ["headers_too_large"]


async def test_long_bodies_and_many_requests_are_no_long_head(serve: Serve) -> None:
    async with serve(" a", max_model_len=1 << 20) as served:
        for _ in range(3):  # over one connection
            answer = await served.complete(prompt=[5] * 60_000)
            assert answer.status_code == 200
        for _ in range(30):
            assert (await served.http.get("/health", headers={"x-a": "y" * 8000})).status_code == 200


async def test_garbage_behind_a_request_does_not_break_into_its_answer(serve: Serve) -> None:
    async with serve([300] * 5, step_s=0.02) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = b'{"prompt": "x", "max_tokens": 5}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await served.eventually(lambda: served.service.live == 1)
        writer.write(b"\x00garbage\r\n\r\n")
        raw = await asyncio.wait_for(reader.read(), PATIENCE)
        answered, refused = raw.split(b"HTTP/1.1 ")[1:]
        assert answered.startswith(b"200 ")
        assert json.loads(answered.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 5
        assert refused.startswith(b"400 ")
        assert b"invalid_http" in refused
        assert served.observer.refusals == ["invalid_http"]
        writer.close()
        await served.eventually(lambda: served.service.live == 0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests have to be there within 0.3 s."""
    monkeypatch.setattr(protocol, "ARRIVAL_S", 0.3)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sent", [POST, POST + b'Content-Length: 99\r\n\r\n{"prompt'])
async def test_half_a_request_is_not_waited_for_without_end(serve: Serve, sent: bytes) -> None:
    async with serve(" a") as served:
        status, _, body = await exchange(served, sent)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert served.service.jobs == []
        assert served.observer.refusals == ["request_timeout"]


@pytest.mark.usefixtures("impatient")
async def test_nor_is_silence(serve: Serve) -> None:
    async with serve(" a") as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()


async def test_a_malformed_chunk_is_answered(serve: Serve) -> None:
    async with serve(" a") as served:
        status, _, body = await exchange(served, POST + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n{}\r\n")
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")
        assert served.service.jobs == []


@pytest.mark.usefixtures("impatient")
async def test_long_answers_and_later_requests_have_their_own_time(serve: Serve) -> None:
    body = b'{"prompt": "x", "max_tokens": 5}'
    whole = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    async with serve([300] * 5, step_s=0.12) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        for _ in range(2):
            writer.write(whole)  # answered for longer than a request may take
            await asyncio.wait_for(reader.readuntil(b"total_tokens"), PATIENCE)
            await asyncio.sleep(0.4)
        writer.write(whole + whole[:40])  # half of the next one does not end the answer to this one
        await asyncio.wait_for(reader.readuntil(b"total_tokens"), PATIENCE)
        writer.close()
        assert len(served.service.jobs) == 3
        assert served.service.cancelled == 0


async def test_an_upgrade_that_is_not_offered_is_ignored_silently(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(" a") as served:
        with caplog.at_level(logging.WARNING):
            headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "x" * 22 + "=="}
            assert (await served.http.get("/health", headers=headers)).status_code == 200
        assert caplog.records == []


HUGE = POST + b"Content-Length: 99999999999\r\n"


@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
async def test_a_declared_length_above_the_limit_is_refused_before_it_comes(serve: Serve, expects: bytes) -> None:
    async with serve(" a") as served:
        async with asyncio.timeout(1):
            status, headers, body = await exchange(served, HUGE + expects + b"\r\n")
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
        assert headers["connection"] == "close"
        assert served.service.jobs == []


async def test_who_sends_on_all_the_same_reads_the_answer_and_is_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.5)
    async with serve(" a") as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(HUGE + b"\r\n")
        for _ in range(40):  # more than the buffers of both sides hold
            writer.write(b"x" * 262_144)
            await asyncio.wait_for(writer.drain(), PATIENCE)
        raw = await asyncio.wait_for(reader.read(), PATIENCE)
        assert raw.startswith(b"HTTP/1.1 413 ")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.01)
        assert (await served.complete()).status_code == 200


GOOD = b'{"prompt": "x", "max_tokens": 5}'
WHOLE = POST + b"Content-Length: %d\r\n\r\n%s" % (len(GOOD), GOOD)

BAD_TARGETS = [
    (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 400),
    (b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET http://x:99999/health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /" + b"x" * 65_534 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
]
CODES = {400: "invalid_http", 431: "headers_too_large"}


@pytest.mark.parametrize(("sent", "status"), BAD_TARGETS)
async def test_a_bad_target_is_answered_without_a_traceback(
    serve: Serve, caplog: pytest.LogCaptureFixture, sent: bytes, status: int
) -> None:
    async with serve(" a") as served:
        got, headers, body = await exchange(served, sent)
        assert (got, json.loads(body)["error"]["code"]) == (status, CODES[status])
        assert headers["connection"] == "close"
        assert served.service.jobs == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize(
    ("sent", "status"), [*BAD_TARGETS, (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400)]
)
async def test_answers_to_what_came_before_a_bad_request_are_finished_first(
    serve: Serve, caplog: pytest.LogCaptureFixture, sent: bytes, status: int, before: int
) -> None:
    async with serve([300] * 5, step_s=0.01) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(WHOLE * before + sent)
        raw = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        answers = raw.split(b"HTTP/1.1 ")[1:]
        assert [int(answer[:3]) for answer in answers] == [200] * before + [status]
        for answer in answers[:-1]:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 5
        assert json.loads(answers[-1].partition(b"\r\n\r\n")[2])["error"]["code"] == CODES[status]
        assert (len(served.service.jobs), served.service.cancelled) == (before, 0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(("size", "status"), [(60_000, 200), (66_000, 431), (100_000, 431), (400_000, 431)])
async def test_the_limit_of_a_head_does_not_depend_on_how_it_comes(serve: Serve, size: int, status: int) -> None:
    async with serve(" a") as served:
        lines = b"".join(b"x-%d: %s\r\n" % (at, b"y" * 9_990) for at in range(size // 10_000))
        head = b"GET /health HTTP/1.1\r\nConnection: close\r\n" + lines
        head += b"x-z: %s\r\n\r\n" % (b"y" * (size % 10_000))
        for parts in ([head], [head[at : at + 7_000] for at in range(0, min(len(head), 80_000), 7_000)]):
            if status == 200 or parts == [head]:
                assert (await exchange(served, *parts))[0] == status


@pytest.mark.parametrize("third", [b"", POST])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_DISCONNECT_02_one_that_pipelined_and_leaves_is_noticed(
    serve: Serve, caplog: pytest.LogCaptureFixture, *, third: bytes, reset: bool, stream: bool
) -> None:
    asked = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": stream}).encode()
    whole = POST + b"Content-Length: %d\r\n\r\n%s" % (len(asked), asked)
    async with serve([300] * 5000, step_s=0.01, max_model_len=8192) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(whole + whole + third)
        await served.eventually(lambda: served.service.tokens_made > 3)
        await asyncio.sleep(0.05)
        if reset:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()
        await served.eventually(lambda: served.service.live == 0)
        assert len(served.service.jobs) == 1, "the one behind it never began"
        assert served.service.cancelled == 1
        await asyncio.sleep(0.05)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_one_that_pipelines_and_only_stops_sending_gets_all_its_answers(serve: Serve) -> None:
    async with serve([300] * 5, step_s=0.02) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(WHOLE * 3 + POST + b"Content-Length: 99\r\n\r\n{")
        writer.write_eof()
        raw = await asyncio.wait_for(reader.read(), PATIENCE)
        assert raw.count(b"HTTP/1.1 200 OK") == raw.count(b'"completion_tokens":5') == 3
        assert len(served.service.jobs) == 3
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_before_1_1_get_no_chunks(serve: Serve, *, stream: bool) -> None:
    asked = json.dumps({"prompt": "x", "max_tokens": 5, "stream": stream}).encode()
    old = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(asked), asked)
    async with serve([300] * 5, step_s=0.01) as served:
        status, headers, body = await exchange(served, old)
        assert (status, headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in headers
        assert "date" in headers
        if stream:
            data = events(body.decode())
            assert (len(data), data[-1]) == (6, "[DONE]")
        else:
            assert int(headers["content-length"]) == len(body)
            assert json.loads(body)["usage"]["completion_tokens"] == 5
