"""Who may use a real daemon, from where, and who is cut off: keys, browsers' origins, readers that do not read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from kvyard.control.client import Client
from kvyard.front.keys import make_key

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.quick_model import quick_model
from tests.e2e.timing import limit

PAGE = "https://chat.example.org"


@dataclass
class Guarded:
    """A daemon with two keys in force."""

    running: DaemonProcess
    file: Path
    ann: str
    bob: str

    def get(self, path: str, secret: str | None = None) -> httpx.Response:
        """GET, with a key if one is given."""
        return httpx.get(self.running.base + path, headers=bearer(secret), timeout=limit(10), verify=False)

    def post(self, body: dict[str, object], secret: str | None = None) -> httpx.Response:
        """A completion, with a key if one is given."""
        headers = bearer(secret)
        return httpx.post(
            self.running.base + "/v1/completions", json=body, headers=headers, timeout=limit(30), verify=False
        )


def bearer(secret: str | None) -> dict[str, str]:
    return {} if secret is None else {"authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    ann, ann_key = make_key("ann", "blue")
    bob, bob_key = make_key("bob")
    file = folder / "keys"
    file.write_text(f"{ann_key.line}\n{bob_key.line}\n")
    flags = ("--api-key-file", str(file), "--cors-origins", PAGE, "--client-buffer-kib", "64", "--max-running", "4")
    with daemon(*flags, "--max-waiting", "4", model=quick_model(folder / "model")) as running:
        yield Guarded(running, file, ann, bob)


def test_a_key_lets_in_and_nothing_else_does(guarded: Guarded) -> None:
    body = {"prompt": "x", "max_tokens": 2, "user": "somebody else"}
    for secret in (None, "kv-wrong", guarded.ann[:-1]):
        refused = guarded.post(dict(body), secret)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"].startswith("Bearer ")
    for secret in (guarded.ann, guarded.bob):
        assert guarded.post(dict(body), secret).status_code == 200


def test_the_ready_line_says_where_the_key_goes(guarded: Guarded) -> None:
    (tried,) = [line for line in guarded.running.lines if "try:" in line]
    assert "-H 'Authorization: Bearer YOUR_KEY'" in tried


def test_probes_are_open_and_metrics_are_not(guarded: Guarded) -> None:
    assert [guarded.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
    assert [guarded.get(path).status_code for path in ("/metrics", "/v1/models", "/version")] == [401] * 3
    text = guarded.get("/metrics", guarded.bob).text
    assert 'code="invalid_api_key"' in text


def test_the_queue_names_the_keys_tenant(guarded: Guarded) -> None:
    with Client(guarded.running.socket) as client, ThreadPoolExecutor(1) as threads:
        client.call("pause")
        try:
            asked = threads.submit(guarded.post, {"prompt": "x", "max_tokens": 1, "user": "red"}, guarded.ann)
            wait_until(lambda: client.call("requests")["total"] == 1, limit(5), "the request to wait")
            rows = client.call("requests")["rows"]
        finally:
            client.call("resume")
        assert asked.result().status_code == 200
    assert {row["tenant"] for row in rows} == {"blue"}


def test_a_preflight_needs_no_key_and_only_the_named_origin_is_answered(guarded: Guarded) -> None:
    ask = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    url = guarded.running.base + "/v1/chat/completions"
    answer = httpx.options(url, headers=ask)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    other = httpx.options(url, headers={**ask, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_hangup_signal_takes_changed_keys_over_and_keeps_the_old_where_the_file_is_bad(guarded: Guarded) -> None:
    running, before = guarded.running, guarded.file.read_text()
    carl, carl_key = make_key("carl")
    reloads = running.log.count("config.reloaded")
    guarded.file.write_text(carl_key.line + "\n")
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: running.log.count("config.reloaded") > reloads, limit(5), "the reload")
    assert [guarded.get("/v1/models", secret).status_code for secret in (guarded.ann, carl)] == [401, 200]
    guarded.file.write_text("nonsense\n")
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "config.refused" in running.log, limit(5), "the refusal")
    assert guarded.get("/v1/models", carl).status_code == 200
    guarded.file.write_text(before)
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: running.log.count("config.reloaded") > reloads + 1, limit(5), "the reload")
    assert guarded.get("/v1/models", guarded.ann).status_code == 200


def test_a_pipe_in_the_place_of_the_keys_holds_nobody_up(guarded: Guarded) -> None:
    running, before = guarded.running, guarded.file.read_text()
    guarded.file.unlink()
    os.mkfifo(guarded.file)
    reloads = running.log.count("config.reloaded")
    try:
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "no regular file" in running.log, limit(5), "the refusal")
        assert guarded.get("/v1/models", guarded.ann).status_code == 200
    finally:
        guarded.file.unlink()
        guarded.file.write_text(before)
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: running.log.count("config.reloaded") > reloads, limit(5), "the reload")


def test_CAPACITY_06_a_burst_is_refused_on_arrival(guarded: Guarded) -> None:
    """A cap of 8 (4 run, 4 wait) and 64 long prompts at once; scheduling stands still until 56 are refused."""
    with Client(guarded.running.socket) as client:
        client.call("pause")
        try:
            statuses, waits = asyncio.run(_burst(guarded, 64, lambda: client.call("resume")))
        finally:
            client.call("resume")
    # No refusal waited for the tokenizer, which has one thread: 8 were counted before it began.
    assert statuses == {429: 56, 200: 8}
    assert max(waits) < limit(0.2), max(waits)


async def _burst(guarded: Guarded, count: int, resume: Callable[[], object]) -> tuple[Counter[int], list[float]]:
    """Statuses of all, and the seconds from sending a request to its refusal, over connections made before."""
    url = urlsplit(guarded.running.base)
    text = "word " * 750  # nearly all that the model's window holds, and long enough for the tokenizer's thread
    statuses: Counter[int] = Counter()
    waits: list[float] = []
    wires = [await asyncio.open_connection(url.hostname, url.port) for _ in range(count)]

    async def ask(at: int) -> tuple[int, float]:
        reader, writer = wires[at]
        began = time.monotonic()
        writer.write(_request(guarded, {"prompt": f"{at} {text}", "max_tokens": 1}))
        status = int((await reader.readline()).split()[1])
        wait = time.monotonic() - began
        writer.close()
        return status, wait

    async with asyncio.timeout(limit(30)):
        for done in asyncio.as_completed([ask(at) for at in range(count)]):
            status, wait = await done
            statuses[status] += 1
            if status == 429:
                waits.append(wait)
                if len(waits) == count - 8:
                    await asyncio.to_thread(resume)
    return statuses, waits


def test_keys_stand_nowhere(guarded: Guarded) -> None:
    running = guarded.running
    guarded.post({"prompt": "x", "max_tokens": 1, "odd_field": 1}, guarded.ann)
    said = running.log + json.dumps(running.ask("config", "show", "--running")) + json.dumps(running.ask("dump"))
    said += guarded.get("/metrics", guarded.ann).text + running.cli("events", "--json").stdout
    for secret in (guarded.ann, guarded.bob):
        assert secret not in said
    for line in guarded.file.read_text().splitlines():
        assert line.split("$")[1] not in said
    assert str(guarded.file) in said


def test_DISCONNECT_07_a_reader_that_stops_is_cut_by_bytes_and_holds_no_kv(guarded: Guarded) -> None:
    """Some megabytes of a stream that nobody reads lie in the kernel's buffers; what is more stays in the daemon."""
    running = guarded.running
    cuts = _cuts(guarded)
    wanted = {"prompt": "x", "max_tokens": 4000, "n": 8, "stream": True, "ignore_eos": True, "logprobs": 20}
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((urlsplit(running.base).hostname, urlsplit(running.base).port))
        sock.sendall(_request(guarded, wanted))
        assert sock.recv(12) == b"HTTP/1.1 200"  # and no byte more
        wait_until(lambda: _cuts(guarded) == cuts + 1, limit(30), "the client to be cut")
        metrics = guarded.get("/metrics", guarded.bob).text
        assert 'kvyard_kv_blocks{model_name="smollm2-135m",state="used"} 0' in metrics
        assert '"reason": "buffer"' in running.log
        # The 30 s after which a stuck reader is cut by time have not passed; the stream did not get to its end.
        sock.settimeout(limit(5))
        received = b""
        try:
            while part := sock.recv(1 << 16):
                received += part
        except ConnectionResetError:
            pass
        assert b"[DONE]" not in received


