"""Fault cases of leaks, against one real daemon: whatever ends a request, and wherever it is then, all comes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again
from tests.e2e.quick_model import quick_model
from tests.e2e.streams import MODEL
from tests.e2e.timing import limit

BLOCKS = 64
FLAGS = ("--kv-blocks", str(BLOCKS), "--swap-blocks", str(BLOCKS), "--max-running", "2", "--prefix-cache")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with daemon(*FLAGS, model=quick_model(tmp_path_factory.mktemp("quick"))) as process:
        process.complete("warm", max_tokens=2)
        yield process


@pytest.fixture
def client(running: DaemonProcess) -> Iterator[Client]:
    with Client(running.socket, timeout=60) as connected:
        yield connected
        idle_again(running)
        dump = connected.call("dump")["engine"]
        assert (dump["faults"], dump["host_blocks_used"], sum(dump["tables"].values())) == ([], 0, 0)


class Background:
    """A request on a thread of its own; `answer` waits for it."""

    def __init__(self, running: DaemonProcess, prompt: list[int], max_tokens: int) -> None:
        self._body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        self._running = running
        self._answer: list[httpx.Response] = []
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        self._answer.append(self._running.post("/v1/completions", self._body | {"temperature": 0}))

    def answer(self) -> httpx.Response:
        self._thread.join(limit(30))
        (found,) = self._answer
        return found


def rows(client: Client) -> list[dict[str, Any]]:
    """Unfinished sequences."""
    found: list[dict[str, Any]] = client.call("requests", {"limit": 100})["rows"]
    return found


def row_of(client: Client, prompt_tokens: int) -> dict[str, Any] | None:
    """The unfinished sequence with a prompt of that length."""
    return next((row for row in rows(client) if row["prompt_tokens"] == prompt_tokens), None)


def wait_for_state(client: Client, prompt_tokens: int, state: str) -> dict[str, Any]:
    """Wait until the sequence with a prompt of that length is in that state."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        row = row_of(client, prompt_tokens)
        found[:] = [row] if row is not None else []
        return row is not None and row["state"] == state

    wait_until(there, limit(20), f"the request of {prompt_tokens} tokens to be {state}")
    return found[0]


def stopped_with_one_swapped(client: Client) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Stop scheduling when one of two sequences is swapped out: it, and the other one; None when both have ended."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        client.call("pause")
        found[:] = sorted(rows(client), key=lambda row: row["state"] != "swapped")
        if not found or [row["state"] for row in found] == ["swapped", "running"]:
            return True
        client.call("resume")
        return False

    wait_until(there, limit(20), "one of two to be swapped")
    return (found[0], found[1]) if found else None


def cancel(client: Client, row: dict[str, Any]) -> None:
    """Cancel it on an operator's word."""
    assert client.call("cancel", {"request_id": row["request_id"]})["sequences"] == 1


def test_LEAK_01_a_queued_request_without_blocks_is_cancelled(running: DaemonProcess, client: Client) -> None:
    first, second = (Background(running, [1] * length, 256) for length in (8, 9))
    wait_for_state(client, 8, "running")
    wait_for_state(client, 9, "running")
    queued = Background(running, [2] * 10, 256)
    cancel(client, wait_for_state(client, 10, "waiting"))
    assert queued.answer().json()["error"]["code"] == "cancelled"
    for answer in (first.answer(), second.answer()):
        assert answer.json()["usage"]["completion_tokens"] == 256
    idle_again(running)
    running.complete("after", max_tokens=4)


def test_LEAK_03_cached_blocks_are_reclaimed(running: DaemonProcess, client: Client) -> None:
    before = client.call("dump")["engine"]["evicted_blocks"]
    for number in range(20):
        running.complete([number] * 128, max_tokens=8, ignore_eos=True)
        dump = client.call("dump")["engine"]
        assert (dump["blocks"]["used"], dump["faults"]) == (0, [])
        assert sum(dump["blocks"].values()) == BLOCKS
        if number >= 8:
            assert dump["evicted_blocks"] > before


def test_LEAK_07_cancelling_what_has_finished_is_told_and_harms_nobody(
    running: DaemonProcess, client: Client
) -> None:
    finished = running.complete("x", max_tokens=2)["id"]
    for name in (finished, finished, finished, "nobody"):
        with pytest.raises(ControlError) as refusal:
            client.call("cancel", {"request_id": name})
        assert refusal.value.code == "not-found"
    running.complete("after", max_tokens=2)
    assert "Traceback" not in running.log


@pytest.mark.timeout(240)
def test_LEAK_09_cancelled_while_its_kv_is_in_the_host_pool_or_on_its_way_back(
    running: DaemonProcess, client: Client
) -> None:
    client.call("policy.swap", {"kind": "preemption", "name": "fewest-computed", "params": {"how": "swap"}})
    try:
        done = 0
        for repeat in range(60):
            # Together they outgrow the pool after a few tokens; who has fewer tokens in KV goes: the shorter one,
            # unless a busy machine let it begin much earlier.
            client.call("pause")
            both = [Background(running, [repeat + 100 * number] * (510 - 30 * number), 1 << 9) for number in (0, 1)]
            wait_until(lambda: len(rows(client)) == 2, limit(20), "both to wait")
            client.call("resume")
            if (pair := stopped_with_one_swapped(client)) is not None:
                swapped, staying = pair
                assert client.call("dump")["engine"]["host_blocks_used"] > 0
                if done % 2:
                    cancel(client, swapped)
                    cancel(client, staying)
                    client.call("resume")
                else:  # in this order the swapped one is on its way back, or on a busy machine has ended
                    cancel(client, staying)
                    client.call("resume")
                    with contextlib.suppress(ControlError):
                        cancel(client, swapped)
                done += ["error" in asked.answer().json() for asked in both] == [True, True]
            client.call("resume")
            idle_again(running)
            dump = client.call("dump")["engine"]
            assert (dump["host_blocks_used"], dump["blocks"]["used"], dump["faults"]) == (0, 0, [])
            if done == 20:
                break
        assert done == 20
    finally:
        client.call("policy.swap", {"kind": "discipline", "name": "kvyard", "params": {}})
