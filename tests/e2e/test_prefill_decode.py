"""Prefill against decode on the real daemon: one command, all disciplines in turn, what was in charge put back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kvyard.sim.prefill_decode import DISCIPLINES

from tests.e2e.daemon import daemon

pytestmark = pytest.mark.alone

COMMAND = [sys.executable, "-m", "kvyard.cli.main", "sim", "prefill-vs-decode", "--json"]


def test_on_a_running_daemon(default_model: Path) -> None:
    with daemon("--max-step-tokens", "2048", "--discipline", "sarathi", model=default_model) as running:
        words = [*COMMAND, "--socket", str(running.socket), "--prompts", "1", "-d", "vllm", "-d", "sglang"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert running.status()["discipline"] == "sarathi", "what was in charge before is again"
    for where in ("virtual", "live"):
        assert list(found[where]) == ["vllm", "sglang"]
        for figures in found[where].values():
            assert 0 < figures["decode_itl_s"]["p50"] <= figures["decode_worst_s"]
            assert figures["prompt_ttft_s"]["p50"] > 0
            assert figures["output_tokens_per_s"] > 0
    # A prompt of 2,000 tokens in one step: whoever decodes waits for all of it, on any machine.
    vllm = found["live"]["vllm"]
    assert vllm["decode_worst_s"] > 3 * vllm["decode_itl_s"]["p50"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_order_is_that_of_virtual_time(default_model: Path) -> None:
    """By one command that starts its own daemon; needs a machine that nobody else uses."""
    words = [*COMMAND, "--live", "--model", str(default_model), "--prompts", "15"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    live = json.loads(done.stdout)["live"]
    assert list(live) == list(DISCIPLINES)
    p99 = {name: figures["decode_itl_s"]["p99"] for name, figures in live.items()}
    assert p99["sarathi"] < 0.7 * min(p99["vllm"], p99["sglang"], p99["tgi"])
