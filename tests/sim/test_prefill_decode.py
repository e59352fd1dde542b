"""Prefill against decode: the order of the disciplines in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from kvyard.sim import prefill_decode
from kvyard.sim.cost import MACHINES

PROMPTS = 12


@pytest.fixture(scope="module", params=["smollm2-135m-cpu2", "llama-8b-24g"])
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    machine = MACHINES[request.param]
    return {name: prefill_decode.measure(name, machine, PROMPTS) for name in prefill_decode.DISCIPLINES}


def test_the_order_of_stalls(found: dict[str, dict[str, Any]]) -> None:
    """Sarathi bounds a step, vLLM computes the prompt beside the decodes, the others without them."""
    p99 = {name: figures["decode_itl_s"]["p99"] for name, figures in found.items()}
    assert 2 * p99["sarathi"] < p99["vllm"] < p99["sglang"]
    worst = {name: figures["decode_worst_s"] for name, figures in found.items()}
    assert worst["sarathi"] < worst["vllm"] < min(worst["sglang"], worst["tgi"])


def test_the_order_of_first_tokens(found: dict[str, dict[str, Any]]) -> None:
    """What decodes win by waiting for nobody, prompts lose."""
    ttft = {name: figures["prompt_ttft_s"]["p50"] for name, figures in found.items()}
    assert max(ttft["sglang"], ttft["vllm"]) < ttft["sarathi"]
    assert ttft["sglang"] == pytest.approx(ttft["vllm"], rel=0.05)
    assert ttft["sglang"] <= ttft["tgi"] * 1.001, "a batch of one may have to wait"


def test_a_usual_step_is_the_same_for_all(found: dict[str, dict[str, Any]]) -> None:
    p50 = [figures["decode_itl_s"]["p50"] for figures in found.values()]
    assert max(p50) < 1.2 * min(p50)


def test_throughput_is_about_the_same(found: dict[str, dict[str, Any]]) -> None:
    rates = [figures["output_tokens_per_s"] for figures in found.values()]
    assert max(rates) < 1.3 * min(rates), "who waits changes, not how much is done"


def test_the_load() -> None:
    machine = MACHINES["smollm2-135m-cpu2"]
    arrivals = prefill_decode.load(3, machine)
    assert [arrival.at for arrival in arrivals[:8]] == [0.0] * 8
    assert [(arrival.at, arrival.prompt) for arrival in arrivals[8:]] == [(1.0, 2000), (2.0, 2000), (3.0, 2000)]
    assert all(arrival.output * machine.cost.base >= 5.0 for arrival in arrivals[:8]), "they outlast the prompts"


def test_a_line_of_the_table(found: dict[str, dict[str, Any]]) -> None:
    line = prefill_decode.row("vllm", found["vllm"])
    assert len(line) == len(prefill_decode.HEAD)
    assert line[0] == "vllm" and line[1].count("/") == 2
