"""Prefill against decode: what a long prompt every second does to those that decode.

Eight sequences decode for as long as the load lasts, and a prompt of 2,000 tokens with a short answer comes every
second. Disciplines differ in who waits: the decodes for the prompts, or the prompts for the decodes.
"""

from __future__ import annotations

from typing import Any

from kvyard.sim import disciplines
from kvyard.sim.arrivals import Arrival
from kvyard.sim.cost import Machine
from kvyard.sim.figures import percentiles
from kvyard.sim.simulation import Simulation

DISCIPLINES = ("vllm", "sarathi", "sglang", "tgi")
DECODERS = 8
DECODER_PROMPT = 32
PROMPT = 2000
ANSWER = 16
EVERY = 1.0
"""Seconds between two long prompts; the first comes after as long, when the decoders decode."""
HEAD = ("DISCIPLINE", "ITL p50 / p99 / worst ms", "TTFT p50 / p99 ms", "TOKENS/s")


def load(prompts: int, machine: Machine) -> list[Arrival]:
    """The decoders, which outlast the rest, and so many long prompts."""
    # No step is shorter than its base. Not longer than that needs, since some disciplines reserve all of it.
    tokens = min(int(EVERY * (prompts + 3) / machine.cost.base), machine.limits.max_model_len - DECODER_PROMPT)
    decoders = [Arrival(0.0, DECODER_PROMPT, tokens, tokens) for _ in range(DECODERS)]
    return decoders + [Arrival(EVERY * (1 + n), PROMPT, ANSWER, ANSWER) for n in range(prompts)]


def measure(text: str, machine: Machine, prompts: int) -> dict[str, Any]:
    """Figures of one discipline in virtual time, over so many long prompts; durations in seconds."""
    arrivals = load(prompts, machine)
    simulation = Simulation(arrivals, disciplines.make(*disciplines.parse(text)), machine.limits, machine.cost)
    seen = simulation.until(prompts).observer
    return {
        "decode_itl_s": percentiles(seen.gaps(DECODERS)),
        "decode_worst_s": float(seen.worst_gap[1 : DECODERS + 1].max()),
        "prompt_ttft_s": percentiles((seen.first - seen.arrived)[DECODERS + 1 :]),
        "output_tokens_per_s": float(seen.tokens.sum()) / simulation.run.seconds,
    }


def row(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    """A discipline's line of the table under HEAD."""
    itl, ttft = figures["decode_itl_s"], figures["prompt_ttft_s"]
    gaps = (itl["p50"], itl["p99"], figures["decode_worst_s"])
    waits = (ttft["p50"], ttft["p99"])
    return (
        name,
        " / ".join(f"{1e3 * value:.1f}" for value in gaps),
        " / ".join(f"{1e3 * value:.0f}" for value in waits),
        f"{figures['output_tokens_per_s']:.1f}",
    )