def _request(guarded: Guarded, fields: dict[str, object]) -> bytes:
    body = json.dumps(fields)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {guarded.bob}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


def _ask(guarded: Guarded, **fields: object) -> socket.socket:
    url = urlsplit(guarded.running.base)
    sock = socket.create_connection((url.hostname or "", url.port or 80), timeout=limit(20))
    sock.sendall(_request(guarded, {"prompt": "x", "ignore_eos": True, **fields}))
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_stops_sending_gets_its_answer(guarded: Guarded, stream: bool) -> None:
    with _ask(guarded, max_tokens=100, stream=stream) as sock:
        sock.shutdown(socket.SHUT_WR)
        received = b""
        while part := sock.recv(1 << 16):
            received += part
    assert b"HTTP/1.1 200" in received
    assert b'"finish_reason":"length"' in received


@pytest.mark.parametrize("stream", [False, True])
def test_DISCONNECT_02_an_orderly_close_ends_the_request(guarded: Guarded, stream: bool) -> None:
    """Nothing runs, waits or holds a block within a second, and no token is made for it any more."""

    def read(series: str) -> int:
        return _metric(guarded, series + "{")

    def gone() -> bool:
        left = ("kvyard_sequences_running", "kvyard_sequences_waiting")
        return not any(map(read, left)) and not _metric(guarded, "kvyard_kv_blocks", 'state="used"')

    made = read("kvyard_output_tokens_total")
    with _ask(guarded, max_tokens=4000, stream=stream):
        wait_until(lambda: read("kvyard_output_tokens_total") > made, limit(5), "its first tokens")
    wait_until(gone, limit(1), "the request to be gone")
    made = read("kvyard_output_tokens_total")
    time.sleep(0.3)
    assert read("kvyard_output_tokens_total") <= made + 5


def _metric(guarded: Guarded, name: str, label: str = "") -> int:
    """The one series whose line begins with `name` and has the label."""
    lines = guarded.get("/metrics", guarded.bob).text.splitlines()
    (line,) = [line for line in lines if line.startswith(name) and label in line]
    return int(float(line.split()[-1]))


def _cuts(guarded: Guarded) -> int:
    return _metric(guarded, "kvyard_clients_cut_total", 'reason="buffer"')
