"""How long a step takes on a device that is not there: a linear model, and machines with stated coefficients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvyard.core.plan import Limits, Plan


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: what it costs at all, and what each part of its work adds."""

    base: float
    """Any step: weights read once, launches, sampling."""
    decode: float
    """Each decode."""
    prompt: float
    """Each prompt token."""
    context: float
    """Each token of KV that the step's rows read, their own chunk included."""
    pair: float = 0.0
    """Each (prompt token, token before it): attention within long prompts, which grows with the square."""
    copy: float = 0.0
    """Each block copied to the host pool or back."""

    def seconds(self, plan: Plan, decodes: int, prompt_tokens: int) -> float:
        """Duration of `plan`, which places that many decodes and prompt tokens."""
        spent = self.base + self.decode * decodes + self.prompt * prompt_tokens
        spent += self.context * float((plan.computed + plan.granted).sum())
        if self.pair and prompt_tokens:
            chunk = plan.granted > 1
            tokens, before = plan.granted[chunk], plan.computed[chunk]
            spent += self.pair * float(np.dot(tokens, before + tokens / 2))
        if plan.copies:
            spent += self.copy * copied_blocks(plan)
        return spent


def copied_blocks(plan: Plan) -> int:
    """Blocks that the step copies."""
    return sum(len(copy.source) for copy in plan.copies)


@dataclass(frozen=True, slots=True)
class Objective:
    """What counts as good service: most seconds to the first token, and on average from token to token."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a device: its step time, its limits, and the service expected of it."""

    name: str
    doc: str
    cost: StepCost
    limits: Limits
    objective: Objective


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            "smollm2-135m-cpu2",
            "SmolLM2-135M on two cores of a server CPU in bf16: 5 ms for one row, 23 ms for 64, prompts at"
            " 4,000 tokens/s, attention at the bandwidth of a bf16 cache, 23,040 bytes of KV a token",
            StepCost(base=4.8e-3, decode=0.28e-3, prompt=0.25e-3, context=0.6e-6, pair=0.04e-6, copy=60e-6),
            Limits(blocks=2912, block_size=16, max_running=64, max_step_tokens=2048, max_model_len=8192),
            Objective(ttft=5.0, tpot=0.1),
        ),
        Machine(
            "llama-8b-h100",
            "an 8B model (32 layers, 8 KV heads of 128) in bf16 on an H100-class card: 16 GB of weights at"
            " 2.8 TB/s, prompts at 25,000 tokens/s, 131,072 bytes of KV a token",
            StepCost(base=7e-3, decode=15e-6, prompt=40e-6, context=47e-9, pair=0.9e-9, copy=42e-6),
            Limits(blocks=24800, block_size=16, max_running=256, max_step_tokens=8192, max_model_len=131072),
            Objective(ttft=2.0, tpot=0.05),
        ),
        Machine(
            "llama-8b-24g",
            "the same 8B model in bf16 on a 24 GB card: 16 GB of weights at 520 GB/s, prompts at 3,800"
            " tokens/s, 131,072 bytes of KV a token",
            StepCost(base=33e-3, decode=60e-6, prompt=260e-6, context=250e-9, pair=8e-9, copy=170e-6),
            Limits(blocks=2400, block_size=16, max_running=128, max_step_tokens=2048, max_model_len=32768),
            Objective(ttft=10.0, tpot=0.15),
        ),
    )
}
"""Coefficients are derived from what is stated in `doc`, not fitted to a run: orders compare, seconds are rough."""
