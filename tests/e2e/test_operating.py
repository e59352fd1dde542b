"""What an operator reads of a live daemon is what is so: blocks of each request, what is in charge, who is meant."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.quick_model import quick_model

BLOCK = 16
FLAGS = ("--dtype", "float32", "--kv-blocks", "48", "--max-running", "8", "--swap-blocks", "64")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with a small pool and a host pool."""
    folder = tmp_path_factory.mktemp("operating")
    with daemon(*FLAGS, model=quick_model(folder / "model")) as process:
        yield process


@pytest.fixture
def client(running: DaemonProcess) -> Iterator[Client]:
    with Client(running.socket) as each:
        yield each
        each.call("resume")
        each.call("policy.swap", {"kind": "discipline", "name": "kvyard", "params": {}})


def rows(client: Client) -> list[dict[str, Any]]:
    page: dict[str, Any] = client.call("requests", {"limit": 100})
    return list(page["rows"])


class Posted:
    """Requests under way in threads of their own, ended with the block."""

    def __init__(self, running: DaemonProcess, client: Client) -> None:
        self._running, self._client = running, client
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Posted:
        return self

    def post(self, prompt: list[int], **body: Any) -> None:  # noqa: ANN401 - any JSON value
        """One more request."""
        whole = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, **body}
        thread = threading.Thread(target=self._running.post, args=("/v1/completions", whole))
        thread.start()
        self._threads.append(thread)

    def __exit__(self, *_: object) -> None:
        self._client.call("resume")
        for request_id in {row["request_id"] for row in rows(self._client)}:
            self._running.cli("cancel", request_id)
        for thread in self._threads:
            thread.join(30)


def stopped(client: Client) -> list[dict[str, Any]]:
    """The rows when nothing moves any more."""
    client.call("pause")
    before: list[dict[str, Any]] = []
    while (now := [{**row, "age_s": 0} for row in rows(client)]) != before:
        before = now
        time.sleep(0.05)
    return before


