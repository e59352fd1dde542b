"""A change of policies with thousands waiting: answered when it is done, nobody lost, no long pause."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import quick_model
from tests.e2e.records import recording
from tests.e2e.timing import limit

PROMPTS = 500
"""Of one HTTP request; each becomes a sequence."""
CHANGES = ("fair-share", "vllm-priority", "deadline", "sarathi", "kvyard")
"""Some of them order the queue anew."""
PAUSE_S = 0.05
"""Longest pause between two steps by a change of policies."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    flags = ("--dtype", "float32", "--kv-blocks", "512", "--max-running", "16", "--max-waiting", "20000")
    with daemon(*flags, model=quick_model(tmp_path_factory.mktemp("quick"))) as process:
        yield process


@pytest.mark.timeout(300)
@pytest.mark.parametrize("waiting", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_a_swap_with_thousands_waiting(running: DaemonProcess, waiting: int) -> None:
    with Client(running.socket, timeout=120) as client, recording(running) as records:
        before, served = client.status(), value(running, "kvyard_sequences_total", outcome="length")
        client.call("pause")
        async with httpx.AsyncClient(base_url=running.base, timeout=280) as http:
            tasks = [
                asyncio.create_task(http.post("/v1/completions", json=body(n))) for n in range(waiting // PROMPTS)
            ]
            await asyncio.to_thread(wait_until, lambda: total(client) == waiting, limit(60), "all of them")
            records.clear()
            client.call("resume")
            for number, name in enumerate(CHANGES, 1):
                result = await asyncio.to_thread(
                    client.call, "policy.swap", {"kind": "discipline", "name": name, "params": {}}
                )
                assert (result["ok"], result["generation"]) == (True, before.generation + number)
                status = client.status()
                assert status.discipline == name, "it is in charge when it is answered"
                assert status.requests.waiting > waiting // 4, "and hundreds still wait, also on a busy machine"
            answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers] == [200] * len(tasks)
        choices = [choice for answer in answers for choice in answer.json()["choices"]]
        assert len(choices) == waiting
        assert {choice["finish_reason"] for choice in choices} == {"length"}
        pauses = changes_of(records.steps)
        told = [event["data"] for event in client.call("events", {"limit": 100})]
        assert [data["message"] for data in told if data["kind"] == "ejected"] == [], "a long queue is nobody's fault"
    print(f"{waiting} waiting: pauses of the changes {', '.join(f'{pause * 1e3:.1f}' for pause in pauses)} ms")
    assert len(pauses) >= len(CHANGES) - 1
    assert max(pauses) < limit(PAUSE_S)
    idle_again(running)
    assert value(running, "kvyard_sequences_total", outcome="length") - served == waiting
    assert client_restarts(running) == 0


def body(number: int) -> dict[str, Any]:
    """Many small prompts in one request."""
    prompts = [[number, i % 250, i // 250] for i in range(PROMPTS)]
    return {"model": "smollm2-135m", "prompt": prompts, "max_tokens": 4, "ignore_eos": True, "priority": number % 3}


def total(client: Client) -> int:
    """Unfinished sequences."""
    found: int = client.call("requests", {"limit": 1})["total"]
    return found


def changes_of(records: list[dict[str, Any]]) -> list[float]:
    """Seconds between the steps around each change of policies."""
    return [
        (after["timings"]["gap"] + after["timings"]["inbox"]) / 1e9
        for before, after in itertools.pairwise(records)
        if after["generation"] != before["generation"]
    ]


def client_restarts(running: DaemonProcess) -> int:
    """Engines that were replaced."""
    with Client(running.socket) as client:
        return client.status().engine.restarts
