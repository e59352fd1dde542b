"""The command line and the metrics against the real daemon: one start, every verb."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kvyard.control.client import Client
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.timing import limit


@pytest.fixture(scope="module")
def running(default_model: Path) -> Iterator[DaemonProcess]:
    with daemon("--kv-blocks", "200", "--max-running", "2", model=default_model) as process:
        yield process


def test_status(running: DaemonProcess) -> None:
    status = running.status()
    assert status["ready"] and status["model"]["id"] == "smollm2-135m"
    assert status["limits"]["max_running"] == 2 and status["kv"]["total"] == 200
    text = running.cli("status").stdout
    assert "ready" in text and running.base in text


def test_generate(running: DaemonProcess) -> None:
    result = running.ask("generate", "The capital of France is", "--raw", "--max-tokens", "8", "--temperature", "0")
    assert "Paris" in result["text"] and len(result["token_ids"]) == 8
    assert result["finish_reason"] == "length"
    again = running.cli("generate", "The capital of France is", "--raw", "--max-tokens", "8", "--temperature", "0")
    assert again.returncode == 0 and again.stdout == result["text"] + "\n"


def test_swap_and_set(running: DaemonProcess) -> None:
    before = running.status()["generation"]
    done = running.ask("policy", "swap", "discipline", "vllm")
    assert done["ok"] and done["generation"] == before + 1
    active = {(row["kind"], row["name"]) for row in running.ask("policy", "list")["policies"] if row["active"]}
    assert ("admission", "vllm") in active and ("discipline", "vllm") in active
    assert running.ask("policy", "set", "admission", "watermark=0.02")["ok"]
    assert re.search(r"watermark +0\.02 ", running.cli("policy", "show", "admission").stdout)
    refused = running.cli("policy", "swap", "admission", "no-such")
    assert refused.returncode == 5 and "installed are" in refused.stderr
    assert running.cli("policy", "set", "admission", "watermark=7").returncode == 2
    assert 'admission="vllm"' in running.get("/metrics").text


def test_what_was_done_is_in_the_log_with_who_did_it(running: DaemonProcess) -> None:
    running.ask("pause")
    assert running.status()["paused"]
    running.ask("resume")
    lines = running.cli("events", "--json").stdout.splitlines()
    entries = [json.loads(line)["data"] for line in lines]
    assert [entry["method"] for entry in entries if entry["kind"] == "control"][-2:] == ["pause", "resume"]
    assert all(entry["who"]["pid"] > 0 for entry in entries if entry["kind"] == "control")


def test_clients_that_go_away_leave_every_gauge_at_its_base(running: DaemonProcess) -> None:
    """Nothing is left to run after the last cancel, and still the gauges say so."""
    body = json.dumps(
        {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 190, "ignore_eos": True, "stream": True}
    )
    with contextlib.ExitStack() as streams:
        for _ in range(4):
            connection = http.client.HTTPConnection(running.base.removeprefix("http://"))
            streams.callback(connection.close)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_until(lambda: value(running, "kvyard_sequences_running") == 2, 20, "two to run")
        wait_until(lambda: value(running, "kvyard_sequences_waiting") == 2, 5, "two to wait")
        assert value(running, "kvyard_sequences_waiting_by_reason", reason="slots") == 2
        page = running.ask("top", "--once")["requests"]
        assert page["total"] == 4 and {row["state"] for row in page["rows"]} == {"running", "waiting"}
    idle_again(running)
    assert value(running, "kvyard_metrics_faults_total") == 0


def test_an_operator_cancels(running: DaemonProcess) -> None:
    body = {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", running.base + "/v1/completions", json=body, timeout=30) as answer:
        with Client(running.socket) as client:
            wait_until(lambda: client.call("requests")["total"] == 1, 10, "the request")
            request_id = client.call("requests")["rows"][0]["request_id"]
        assert running.cli("cancel", request_id).returncode == 0
        "".join(answer.iter_text())
    idle_again(running)
    assert running.cli("cancel", request_id).returncode == 1


def test_tokens_counted_are_those_of_the_usage(running: DaemonProcess) -> None:
    before = [value(running, f"kvyard_{kind}_tokens_total") for kind in ("prompt", "output")]
    usage = running.complete("One two three", max_tokens=7, ignore_eos=True, n=2)["usage"]
    after = [value(running, f"kvyard_{kind}_tokens_total") for kind in ("prompt", "output")]
    assert after[0] - before[0] == usage["prompt_tokens"]
    assert after[1] - before[1] == usage["completion_tokens"] == 14


def test_metrics_08_names_from_outside_make_no_series(running: DaemonProcess) -> None:
    def series() -> int:
        families = text_string_to_metric_families(running.get("/metrics").text)
        return sum(len(family.samples) for family in families)

    before = series()
    with httpx.Client(base_url=running.base, timeout=limit(30)) as client:
        for index in range(1000):
            assert client.get(f"/no/such/{index}").status_code == 404
            body = {"model": f"model-{index}", "prompt": "x", "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 404
    assert series() - before <= 5


def test_the_engine_may_not_operate_the_daemon(running: DaemonProcess) -> None:
    """What the engine's process is told by the kernel's word for it is covered elsewhere; here, that it is known."""
    assert running.engine_pid != running.process.pid
    with Client(running.socket) as client:
        assert client.hello.pid == running.process.pid == client.server_pid()


def test_config_and_dump(running: DaemonProcess) -> None:
    rows = {row["name"]: row for row in running.ask("config", "show", "--running")}
    assert rows["kv_blocks"]["value"] == 200 and rows["kv_blocks"]["origin"] == "flag --kv-blocks"
    dump = running.ask("dump")
    assert {"status", "requests", "events", "config", "engine"} <= set(dump)


def test_a_second_daemon_at_the_same_socket_is_refused(running: DaemonProcess, default_model: Path) -> None:
    done = running.cli("serve", "--model", str(default_model), "--port", "0")
    assert done.returncode == 6
    assert f"pid {running.process.pid}" in done.stderr and "kvyard drain" in done.stderr
    assert running.status()["ready"]


def test_drain_last(running: DaemonProcess) -> None:
    assert running.cli("drain").returncode == 0
    assert running.process.wait(10) == 0
    assert not running.socket.exists()
    assert running.cli("status").returncode == 7