def test_blocks_are_right_after_a_return_from_the_host(running: DaemonProcess, client: Client) -> None:
    client.call("policy.swap", {"kind": "preemption", "name": "fewest-computed", "params": {"how": "swap"}})
    with Posted(running, client) as posted:
        for number in range(4):
            posted.post([10 + number] * 100)
        back: list[dict[str, Any]] = []

        def returned() -> bool:
            back[:] = [r for r in rows(client) if r["state"] == "running" and r["preemptions"] and r["output_tokens"]]
            return bool(back)

        wait_until(returned, 30, "a return from the host pool")
        found = stopped(client)
        used = client.status().kv.used
        assert sum(row["blocks"] for row in found) == used
        for row in found:
            if row["state"] == "running" and row["output_tokens"]:
                assert row["computed_tokens"] == row["prompt_tokens"] + row["output_tokens"] - 1, row
                assert row["blocks"] == -(-row["computed_tokens"] // BLOCK)


def test_blocks_of_those_that_share_a_prompt(running: DaemonProcess, client: Client) -> None:
    with Posted(running, client) as posted:
        posted.post(list(range(1, 70)), n=3)
        wait_until(lambda: sum(row["output_tokens"] > 2 for row in rows(client)) == 3, 20, "three that decode")
        found = stopped(client)
        assert {row["computed_tokens"] - row["output_tokens"] for row in found} == {68}
        used = client.status().kv.used
        assert sum(row["blocks"] for row in found) == used + 2 * (69 // BLOCK), "full blocks of the prompt are shared"


def test_what_a_policy_said_goes_with_it(running: DaemonProcess, client: Client) -> None:
    def waiting() -> list[dict[str, Any]]:
        return [row for row in rows(client) if row["state"] == "waiting" and row["reason"] == "blocks"]

    with Posted(running, client) as posted:
        for number in (1, 2):
            posted.post([number] * 420)
        wait_until(waiting, 20, "one that waits for blocks")
        client.call("pause")
        assert client.call("policy.swap", {"kind": "admission", "name": "static", "params": {}})["ok"]
        wait_until(lambda: not waiting(), 5, "the reason's end")
        (last,) = [row for row in rows(client) if row["state"] == "waiting"]
        (told,) = client.call("explain", {"request_id": last["request_id"]})["sequences"]
        assert (told["waiting_for"]["reason"], told["waiting_for"]["rule"]) == ("paused", "static")
        assert client.status().requests.waiting_by_reason == {"paused": 1}
        assert last["reason"] == "paused"


def test_one_truth_about_what_is_in_charge(running: DaemonProcess, client: Client) -> None:
    said = running.cli("policy", "set", "admission", "aging=3").stdout
    assert said.startswith("admission aging: aging=3")
    assert "discipline kvyard (changed: admission.aging), generation" in running.cli("status").stdout
    shown = client.call("policy.show")
    assert (shown["discipline"], shown["changed"]) == ("kvyard", {"admission.aging": 3.0})
    assert "discipline: kvyard" in running.cli("policy", "show").stdout
    client.call("policy.swap", {"kind": "prefill", "name": "decode-first", "params": {}})
    assert "discipline mixed, generation" in running.cli("status").stdout
    assert "discipline: mixed" in running.cli("policy", "show").stdout
    assert client.status().changed == {}


def test_changed_parameters_outlive_the_engine(running: DaemonProcess, client: Client) -> None:
    client.call("policy.set", {"kind": "admission", "params": {"aging": 7}})
    restarts = client.status().engine.restarts
    os.kill(running.engine_pid, signal.SIGHUP)  # which it ignores
    os.kill(running.engine_pid, signal.SIGKILL)
    wait_until(lambda: client.status().engine.restarts == restarts + 1 and client.status().ready, 30, "a new engine")
    wait_until(lambda: client.status().policies[0].params, 10, "what it says of its policies")
    status = client.status()
    assert (status.discipline, status.policies[0].params["aging"]) == ("kvyard", 7.0)


def test_show_takes_no_word_for_a_kind(running: DaemonProcess) -> None:
    done = running.cli("policy", "show", "sglang")
    assert done.returncode != 0
    assert "'sglang' is not a kind of policy" in done.stderr
    assert "did you mean discipline/sglang" in done.stderr
    other = running.cli("policy", "show", "admission/orca").stdout
    assert other.startswith("admission orca") and "queue_order" not in other
    assert "queue_order" in running.cli("policy", "show", "admission").stdout
    assert running.cli("policy", "show", "discipline/sglang").stdout.startswith("discipline sglang")


def test_show_says_what_is_in_charge_and_what_is_not(running: DaemonProcess, client: Client) -> None:
    client.call("policy.set", {"kind": "admission", "params": {"aging": 7}})
    own = client.call("policy.show", {"kind": "discipline", "name": "kvyard"})
    aging = next(param for param in own["parts"]["admission"]["parameters"] if param["name"] == "aging")
    assert own["in_charge"] and aging["value"] == 7 != aging["default"]
    other = client.call("policy.show", {"kind": "discipline", "name": "vllm"})
    assert not other["in_charge"] and other["parts"]["admission"]["parameters"]
    assert client.call("policy.show", {"kind": "admission", "name": "aging"})["in_charge"]
    for kind in ("discipline", "admission", "preemption", "prefill"):
        lines = running.cli("policy", "show", f"{kind}/builtin").stdout.splitlines()
        assert lines[0].startswith(f"{kind} builtin ") and lines[1] == "  not in charge"
    client.call("policy.swap", {"kind": "discipline", "name": "builtin", "params": {}})
    assert client.call("policy.show", {"kind": "discipline", "name": "builtin"})["in_charge"]
    assert client.call("policy.show", {"kind": "prefill", "name": "builtin"})["in_charge"]
    assert not client.call("policy.show", {"kind": "discipline", "name": "kvyard"})["in_charge"]


def test_not_ready_while_paused(running: DaemonProcess, client: Client) -> None:
    assert running.get("/ready").status_code == 200
    client.call("pause")
    answer = running.get("/ready")
    assert answer.status_code == 503 and "paused" in answer.text
    assert running.cli("status").stdout.split()[2] == "paused"
    client.call("resume")
    assert running.get("/ready").status_code == 200


def test_the_engine_ignores_a_hang_up_and_status_tells_both_processes(running: DaemonProcess, client: Client) -> None:
    status = client.status()
    assert status.pid == running.process.pid
    os.kill(status.engine.pid or 0, signal.SIGHUP)
    assert running.complete([1, 2, 3], max_tokens=3)["choices"]
    assert client.status().engine.pid == status.engine.pid


def test_a_request_is_named_by_its_beginning_or_its_number(running: DaemonProcess, client: Client) -> None:
    with Posted(running, client) as posted:
        posted.post([1, 2, 3])
        posted.post([4, 5, 6])
        wait_until(lambda: len(rows(client)) == 2, 10, "two requests")
        client.call("pause")
        first, second = sorted(rows(client), key=lambda row: int(row["id"]))
        table = running.cli("top", "--once").stdout
        assert first["request_id"] in table, "piped on, ids are whole"
        assert first["request_id"] in running.cli("explain", first["request_id"][:20]).stdout
        assert second["request_id"] in running.cli("explain", str(second["id"])).stdout
        assert running.cli("explain", "cmpl-").returncode != 0
        assert running.cli("cancel", str(first["id"])).stdout == f"cancelled {first['request_id']}\n"
        wait_until(lambda: [row["id"] for row in rows(client)] == [second["id"]], 10, "one left")


def test_metrics_count_what_was_refused(running: DaemonProcess, client: Client) -> None:
    from tests.e2e.metrics import value

    name = "kvyard_requests_refused_total"
    codes = ("context_length_exceeded", "invalid_value", "not_found", "invalid_http")
    before = {code: value(running, name, code=code) for code in codes}
    assert running.post("/v1/completions", {"prompt": [1] * 3, "max_tokens": 10**6}).status_code == 400
    assert running.post("/v1/completions", {"prompt": [1], "temperature": -1}).status_code == 400
    assert running.get("/nothing").status_code == 404
    with socket.create_connection(("127.0.0.1", int(running.base.rpartition(":")[2])), 10) as raw:
        raw.sendall(b"hello\r\n\r\n")
        assert raw.recv(12) == b"HTTP/1.1 400"
    for code, count in before.items():
        assert value(running, name, code=code) == count + 1, code
