"""The metrics against the clocks of clients, against each other, and under everything that could confuse them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvyard.control.client import Client, ControlError
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import quick_model
from tests.e2e.timing import limit

FLAGS = (
    *("--dtype", "float32", "--kv-blocks", "600", "--max-running", "16", "--max-step-tokens", "128"),
    *("--max-model-len", "2304"),
)
TTFT = "kvyard_time_to_first_token_seconds"
LONG = 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick_model(tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[DaemonProcess]:
    with daemon(*FLAGS, model=model) as process:
        yield process


def body(length: int, max_tokens: int, seed: int = 0, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """A request of random tokens."""
    rng = random.Random(seed)
    prompt = [rng.randrange(250) for _ in range(length)]
    return {"model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


async def first_token(http: httpx.AsyncClient, asked: dict[str, Any]) -> float:
    """Stream a request to its end; seconds to its first chunk with a token, by the client's clock."""
    began, seen = time.monotonic(), None
    async with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if seen is None and '"finish_reason"' in line:
                seen = time.monotonic() - began
    assert seen is not None
    return seen


def clients(running: DaemonProcess) -> httpx.AsyncClient:
    """A client for many requests at once."""
    return httpx.AsyncClient(base_url=running.base, timeout=120, limits=httpx.Limits(max_connections=200))


@pytest.mark.parametrize("requests", [10, pytest.param(50, marks=pytest.mark.slow)])
async def test_METRICS_04_the_time_to_the_first_token_is_the_clients(running: DaemonProcess, requests: int) -> None:
    """Long prompts at once, each computed in sixteen steps or more."""
    async with clients(running) as http:
        await first_token(http, body(LONG, 2))  # buffers grow once
        alone = min([await first_token(http, body(LONG, 2, seed)) for seed in (1, 2)])
        count, total = value(running, f"{TTFT}_count"), value(running, f"{TTFT}_sum")
        before = buckets(running, TTFT)
        theirs = await asyncio.gather(*(first_token(http, body(LONG, 3, 10 + seed)) for seed in range(requests)))
        at_most = {bound: count - before[bound] for bound, count in buckets(running, TTFT).items()}
        told = value(running, f"{TTFT}_count") - count, value(running, f"{TTFT}_sum") - total
        # A machine that was busy at first may be idle by now.
        alone = min([alone, *[await first_token(http, body(LONG, 2, seed)) for seed in (3, 4)]])
    assert told[0] == requests
    ours = told[1] / requests
    mean = sum(theirs) / requests
    print(f"time to first token: metrics {ours:.3f} s, clients {mean:.3f} s, alone {alone:.3f} s")
    # On a busy machine the clients, who all live in this process, look late.
    assert abs(ours - mean) <= max(0.1 * mean, limit(0.02))
    # Nobody has a first token before his prompt is computed: none in the buckets below half of that time.
    assert max(bound for bound, count in at_most.items() if count == 0) >= 0.4 * alone


def buckets(running: DaemonProcess, name: str) -> dict[float, float]:
    """Bound to cumulative count of a histogram."""
    found = {}
    for family in text_string_to_metric_families(running.get("/metrics").text):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                found[float(sample.labels["le"])] = sample.value
    return found


async def test_METRICS_05_the_moments_of_every_request_are_in_order(running: DaemonProcess) -> None:
    """A hundred mixed requests: arrival, admission, first token, last token, end; of one token, first is last."""
    rng = random.Random(5)
    asked = [body(rng.randint(1, 400), rng.choice((1, 1, 2, 7, 30)), seed) for seed in range(100)]
    async with clients(running) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=one) for one in asked))
    with Client(running.socket) as client:
        for one, answer in zip(asked, answers, strict=True):
            assert answer.status_code == 200
            (told,) = client.call("explain", {"request_id": answer.json()["id"]})["sequences"]
            after = told["after_s"]
            moments = [after[name] for name in ("admitted", "first_token", "last_token", "end")]
            assert None not in moments, told
            assert all(a <= b for a, b in itertools.pairwise([0.0, *moments])), told
            assert (after["first_token"] == after["last_token"]) is (one["max_tokens"] == 1), told
            assert after["end"] <= answer.elapsed.total_seconds() + 0.5


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.slow)])
async def test_METRICS_10_races_confuse_no_counter(model: Path, seconds: int) -> None:
    """Equal ids, cancellations at any moment and constant preemption; scraped all the time."""
    flags = ("--dtype", "float32", "--kv-blocks", "20", "--max-running", "8", "--max-step-tokens", "64")
    with daemon(*flags, model=model) as running:
        async with clients(running) as http:
            until = time.monotonic() + seconds
            counts = await asyncio.gather(
                scrapes(http, until), cancels(running, until), *(races(http, seed, until) for seed in range(12))
            )
        sent = sum(counts[2:])
        idle_again(running)
        assert value(running, "kvyard_metrics_faults_total") == 0
        assert value(running, "kvyard_preemptions_total") > 0
        assert value(running, "kvyard_sequences_total", outcome="cancelled") > 0
        assert value(running, "kvyard_sequences_total") == sent, "each is counted once, however it ended"
        assert value(running, "kvyard_e2e_seconds_count") == sent
        assert running.status()["engine"]["restarts"] == 0
        assert "Traceback" not in running.log
        assert "metrics failed" not in running.log


async def races(http: httpx.AsyncClient, seed: int, until: float) -> int:
    """Requests under one id, each given up at a random moment or served; how many were sent."""
    rng, sent = random.Random(seed), 0
    while time.monotonic() < until:
        asked = body(rng.randint(1, 60), rng.choice((1, 20, 60)), seed)
        call = http.post("/v1/completions", json=asked, headers={"X-Request-Id": "the-same"})
        sent += 1
        with contextlib.suppress(TimeoutError):
            # Given up only once it must have arrived: what the daemon never saw cannot be counted.
            await asyncio.wait_for(call, limit(rng.uniform(0.1, 0.4)) if rng.random() < 0.5 else limit(60))
    return sent


async def cancels(running: DaemonProcess, until: float) -> int:
    """Cancel whoever is there, some of them twice and some that have ended."""

    def work() -> int:
        done = 0
        with Client(running.socket) as client:
            ids: list[str] = []
            while time.monotonic() < until:
                ids = ids[-4:] + [row["request_id"] for row in client.call("requests", {"limit": 2})["rows"]]
                for id in ids:
                    with contextlib.suppress(ControlError):
                        client.call("cancel", {"request_id": id})
                        done += 1
                time.sleep(0.05)
        return done

    return await asyncio.to_thread(work)


async def scrapes(http: httpx.AsyncClient, until: float) -> int:
    """Scrape all the time, ten times or more; no counter goes back. How often."""
    done = 0
    before: dict[Any, float] = {}
    while time.monotonic() < until or done < 10:
        text = (await http.get("/metrics")).text
        now = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }
        assert all(now[key] >= old for key, old in before.items())
        before, done = now, done + 1
        await asyncio.sleep(0.1)
    return done
