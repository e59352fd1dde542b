"""Policies are changed on the live daemon: nothing is lost, no logit changes, a bad candidate changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.streams import Result, run_all, run_each, wishes
from tests.e2e.test_equality import check_equal
from tests.e2e.timing import limit

FLAGS = (
    "--deterministic",
    "--dtype",
    "float32",
    "--kv-blocks",
    "40",
    "--max-running",
    "8",
    "--max-step-tokens",
    "64",
)
CHANGES = [
    ("discipline", "vllm"),
    ("prefill", "decode-first"),
    ("admission", "whole-life"),
    ("discipline", "sarathi"),
    ("preemption", "fewest-computed"),
    ("discipline", "builtin"),
    ("discipline", "kvyard"),
]


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_swaps_under_load_lose_nothing_and_change_no_logit(default_model: Path) -> None:
    wanted = wishes(28, seed=61, output=(6, 14))

    async def scene(running: DaemonProcess) -> list[Result]:
        task = asyncio.create_task(run_all(running.base, wanted))
        await asyncio.sleep(0.5)
        for number, (kind, name) in enumerate(CHANGES, 1):
            result = await asyncio.to_thread(running.ask, "policy", "swap", kind, name)
            assert result["ok"]
            assert result["generation"] == number
            if kind != "discipline":
                assert result["current"][kind] == name
        return await task

    with daemon(*FLAGS, model=default_model) as running:
        solo = run_each(running.base, wanted)
        check_equal(asyncio.run(scene(running)), solo, wanted)
        idle_again(running)
        status = running.status()
        assert status["discipline"] == "kvyard"
        assert status["generation"] == len(CHANGES)
        assert value(running, "kvyard_policy_generation") == len(CHANGES)


def refused(running: DaemonProcess, *arguments: str) -> str:
    """A command that must fail; what it said."""
    done = running.cli("policy", *arguments)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


def policies_in_charge(running: DaemonProcess) -> dict[str, str]:
    listing: list[dict[str, Any]] = running.status()["policies"]
    return {row["kind"]: row["name"] for row in listing}


def test_PLUGIN_02_an_unknown_name_lists_what_there_is(quick_daemon: DaemonProcess) -> None:
    before = policies_in_charge(quick_daemon)
    assert quick_daemon.cli("policy", "swap", "admission", "vlllm").returncode == 5
    said = refused(quick_daemon, "swap", "admission", "vlllm")
    assert "no admission policy 'vlllm'" in said
    assert "whole-life" in said
    assert policies_in_charge(quick_daemon) == before


def test_a_bad_parameter_changes_nothing(quick_daemon: DaemonProcess) -> None:
    before = policies_in_charge(quick_daemon)
    assert "at most 0.5" in refused(quick_daemon, "swap", "admission", "vllm", "watermark=7")
    assert policies_in_charge(quick_daemon) == before


@pytest.fixture(scope="module")
def running(quick_model_folder: Path) -> Iterator[DaemonProcess]:
    with daemon(*FLAGS, model=quick_model_folder) as process:
        yield process


def test_what_is_shown_is_what_is_in_force(running: DaemonProcess) -> None:
    running.ask("policy", "swap", "discipline", "sarathi")
    assert running.ask("policy", "show")["in_force"]["reserve_blocks"] is None, "nothing was decided yet"
    running.complete([100, 101, 102], max_tokens=2, ignore_eos=True)
    shown = running.ask("policy", "show")["in_force"]
    assert shown["phases"] == [["decode", "prompt", "admit"]]
    assert shown["reserve_blocks"] == 0
    assert (shown["queue_order"], shown["prefix_reuse"], shown["kv_blocks"]) == ("1 * arrived", False, 40)
    running.ask("policy", "swap", "prefill", "vllm")
    running.complete([100, 101, 102], max_tokens=2, ignore_eos=True)
    shown = running.ask("policy", "show")["in_force"]
    assert shown["phases"] == [["running", "admit"]], "chunking is the prefill policy's, whatever the name says"
    assert not shown["prompts_divided_by_policy"]


def test_live_parameters_survive_the_engines_death(running: DaemonProcess) -> None:
    before = running.status()
    running.ask("policy", "swap", "admission", "vllm")
    result = running.ask("policy", "set", "admission", "watermark=0.25")
    assert result["ok"]
    os.kill(running.engine_pid, signal.SIGKILL)
    restarts = before["engine"]["restarts"] + 1
    wait_until(lambda: running.status()["engine"]["restarts"] == restarts, limit(10), "its end")
    running.wait_ready(limit(30))
    rows = {row["kind"]: row for row in running.status()["policies"]}
    assert rows["admission"]["name"] == "vllm"
    shown = json.dumps(running.ask("policy", "show"))
    assert "0.25" in shown
    assert running.status()["generation"] == before["generation"] + 2


def test_PLUGIN_02_an_unknown_discipline_at_the_start_is_a_sentence(quick_model_folder: Path) -> None:
    with daemon("--discipline", "vlllm", model=quick_model_folder, wait=False) as running:
        assert running.process.wait(limit(20)) == 5, "the same status as for a swap"
        assert running.log.count("no discipline 'vlllm'; installed are: ") == 1
        assert "Traceback" not in running.log
