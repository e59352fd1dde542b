"""The live load over HTTP, against a server that sends tokens at a known pace; tests/e2e has the real daemon."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kvyard.sim import live
from kvyard.sim.live import LiveError, Target
from kvyard.sim.prefill_decode import ANSWER, DECODER_PROMPT, DECODERS, PROMPT

PACE = 0.02


class Handler(BaseHTTPRequestHandler):
    """Streams two tokens an event, or answers with the server's status."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """One completion."""
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.bodies.append(body)
        if server.status != 200:
            self.send_error(server.status, "out of order")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for _ in range(body["max_tokens"] // 2):
                time.sleep(PACE)
                self.event(json.dumps({"choices": [{"text": "ab", "token_ids": [1, 2]}]}))
            self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            server.left += 1

    def event(self, data: str) -> None:
        """A server-sent event, torn between two chunks."""
        raw = f"data: {data}\n\n".encode()
        for part in (raw[:9], raw[9:]):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@contextmanager
def served(status: int = 200) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.status, server.bodies, server.left = status, [], 0  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def target(server: Any) -> Target:  # noqa: ANN401 - the server above
    return Target(f"http://127.0.0.1:{server.server_address[1]}", "m", 8192)


def test_the_load_and_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.05)
    with served() as server:
        found = live.measure(target(server), prompts=3)
        bodies = server.bodies
    assert [len(body["prompt"]) for body in bodies[:DECODERS]] == [DECODER_PROMPT] * DECODERS
    assert [len(body["prompt"]) for body in bodies[DECODERS:]] == [PROMPT] * 3
    assert all(body["max_tokens"] == ANSWER for body in bodies[DECODERS:])
    assert all(body["ignore_eos"] and body["stream"] and body["temperature"] == 0 for body in bodies)
    assert len({tuple(body["prompt"]) for body in bodies}) == DECODERS + 3, "nothing is shared"
    # Two tokens an event: half of the gaps are the pace, half are none.
    assert found["decode_itl_s"]["mean"] == pytest.approx(PACE / 2, rel=1.0)
    assert found["decode_itl_s"]["p99"] >= PACE
    assert found["decode_worst_s"] >= found["decode_itl_s"]["p99"]
    assert found["prompt_ttft_s"]["p50"] >= PACE
    assert 100 < found["output_tokens_per_s"] <= 2 * (DECODERS + 3) / PACE


def test_nothing_of_an_earlier_measurement_is_in_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.01)
    with served() as server:
        for _ in range(2):
            live.measure(target(server), prompts=1)
        first, second = server.bodies[: DECODERS + 1], server.bodies[DECODERS + 1 :]
    assert sorted(body["prompt"] for body in first) == sorted(body["prompt"] for body in second), "the same load"
    salts = [{body["cache_salt"] for body in run} for run in (first, second)]
    assert [len(run) for run in salts] == [1, 1]
    assert salts[0] != salts[1] and "" not in salts[0] | salts[1]


def test_decoders_are_stopped_when_the_last_prompt_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.05)
    monkeypatch.setattr(live, "DECODE_RATE", 10_000.0)
    with served() as server:
        live.measure(target(server), prompts=1)
        until = time.monotonic() + 10
        while server.left < DECODERS and time.monotonic() < until:
            time.sleep(0.01)
        assert server.left == DECODERS, "they went away in the midst of their answers"


def test_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.01)
    with served(status=503) as server, pytest.raises(LiveError, match=r"9 of 9 streams failed: status 503"):
        live.measure(target(server), prompts=1)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.01)
    with pytest.raises(LiveError, match="streams failed: ConnectionRefused"):
        live.measure(Target("http://127.0.0.1:9", "m", 8192), prompts=1)
